"""The command line of all verbs: fast and complete help, exit codes."""

import re

import pytest
from typer.testing import CliRunner

from quick_help import shown_by
from tierlane.cli import app
from tierlane.settings.declaration import flag, variable
from tierlane.settings.sections import SETTINGS

ROLES = ("up", "gateway", "scheduler", "worker", "migrate")
TOOLS = {
    "tier": ["list", "show", "set", "create", "delete"],
    "customer": ["list", "show", "create", "set", "suspend", "activate", "delete"],
    "key": ["list", "show", "create", "rotate", "revoke"],
    "quota": ["list", "set", "remove"],
    "model": ["list", "show", "set", "create", "delete"],
    "gpu": ["list", "cordon", "uncordon"],
    "queue": ["list", "pause", "resume"],
    "top": [],
    "check": [],
    "explain": [],
    "dlq": ["list", "show", "requeue", "purge"],
    "bench": [],
    "chaos": [],
}
VERBS = [
    *([role] for role in ROLES),
    *([tool, verb] for tool, verbs in TOOLS.items() for verb in verbs),
    *([tool] for tool, verbs in TOOLS.items() if not verbs),
    ["check", "model"],
]
ADMIN = ("tier", "customer", "key", "quota", "model", "gpu", "queue")


def commands_of(*arguments: str) -> list[str]:
    shown = CliRunner().invoke(app, [*arguments, "--help"])
    assert shown.exit_code == 0
    return [line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines() if line.strip()]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["worker", "--help"], ["check", "model", "--help"], *([tool, "-h"] for tool in TOOLS)],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help loads none of the libraries that the verbs need."""
    shown = shown_by(*arguments)

    assert shown.out
    assert shown.heavy == set()


def test_the_help_lists_all_verbs() -> None:
    """The command and its groups."""
    assert commands_of()[: len(ROLES) + len(TOOLS)] == [*ROLES, *TOOLS]
    for tool, verbs in TOOLS.items():
        assert commands_of(tool)[: len(verbs)] == verbs


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_options_show_their_variable_and_default(words: list[str]) -> None:
    """Each option has [env: X] [default: Y], no option takes a secret, and verbs that write take an actor."""
    shown = CliRunner().invoke(app, [*words, "--help"]).stdout
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", shown.partition("Options:")[2])[1:]]
    options = [text for text in options if "--help" not in text]

    assert shown.startswith(f"Usage: tierlane {' '.join(words)} ")
    assert options
    assert [text for text in options if "[env: " not in text or "[default: " not in text] == []
    for secret in ("--redis-url", "--database-url", "--service-token"):
        assert secret not in shown
    if words[0] in ADMIN:
        assert "-o, --output <table|json>" in shown
        assert ("--dry-run" in shown) == ("--actor" in shown) == (words[1] not in ("list", "show"))


@pytest.mark.parametrize("verb", ROLES)
def test_flags_of_roles_are_settings(verb: str) -> None:
    """Each flag of a role shows the variable and the default of its setting."""
    shown = " ".join(CliRunner().invoke(app, [verb, "--help"]).stdout.split())

    for name, setting in SETTINGS.items():
        if f"{flag(name)} " in shown:
            assert f"[env: {variable(name)}] [default: {setting.default or 'none'}]" in shown
    if verb == "up":
        for name in ("port", "gateways", "workers", "backend", "data_dir", "ephemeral", "max_batch_size", "log_format"):
            assert f"{flag(name)} " in shown


@pytest.mark.parametrize("arguments", [["top", "--once"], ["check"], ["customer", "list"]], ids=" ".join)
def test_without_a_stack_it_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    """The message contains the settings to set."""
    env = {"TIERLANE_DATABASE_URL": "", "TIERLANE_REDIS_URL": "", "TIERLANE_DATA_DIR": "/nonexistent"}
    shown = CliRunner().invoke(app, arguments, env=env)

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert "no local stack runs in /nonexistent" in shown.stderr


def test_a_missing_required_setting_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that is started without its settings."""
    monkeypatch.delenv("TIERLANE_REDIS_URL", raising=False)

    shown = CliRunner().invoke(app, ["worker"])

    assert shown.exit_code == 2
    assert shown.stderr.startswith("TIERLANE_REDIS_URL: is not set; ")


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
    shown = CliRunner().invoke(app, arguments)

    assert (shown.exit_code, shown.stdout, shown.stderr) == (2, "", line)


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["up", "--no-such-flag"], []])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """As other command lines do."""
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["dlq", "show", "req_\udcff"],
        ["dlq", "list", "--customer=\udcff"],
        ["gpu", "cordon", "w", "--reason", "\udcff"],
        ["bench", "--url", "\udcff"],
    ],
)
def test_a_word_that_is_no_text_is_wrong_usage(arguments: list[str]) -> None:
    """What a terminal in another encoding made of it reaches no server: it is named, with exit code 2."""
    shown = CliRunner().invoke(app, arguments)

    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("'")
    assert shown.stderr.endswith("is not text in UTF-8\n")
