"""The admin verbs without servers: options and columns of each table, values, times, and the output of rows."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import ARRAY, BigInteger, Boolean, CheckConstraint, Double, Integer, Numeric, SmallInteger, Text

from ledger.admin.columns import settable
from ledger.admin.errors import BadValue, check_integers, rule_in_words
from ledger.schema import metadata
from tierlane.admin.fields import CELL, CUSTOMER, KEY, MODEL, PRICE, REQUIRED, TIER
from tierlane.admin.values import changes_of, duration, new_row
from tierlane.connect import UsageError
from tierlane.output import Column, aligned, print_rows, printable, readable

KINDS = {
    Double: "decimal",
    Numeric: "decimal",
    Integer: "whole",
    SmallInteger: "whole",
    BigInteger: "whole",
    Boolean: "switch",
    Text: "text",
    ARRAY: "names",
}
RULES = sorted(
    (table, str(rule.name))
    for table in ("tiers", "customers", "api_keys", "quotas", "models", "prices", "cordons", "cells", "operators")
    for rule in metadata.tables[table].constraints
    if isinstance(rule, CheckConstraint)
)


OF_TABLE = {"tiers": TIER, "customers": CUSTOMER, "api_keys": KEY, "models": MODEL, "prices": PRICE, "cells": CELL}


@pytest.mark.parametrize("table", OF_TABLE)
def test_each_column_has_an_option_with_its_type_and_comment(table: str) -> None:
    """The comment, whether `none` is allowed, and the default of a new row; `none`, on and off instead of words of SQL."""
    columns = metadata.tables[table].c

    assert {field.name for field in OF_TABLE[table]} == {column.name for column in settable(metadata.tables[table])}
    for field in OF_TABLE[table]:
        column = columns[field.name]
        default = "none" if column.nullable else REQUIRED
        if column.server_default is not None:
            default = {"true": "on", "false": "off"}.get(text := str(column.server_default.arg), text)
        assert (field.description, field.kind, field.none) == (
            column.comment,
            next(kind for each, kind in KINDS.items() if isinstance(column.type, each)),
            column.nullable,
        )
        assert field.default == default
        assert not [word for word in ("null", "True", "False") if word in field.help("none")]


NEW_LIMIT = """
from ratelimit import limits
new = limits.LimitColumn("bytes_per_hour", "bigint", "Default; null: none.", "Own; null: the tier's.", required=False)
limits.LIMIT_COLUMNS = (*limits.LIMIT_COLUMNS, new)
from tierlane.cli import app
from tierlane.admin.customers import CUSTOMER_COLUMNS, INHERITED
from tierlane.admin.tiers_and_models import TIERS
print("bytes_per_hour" in INHERITED, *(c.heading for c in (*CUSTOMER_COLUMNS, *TIERS.columns) if c.field == new.name))
for verb in ("tier", "customer"):
    for action in ("create", "set"):
        app([verb, action, "--help"], standalone_mode=False)
"""


def test_a_new_limit_needs_no_change_in_the_admin_verbs() -> None:
    """A further entry in `LIMIT_COLUMNS` is an option of `tier` and `customer` with its help, and a column of their lists."""
    done = subprocess.run([sys.executable, "-c", NEW_LIMIT], capture_output=True, text=True, check=True, timeout=30)
    columns, *lines = done.stdout.splitlines()
    help_text = " ".join(" ".join(lines).split())

    assert columns == "True BYTES/H BYTES/H"
    assert help_text.count("--bytes-per-hour N|none Default; none: no limit.") == 2
    assert help_text.count("--bytes-per-hour N|none Own; none: the tier's.") == 2


@pytest.mark.parametrize(("table", "rule"), RULES)
def test_every_rule_of_the_tables_has_a_description(table: str, rule: str) -> None:
    """Without SQL."""
    words = rule_in_words(table, rule)

    assert words is not None
    assert words.startswith("must ")
    assert not {"BETWEEN", "AND", "IN", "NULL", ">", "~", "="} & set(words.split())


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("priority", 2**15),
        ("max_queue_ms", -(2**40)),
        ("tokens_per_minute", 2**63),
        ("tokens_per_minute", -(2**63) - 1),
    ],
)
def test_integers_that_no_column_can_hold_are_rejected(column: str, value: int) -> None:
    """Like those that a rule rejects; other values are left to the rules of the table."""
    table = metadata.tables["tiers"]
    with pytest.raises(BadValue, match=f"^{column} must be .*{value:,}"):
        check_integers(table, {"burst": 1e300, column: value})

    check_integers(table, {"priority": -1, "shed_depth": None, "burst": 1e300, "shadow": True})


def test_only_given_options_are_set() -> None:
    """`none` is a value. Without any option, or without one that a new row needs, they are named."""
    given = {"burst": "50", "tokens_per_minute": "none", "tier": None}

    assert changes_of(CUSTOMER, given) == {"burst": 50.0, "tokens_per_minute": None}
    assert changes_of(TIER, {"shadow": "off", "max_concurrency": "1,000"}) == {"shadow": False, "max_concurrency": 1000}
    assert new_row(CUSTOMER, {"tier": "free"}) == {"tier": "free"}
    with pytest.raises(UsageError, match=r"--tier, .* or --alert-url"):
        changes_of(CUSTOMER, {"burst": None})
    with pytest.raises(UsageError, match=r"^Required: --tier\.$"):
        new_row(CUSTOMER, {"burst": "5"})


@pytest.mark.parametrize(("text", "days"), [("86400s", 1), ("24h", 1), ("30d", 30), ("2w", 14)])
def test_durations(text: str, days: int) -> None:
    """A number and a unit."""
    assert duration("--grace", text) == timedelta(days=days)


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 d", "7D", "1y", "999999w"])
def test_a_bad_duration_is_rejected(text: str) -> None:
    """It decides when a key expires, so nothing is guessed."""
    with pytest.raises(UsageError, match=r"^--grace: must be "):
        duration("--grace", text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "on"),
        (False, "off"),
        (1234567, "1,234,567"),
        (2400000.0, "2,400,000"),
        (1250.5, "1,250.5"),
        (0.05, "0.05"),
        (187.38249134, "187.4"),
        (2.71828, "2.72"),
        (0.00123456, "0.00123"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))), "2026-01-02 01:04:05 UTC"),
        (datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), "2026-01-02 03:04:05 UTC"),
        (["1/day", "2/month"], "1/day, 2/month"),
        ([], "none"),
        ("a\x1b[31mb\u202e", "a\\x1b[31mb\\u202e"),
        ("two\nlines \udcff", "two\\nlines \\udcff"),
    ],
)
def test_values_as_text(value: object, text: str) -> None:
    """Numbers with commas, times in UTC, escaped control characters."""
    assert readable(value) == text


def test_a_table_is_aligned_and_has_no_colour_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are to the right, a missing one is a dash, and no line ends in spaces."""
    rows = [
        {"name": "a" * 90, "n": 1000, "state": "suspended"},
        {"name": "b", "n": None, "state": "live"},
        {"name": "c", "n": 7.5, "state": "revoked"},
    ]

    print_rows("table", [Column("name", "NAME"), Column("n", "N"), Column("state", "STATE")], rows, "rows", 5)
    output = capsys.readouterr()

    assert output.out.splitlines() == [
        f"{'NAME':<90}      N  STATE",
        f"{'a' * 90}  1,000  suspended",
        f"{'b':<90}      -  live",
        f"{'c':<90}    7.5  revoked",
    ]
    assert output.err.startswith("3 of 5 rows")
    assert printable("a\nb", keep="\n") == "a\nb"
    assert aligned([("a", "1"), ("long", "2"), ("b", "")], "  ") == ["  a     1", "  long  2", "  b"]
