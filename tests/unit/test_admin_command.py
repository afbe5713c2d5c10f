"""The admin verbs without servers: their help, their options, their words."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from typer.testing import CliRunner

from tierlane.admin.options import CUSTOMER, TIER
from tierlane.admin.runner import changes_of, duration, new_row
from tierlane.cli import app
from tierlane.connect import UsageError
from tierlane.output import Column, aligned, print_rows, printable, readable


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
    with pytest.raises(UsageError, match=r"Specify at least one column: --tier, .* or --callback-hosts"):
        changes_of(CUSTOMER, {"burst": None})


def test_a_new_row_needs_what_has_no_default() -> None:
    """The sentence names all that is missing at once."""
    assert new_row(CUSTOMER, {"tier": "free"}) == {"tier": "free"}
    with pytest.raises(UsageError, match=r"^Required: --tier\.$"):
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
    assert duration("--grace", text) == length


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 d", "7D", "1y", "999999w"])
def test_what_is_no_span_of_time(text: str) -> None:
    """It is refused rather than guessed, for it ends keys."""
    with pytest.raises(UsageError, match=r"^--grace: must be "):
        duration("--grace", text)


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
