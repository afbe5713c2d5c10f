"""The command line of all verbs: fast and complete help, wrong usage, and exit codes, without servers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierlane.cli import app
from tierlane.command import VerbCommand
from tierlane.settings.declaration import flag, variable
from tierlane.settings.sections import SETTINGS

ROLES = ("up", "gateway", "scheduler", "worker", "admin", "migrate")
TOOLS = {
    "tier": ["list", "show", "set", "create", "delete"],
    "customer": ["list", "show", "create", "set", "suspend", "activate", "rotate-secret", "delete"],
    "key": ["list", "show", "create", "set", "rotate", "revoke"],
    "quota": ["list", "set", "remove"],
    "model": ["list", "show", "set", "create", "delete"],
    "price": ["list", "set", "remove"],
    "apply": [],
    "export": [],
    "operator": ["list", "create", "set", "rotate", "revoke"],
    "requests": [],
    "config-changes": [],
    "cell": ["list", "open", "drain", "close"],
    "gpu": ["list", "cordon", "uncordon"],
    "queue": ["list", "pause", "resume"],
    "top": [],
    "check": [],
    "explain": [],
    "dlq": ["list", "show", "requeue", "purge"],
    "batch": ["list", "show", "cancel"],
    "usage": ["export"],
    "bench": [],
    "simulate": [],
    "chaos": [],
}
VERBS = [
    *([role] for role in ROLES),
    *([tool, verb] for tool, verbs in TOOLS.items() for verb in verbs),
    *([tool] for tool, verbs in TOOLS.items() if not verbs),
    ["check", "model"],
]
ADMIN = (
    "tier", "customer", "key", "quota", "model", "price", "apply", "cell", "gpu", "queue", "operator", "requests",
    "config-changes",
)  # fmt: skip
HEAVY = {"pydantic", "pydantic_settings", "redis", "aiohttp", "torch", "sqlalchemy", "asyncpg", "rich", "psutil"}
PROGRAM = """
import sys
from tierlane.cli import app
from tierlane.command import VerbCommand
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print("IMPORTED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""
NO_STACK = {"TIERLANE_DATABASE_URL": "", "TIERLANE_REDIS_URL": "", "TIERLANE_DATA_DIR": "/nonexistent"}


def commands_of(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    return re.findall(r"^  (\S+)", result.stdout.partition("Commands:")[2], re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tierlane cust", ["customer"]),
        ("tierlane gateway --grpc-p", ["--grpc-port"]),
        ("tierlane customer cr", ["create"]),
        ("tierlane customer create --spr", ["--spread"]),
        ("tierlane explain --ref", ["--refusals"]),
        ("tierlane check mod", ["model"]),
        ("tierlane bench --r", []),
    ],
)
def test_the_shell_completes_verbs_and_options(words: str, completed: list[str]) -> None:
    """Also those of verbs whose code is imported when they run."""
    env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TIERLANE_COMPLETE": "complete_bash"}

    result = subprocess.run(
        [str(Path(sys.executable).with_name("tierlane"))],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.split() == completed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["worker", "--help"],
        ["up", "-h"],
        ["check", "model", "--help"],
        *([tool, "-h"] for tool in TOOLS),
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help loads none of the libraries that the verbs need, so it is fast."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    *lines, last = done.stdout.splitlines()

    assert lines
    assert last.startswith("IMPORTED ")
    assert "tierlane" in last.split()
    assert HEAVY & set(last.split()) == set()


def test_the_help_lists_all_verbs() -> None:
    """Of the command and of each group."""
    assert commands_of()[: len(ROLES) + len(TOOLS)] == [*ROLES, *TOOLS]
    for tool, verbs in TOOLS.items():
        assert commands_of(tool)[: len(verbs)] == verbs


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_options_show_their_variable_and_default(words: list[str]) -> None:
    """Each option has [env: X] [default: Y], no option takes a secret, and verbs that write take an actor."""
    help_text = CliRunner().invoke(app, [*words, "--help"]).stdout
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", help_text.partition("Options:")[2])[1:]]
    options = [text for text in options if "--help" not in text]

    assert help_text.startswith(f"Usage: tierlane {' '.join(words)} ")
    assert options
    assert [text for text in options if "[env: " not in text or "[default: " not in text] == []
    for secret in ("--redis-url", "--database-url", "--service-token"):
        # The URL of a cell has no password: the table rejects one.
        assert secret not in help_text or (words, secret) == (["cell", "open"], "--redis-url")
    if words[0] in ADMIN:
        assert "-o, --output <table|json>" in help_text
        assert (
            ("--dry-run" in help_text)
            == ("--actor" in help_text)
            == (words[-1] not in ("list", "show", "requests", "config-changes"))
        )
    if words[0] in ROLES:
        for name, setting in SETTINGS.items():
            if f"{flag(name)} " in " ".join(options):
                assert f"[env: {variable(name)}] [default: {setting.default or 'none'}]" in " ".join(options)


@pytest.mark.parametrize("words", [[], *VERBS, *([tool] for tool, verbs in TOOLS.items() if verbs)], ids=" ".join)
def test_help_fits_into_80_columns_and_has_examples_that_parse(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off, and each example is a complete command line of this verb or, for a group, of one of its verbs."""
    parsed: list[str] = []
    monkeypatch.setattr(VerbCommand, "invoke", lambda _, context: parsed.append(context.command_path))
    help_text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
    examples = re.sub(r"\\\n *", "", help_text.partition("  Example:\n")[2]).partition("\n\n")[0].splitlines()

    lines = [line for line in help_text.splitlines() if not line.startswith("Usage:")]
    assert [line for line in lines if len(line) > 80 or line.endswith("...")] == []
    assert examples
    for example in examples:
        result = CliRunner().invoke(app, example.split()[1:])
        assert (result.exit_code, result.stderr) == (0, ""), example
        assert " ".join(parsed.pop().split()).startswith(" ".join(["tierlane", *words])), example


@pytest.mark.parametrize("verb", ["set", "remove"])
def test_a_negative_quota_is_named_as_such(verb: str) -> None:
    """It begins like an option."""
    result = CliRunner().invoke(app, ["quota", verb, "acme", "-5/day"], env=NO_STACK)

    assert result.exit_code == 2
    assert "The quota must be positive, such as 10000/day, got '-5/day'." in " ".join(result.stderr.split())


@pytest.mark.parametrize("arguments", [["top", "--once"], ["check"], ["customer", "list"], ["admin"]], ids=" ".join)
def test_without_a_stack_it_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    """The message names where a local stack was expected."""
    result = CliRunner().invoke(app, arguments, env=NO_STACK)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "no local stack runs in /nonexistent" in result.stderr


@pytest.mark.parametrize(("pid", "starting"), [(str(os.getpid()), True), ("", False), ("99999999", False)])
def test_a_stack_that_is_starting_is_named(tmp_path: Path, pid: str, starting: bool) -> None:
    """Its lock has the PID; it is empty after a stack has ended, and has that of a process that is gone after a kill."""
    (tmp_path / "lock").write_text(pid)
    result = CliRunner().invoke(app, ["top", "--once", "--data-dir", str(tmp_path)], env=NO_STACK)

    assert (f"a stack is starting in {tmp_path} (pid {pid}); wait" in result.stderr) is starting
    assert ("no local stack runs in" in result.stderr) is not starting


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["gateway", "--port", "abc"],
            "TIERLANE_PORT: must be an integer from 0 to 65535, got 'abc' (set by --port)\n",
        ),
        (
            ["worker", "--config", "absent.toml"],
            "TIERLANE_CONFIG: cannot read absent.toml: No such file or directory\n",
        ),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(arguments: list[str], line: str) -> None:
    """Nothing but the line is printed."""
    result = CliRunner().invoke(app, arguments)

    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


def test_a_missing_required_setting_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that is started without its settings."""
    monkeypatch.delenv("TIERLANE_REDIS_URL", raising=False)
    result = CliRunner().invoke(app, ["worker"])

    assert (result.exit_code, result.stderr.partition(":")[0]) == (2, "TIERLANE_REDIS_URL")


@pytest.mark.parametrize(
    "line",
    [
        *("", "no-such-verb", "up --no-such-flag"),
        *(
            "tier",
            "tier burn",
            "tier show",
            "tier list -o xml",
            "tier list --dry-run",
            "tier set free",
            "tier create gold",
        ),
        *("customer list --limit 0", "customer list --status gone", "key create acme"),
        *(
            "key list acme --customer other",
            "config-changes --since soon",
            "config-changes --table requests",
            "requests --code typo",
        ),
        *("quota set", "quota set 10/day", "model set tiny --enabled maybe"),
        *("dlq", "dlq burn", "dlq show", "dlq requeue", "dlq list --limit 0", "dlq purge", "dlq purge req_1 --all"),
        *("dlq purge --all --older-than 7d", "dlq purge --older-than soon"),
        *("batch", "batch show", "batch cancel", "batch list --limit 0"),
        *("explain", "explain acme other", "explain acme -o xml", "explain acme --refusals -1"),
        *("check model", "check model simulated -o xml", "check model simulated --device gpu"),
        *("check model simulated --batch-sizes 1,zero", "check model simulated --batch-sizes 0"),
        "check model simulated --write tiny",  # No database is known, so no model is loaded for nothing.
    ],
)
def test_wrong_usage_is_exit_code_2(line: str) -> None:
    """Before any connection and before any model is loaded."""
    result = CliRunner().invoke(app, line.split(), env=NO_STACK)

    assert result.exit_code == 2
    assert "--write" in line or "no local stack" not in result.stderr
    assert not line.startswith("check model") or result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["dlq", "show", "req_\udcff"],
        ["dlq", "list", "--customer=\udcff"],
        ["gpu", "cordon", "w", "--reason", "\udcff"],
        ["bench", "--url", "\udcff"],
    ],
)
def test_an_argument_that_is_not_utf_8_is_wrong_usage(arguments: list[str]) -> None:
    """It is named, and reaches no server."""
    result = CliRunner().invoke(app, arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("is not text in UTF-8\n")
