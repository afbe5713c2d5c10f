"""The command line: quick help, complete flags, exit codes."""

import pytest
from typer.testing import CliRunner

from quick_help import shown_by
from tierlane.cli import app
from tierlane.settings.declaration import flag, variable
from tierlane.settings.sections import SETTINGS

ROLES = ("up", "gateway", "scheduler", "worker", "migrate")
TOOLS = (
    "tier",
    "customer",
    "key",
    "quota",
    "model",
    "gpu",
    "queue",
    "top",
    "check",
    "explain",
    "dlq",
    "bench",
    "chaos",
)


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["worker", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Building and showing the help loads none of the libraries that the verbs need."""
    shown = shown_by(*arguments)

    assert shown.out
    assert shown.heavy == set()


def test_the_help_lists_every_verb() -> None:
    """Each verb has a line in the help."""
    shown = CliRunner().invoke(app, ["--help"])

    assert shown.exit_code == 0
    listed = [line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed[: len(ROLES) + len(TOOLS)] == [*ROLES, *TOOLS]


@pytest.mark.parametrize("verb", ROLES)
def test_every_flag_shows_its_variable_and_default(verb: str) -> None:
    """Each flag of a verb is followed by [env: X] [default: Y]."""
    shown = " ".join(CliRunner().invoke(app, [verb, "--help"]).stdout.split())

    for name, setting in SETTINGS.items():
        if f"{flag(name)} " in shown:
            assert f"[env: {variable(name)}] [default: {setting.default or 'none'}]" in shown


@pytest.mark.parametrize(
    "name", ["port", "gateways", "workers", "backend", "data_dir", "ephemeral", "max_batch_size", "log_format"]
)
def test_up_has_the_promised_flags(name: str) -> None:
    """The options of the contract are there."""
    shown = CliRunner().invoke(app, ["up", "--help"]).stdout

    assert f"{flag(name)} " in shown


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_a_help_of_its_own(tool: str) -> None:
    """`--help` is handed on, and tells the tool by the name it was called with."""
    shown = CliRunner().invoke(app, [tool, "--help"])

    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"Usage: tierlane {tool} ")


def test_secrets_have_no_flag() -> None:
    """URLs and the token are never on a command line."""
    for verb in (*ROLES, *TOOLS):
        shown = CliRunner().invoke(app, [verb, "--help"]).stdout
        assert "--redis-url" not in shown
        assert "--database-url" not in shown
        assert "--service-token" not in shown


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


def test_a_missing_required_setting_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that is started alone says what it lacks."""
    monkeypatch.delenv("TIERLANE_REDIS_URL", raising=False)

    shown = CliRunner().invoke(app, ["worker"])

    assert shown.exit_code == 2
    assert shown.stderr.startswith("TIERLANE_REDIS_URL: is not set; ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["dlq", "show", "req_\udcff"],
        ["dlq", "list", "--code", "\udcff"],
        ["dlq", "list", "--customer=\udcff"],
        ["dlq", "requeue", "\udcff"],
        ["dlq", "purge", "\udcff"],
        ["explain", "\udcff"],
        ["gpu", "cordon", "w", "--reason", "\udcff"],
        ["queue", "pause", "\udcff"],
        ["customer", "set", "\udcff", "--tier", "free"],
        ["quota", "set", "acme", "\udcff"],
        ["check", "model", "\udcff"],
        ["bench", "--url", "\udcff"],
    ],
)
def test_a_word_that_is_no_text_is_wrong_usage(arguments: list[str]) -> None:
    """What a terminal in another encoding made of it reaches no server: it is named, with exit code 2."""
    shown = CliRunner().invoke(app, arguments)

    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("'")
    assert shown.stderr.endswith("is not text in UTF-8\n")
