"""The admin verbs without servers: their help, their options, their words."""

import re
from datetime import UTC, datetime, timedelta, timezone
from importlib import import_module
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from quick_help import shown_by
from tierlane.admin.keys import key_id
from tierlane.admin.options import CUSTOMER, TIER, VerbCall
from tierlane.admin.runner import actor_of
from tierlane.admin.values import changes_of, new_row, span
from tierlane.cli import app
from tierlane.connect import UsageError
from tierlane.output import Column, aligned, print_rows, printable, readable

GROUPS = {
    "tier": {"list", "show", "set", "create", "delete"},
    "customer": {"list", "show", "create", "set", "suspend", "activate", "delete"},
    "key": {"list", "show", "create", "rotate", "revoke"},
    "model": {"list", "show", "set", "create", "delete"},
    "quota": {"list", "set", "remove"},
}
READS = {"list", "show"}
VERBS = [(group, verb) for group, verbs in GROUPS.items() for verb in sorted(verbs)]


def help_of(group: str, verb: str) -> str:
    shown: str = CliRunner().invoke(app, [group, verb, "--help"]).stdout
    return shown


@pytest.mark.parametrize(
    "arguments", [["tier", "--help"], ["tier", "create", "-h"], ["customer", "set", "--help"], ["key"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """It is shown at once: what the verbs need is loaded when they run."""
    shown = shown_by(*arguments)

    assert any(line.startswith(f"Usage: tierlane {arguments[0]}") for line in [*shown.out, *shown.err])
    assert shown.heavy == set()


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_its_verbs(group: str) -> None:
    """Those of the contract, each with a line of help."""
    group_app = getattr(import_module("tierlane.admin.commands"), f"{group}_app")
    commands: dict[str, Any] = typer.main.get_command(group_app).commands  # type: ignore[attr-defined]

    assert set(commands) == GROUPS[group]
    assert all(command.help for command in commands.values())


@pytest.mark.parametrize(("group", "verb"), VERBS)
def test_every_option_shows_its_variable_and_default(group: str, verb: str) -> None:
    """As those of the other verbs do; secrets have none."""
    shown = help_of(group, verb)
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", shown.partition("Options:")[2])[1:]]

    assert [line for line in options[:-1] if "[env: " not in line or "[default: " not in line] == []
    assert options[-1].startswith("-h, --help")
    assert "-url" not in shown
    assert "--service-token" not in shown


@pytest.mark.parametrize(("group", "verb"), VERBS)
def test_what_all_verbs_take(group: str, verb: str) -> None:
    """The form of the output; and those that write, a dry run and an actor."""
    shown = help_of(group, verb)

    assert "-o, --output <table|json>" in shown
    assert ("--dry-run" in shown) == ("--actor" in shown) == (verb not in READS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["tier"],
        ["tier", "burn"],
        ["tier", "show"],
        ["tier", "list", "-o", "xml"],
        ["tier", "list", "--dry-run"],
        ["customer", "list", "--limit", "0"],
        ["customer", "list", "--status", "gone"],
        ["key", "create", "acme"],
        ["quota", "set"],
        ["quota", "set", "10/day"],
        ["tier", "set", "free"],
        ["tier", "create", "gold"],
        ["model", "set", "tiny", "--enabled", "maybe"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """Before anything is connected to."""
    shown = CliRunner().invoke(app, arguments, env={"TIERLANE_DATABASE_URL": ""})

    assert shown.exit_code == 2
    assert "no local stack" not in shown.stderr


def test_only_what_was_given_is_set() -> None:
    """`none` is a value, an option that was left out is not."""
    given = {"burst": "50", "tokens_per_minute": "none", "tier": None}

    assert changes_of(CUSTOMER, given) == {"burst": 50.0, "tokens_per_minute": None}
    assert changes_of(TIER, {"shadow": "off", "max_concurrency": "1,000"}) == {"shadow": False, "max_concurrency": 1000}
    with pytest.raises(UsageError, match=r"Say what to set: --tier, .* or --callback-hosts"):
        changes_of(CUSTOMER, {"burst": None})


def test_a_new_row_needs_what_has_no_default() -> None:
    """The sentence names all that is missing at once."""
    assert new_row(CUSTOMER, {"tier": "free"}) == {"tier": "free"}
    with pytest.raises(UsageError, match=r"^A new one needs --tier, too\.$"):
        new_row(CUSTOMER, {"burst": "5"})


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("90s", timedelta(seconds=90)),
        ("24h", timedelta(days=1)),
        ("30d", timedelta(days=30)),
        ("2w", timedelta(weeks=2)),
    ],
)
def test_spans_of_time(text: str, length: timedelta) -> None:
    """A number and a unit."""
    assert span("--grace", text) == length


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 d", "7D", "1y", "999999w"])
def test_what_is_no_span_of_time(text: str) -> None:
    """It is refused rather than guessed, for it ends keys."""
    with pytest.raises(UsageError, match=r"^--grace: must be "):
        span("--grace", text)


@pytest.mark.parametrize(
    "text", ["abcdefghijkl", "tl_abcdefghijkl", "tl_abcdefghijkl_a5hRRv2lytmGfHqvv0vOwEZ3JJCQ3T2A2F"]
)
def test_a_whole_key_will_do_for_its_id(text: str) -> None:
    """Only the public part goes on from there."""
    assert key_id(text) == "abcdefghijkl"


def test_the_actor_is_cleaned() -> None:
    """Space around a name is not part of it."""
    assert actor_of(VerbCall(None, "table", actor=" ann ")) == "ann"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "none"),
        (True, "on"),
        (False, "off"),
        (1234567, "1,234,567"),
        (2400000.0, "2,400,000"),
        (1250.5, "1,250.5"),
        (0.05, "0.05"),
        (datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), "2026-01-02 03:04:05 UTC"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))), "2026-01-02 01:04:05 UTC"),
        (["1/day", "2/month"], "1/day, 2/month"),
        ([], "none"),
        ("a\x1b[31mb\u202e", "a\\x1b[31mb\\u202e"),
    ],
)
def test_values_are_readable(value: object, shown: str) -> None:
    """Numbers with commas, times in UTC, nothing that a terminal obeys."""
    assert readable(value) == shown


def test_a_table_has_numbers_to_the_right_and_no_colour_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing number is a dash; no line ends in blanks, however wide the table."""
    rows = [
        {"name": "a" * 90, "n": 1000, "state": "suspended"},
        {"name": "b", "n": None, "state": "live"},
        {"name": "c", "n": 7.5, "state": "revoked"},
    ]

    print_rows("table", [Column("name", "NAME"), Column("n", "N"), Column("state", "STATE")], rows, "rows", 5)
    shown = capsys.readouterr()

    assert shown.out.splitlines() == [
        f"{'NAME':<90}      N  STATE",
        f"{'a' * 90}  1,000  suspended",
        f"{'b':<90}      -  live",
        f"{'c':<90}    7.5  revoked",
    ]
    assert shown.err == "3 of 5 rows; --limit N shows more.\n"


@pytest.mark.parametrize(
    ("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)]
)
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], coloured: bool
) -> None:
    """NO_COLOR is honoured."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    print_rows("table", [Column("state", "STATE")], [{"state": "revoked"}], "rows")

    assert ("\x1b[31m" in capsys.readouterr().out) is coloured


def test_control_characters_are_shown_not_obeyed() -> None:
    """A name is written by somebody else, and a terminal obeys what it prints."""
    assert printable("two\nlines \udcff") == "two\\nlines \\udcff"
    assert aligned([("a", "1"), ("long", "2"), ("b", "")], "  ") == ["  a     1", "  long  2", "  b"]
