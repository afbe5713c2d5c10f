"""What help says about columns is what the database says about them, and every rule of the catalog has words."""

import pytest
from sqlalchemy import BigInteger, Boolean, CheckConstraint, Double, Integer, SmallInteger, Text

from ledger.admin.errors import BadValue, check_integers, rule_in_words
from ledger.schema import metadata
from tierlane.admin.options import OF_TABLE, REQUIRED, Field

KINDS = {
    Double: "decimal",
    Integer: "whole",
    SmallInteger: "whole",
    BigInteger: "whole",
    Boolean: "switch",
    Text: "text",
}
NOT_SET = {
    "tiers": {"name"},
    "customers": {"id", "name", "status", "created_at"},
    "api_keys": {
        "id",
        "customer_id",
        "name",
        "secret_hash",
        "created_at",
        "expires_at",
        "revoked_at",
        "last_used_at",
    },
    "models": {"name"},
}
"""Columns that are named by an argument, or changed by a verb of their own."""

FIELDS = [(table, field) for table, fields in OF_TABLE.items() for field in fields]
RULES = [
    (table, str(rule.name))
    for table in ("tiers", "customers", "api_keys", "quotas", "models", "cordons")
    for rule in metadata.tables[table].constraints
    if isinstance(rule, CheckConstraint)
]


@pytest.mark.parametrize("table", OF_TABLE)
def test_every_column_can_be_set(table: str) -> None:
    """A column that is added to a table gets an option."""
    fields = {field.name for field in OF_TABLE[table]}

    assert fields | NOT_SET[table] == set(metadata.tables[table].c.keys())


@pytest.mark.parametrize(("table", "field"), FIELDS, ids=lambda part: part if isinstance(part, str) else part.name)
def test_a_field_is_its_column(table: str, field: Field) -> None:
    """Comment, type, whether it may be null, and the default of a new row."""
    column = metadata.tables[table].c[field.name]
    default = "none" if column.nullable else REQUIRED
    if column.server_default is not None:
        default = {"true": "on", "false": "off"}.get(text := str(column.server_default.arg), text)

    assert (field.says, field.kind, field.none) == (column.comment, KINDS[type(column.type)], column.nullable)
    assert field.default == default


def test_help_speaks_of_none_on_and_off() -> None:
    """Those are the words that the options take, not those of SQL."""
    shown = [field.help for _, field in FIELDS]

    assert "Default token limit of each customer per minute; none = no limit." in shown
    assert "off: requests for it answer 404." in shown
    assert not any(word in text for text in shown for word in ("null", "True", "False"))


@pytest.mark.parametrize(("table", "rule"), RULES)
def test_every_rule_has_words(table: str, rule: str) -> None:
    """And no SQL in them."""
    words = rule_in_words(table, rule)

    assert words is not None
    assert words.startswith("must ")
    assert not {"BETWEEN", "AND", "IN", "NULL", ">", "~", "="} & set(words.split())


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("priority", 2**15, "priority must be 1 to 1,000, not 32,768 ("),
        ("max_queue_ms", -(2**40), "max_queue_ms must be 1 to 60,000, not -1,099,511,627,776 ("),
        (
            "tokens_per_minute",
            2**63,
            "tokens_per_minute must be below 9,223,372,036,854,775,808, not 9,223,372,036,854,775,808",
        ),
        ("tokens_per_minute", -(2**63) - 1, "tokens_per_minute must be "),
    ],
)
def test_integers_that_no_column_can_hold(column: str, value: int, said: str) -> None:
    """They are told like those that a rule refuses."""
    with pytest.raises(BadValue) as refused:
        check_integers(metadata.tables["tiers"], {"burst": 1e300, column: value})

    assert str(refused.value).startswith(said)


def test_integers_that_a_column_can_hold_are_left_to_its_rule() -> None:
    """So are null and numbers of other kinds."""
    check_integers(metadata.tables["tiers"], {"priority": -1, "shed_depth": None, "burst": 1e300, "shadow": True})
