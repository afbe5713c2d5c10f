"""Errors of PostgreSQL as one sentence with the field and the problem.

    ChangeRejected    the change is not possible now
    |-- MissingRow    the row does not exist
    +-- BadValue      a value that is never valid

The rules are the constraints of ledger/schema/catalog.py. A test fails for a rule without a description.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from asyncpg import (
    CheckViolationError,
    ForeignKeyViolationError,
    IntegrityConstraintViolationError,
    NotNullViolationError,
    UniqueViolationError,
)
from sqlalchemy import BigInteger, CheckConstraint, Integer, SmallInteger, Table

from ledger.schema import metadata
from ratelimit.quotas import NOTATIONS, PERIOD_S
from scheduler.capabilities import Capability
from scheduler.errors import TierlaneError

THINGS = {
    "tiers": "tier",
    "customers": "customer",
    "api_keys": "key",
    "quotas": "quota",
    "models": "model",
    "prices": "price",
    "cordons": "cordon",
    "cells": "cell",
    "operators": "operator",
}
"""The name of a row of each table."""

TABLES = {thing: table for table, thing in THINGS.items()}

QUOTA_FORMS = (
    "10000/day, 3600 gpu-s/day, 1000000 tokens/week or 100 usd/3 months; "
    f"amounts are requests, or have the unit {', '.join(NOTATIONS)}; the units of periods are {', '.join(PERIOD_S)}"
)

_LETTERS = "must begin with a letter from a to z and go on with at most 62 of a-z, 0-9, _ and -"
_PLAIN = "must have 1 to 200 characters, no control characters"
_MODELS = "must be 1 to 100 names of models"
_WORDS = {
    "ck_tiers_name": _LETTERS,
    "ck_models_pool": _LETTERS,
    "ck_cells_name": _LETTERS,
    "ck_cells_redis_url": "must be the URL of a server without user, password and #, in at most 500 characters: the user and "
    "password of TIERLANE_REDIS_URL are used",
    "ck_cells_default": "must be that of another cell: the cell default is at TIERLANE_REDIS_URL and cannot be closed",
    "ck_cells_state": "must be open, draining or closed",
    "ck_tiers_slo_success": "must be above 0 and below 1, such as 0.999",
    "ck_models_capabilities": f"must be text, or some of {', '.join(Capability)}, separated by commas",
    "ck_models_name": "must begin with a letter or digit and go on with at most 127 of A-Z, a-z, 0-9 and . _ : / -",
    "ck_customers_callback_hosts": "must be hosts separated by commas, each name, *.name, name:port or [address]:port, in at "
    "most 2,000 characters",
    "ck_customers_name": f"{_PLAIN}, and no space at an end",
    "ck_api_keys_name": _PLAIN,
    "ck_api_keys_id": "must be 12 of a-z and 0-9",
    "ck_api_keys_quota_key": "must be 12 of a-z and 0-9",
    "ck_api_keys_secret_hash": "must be a SHA-256",
    "ck_api_keys_expires_at": "must be later than the key's beginning",
    "ck_api_keys_limit": "must be given with burst, or both must be left out",
    "ck_quotas_quota": f"must be an amount and a period, such as {QUOTA_FORMS}",
    "ck_quotas_alert_shares": "must be at most 10 numbers above 0, at most 1",
    "ck_customers_time_zone": "must be the name of a time zone, such as Europe/Amsterdam",
    "ck_customers_alert_url": "must be an http or https URL without user, password and fragment, in at most 2,048 characters",
    "ck_customers_models": _MODELS,
    "ck_api_keys_models": _MODELS,
    "ck_api_keys_quotas": f"must be 1 to 10 quotas, such as {QUOTA_FORMS}",
    "ck_cordons_worker": "must have 1 to 200 characters, no control characters",
    "ck_cordons_reason": "must have at most 500 characters, no control characters",
    "ck_quotas_owner": "must be of one customer or of one tier",
    "ck_operators_name": "must begin with a letter or digit and go on with at most 99 of A-Z, a-z, 0-9 and . _ @ + -",
    "ck_operators_role": "must be viewer, operator or admin",
    "ck_operators_token_hash": "must be a SHA-256",
    "ck_operators_expires_at": "must be later than the token's beginning",
}
_SUBJECTS = {"ck_cells_default": "name", "ck_api_keys_limit": "requests_per_second", "ck_quotas_owner": "quota"}
"""The column of a rule that is not named after its column."""

_FORMS: tuple[tuple[str, Callable[..., str]], ...] = (
    (r"\w+ BETWEEN (\S+) AND (\S+)", lambda least, most: f"must be {_number(least)} to {_number(most)}"),
    (r"(\w+) > 0 AND \1 <= (\S+)", lambda _, most: f"must be above 0 and at most {_number(most)}"),
    (r"\w+ > 0", lambda: "must be above 0"),
    (r"\w+ IN \('(\w+)', '(\w+)'\)", lambda one, other: f"must be {one} or {other}"),
)
_MOST_BITS: Mapping[type, int] = {SmallInteger: 15, Integer: 31, BigInteger: 63}
_CREDENTIALS = re.compile(r"//[^@]*@")
_KEY = re.compile(r"Key \((.+?)\)=\((.+)\) ")


class ChangeRejected(TierlaneError):
    """The change cannot be made as things are; the message is one sentence."""


class MissingRow(ChangeRejected):
    """The row does not exist."""


class BadValue(ChangeRejected):
    """The change has a value that can never be right; the message is one sentence that names the field."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def check_integers(table: Table, values: Mapping[str, Any]) -> None:
    """Raises BadValue for integers that the columns cannot hold, for which asyncpg would raise its own error."""
    for name, value in values.items():
        bits = _MOST_BITS.get(type(table.c[name].type))
        if bits and value is not None and not -(2**bits) <= value < 2**bits:
            words = rule_in_words(table.name, f"ck_{table.name}_{name}") or ""
            words = words if " to " in words else f"must be below {2**bits:,}"
            raise BadValue(_sentence(table, name, value, words), name)


def rejected_change(
    error: IntegrityConstraintViolationError, table: Table, values: Mapping[str, Any]
) -> ChangeRejected:
    """The error for a constraint that was violated when `values` were written to `table`."""
    found = _KEY.search(error.detail or "")  # PostgreSQL names columns and values of a violated key.
    columns, value = found.groups() if found else ("", "")
    constraint = error.constraint_name or ""
    if isinstance(error, UniqueViolationError):
        thing = THINGS.get(error.table_name or "", "row")
        taken = f"{columns} {value} is that of another {thing}." if columns else f"There is already such a {thing}."
        article = "an" if thing == "operator" else "a"
        named = f"There is already {article} {thing} named {value}."
        if thing == "operator":
            named += f" `tierlane operator set {value} --role ROLE` changes its role, `operator rotate` its token."
        return ChangeRejected(named if columns == "name" else taken)
    if isinstance(error, ForeignKeyViolationError):
        missing = f"There is no {columns.removesuffix('_id')} named {value}."
        used = f"It cannot be deleted: {error.table_name} still refer to it."
        return ChangeRejected(missing if columns and "is not present" in (error.detail or "") else used)
    if isinstance(error, NotNullViolationError):
        column = error.column_name or ""
        return BadValue(f"{column} must be given ({_comment(table, column)}).", column)
    if rule_in_words(table.name, constraint) or (
        isinstance(error, CheckViolationError) and constraint.startswith("ck_")
    ):
        column, sentence = violated_rule(table, constraint, values)
        return BadValue(sentence, column if column in table.c else None)
    # The message of a trigger is a sentence.
    text = str(error).partition("\n")[0].rstrip(".")
    return ChangeRejected(f"{text[:1].upper()}{text[1:]}.")


def violated_rule(table: Table, constraint: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """The column of a CHECK that `values` violate, and a sentence."""
    words = rule_in_words(table.name, constraint)
    column = _SUBJECTS.get(constraint, constraint.removeprefix(f"ck_{table.name}_"))
    if words and column in table.c:
        return column, _sentence(table, column, values.get(column), words)
    return column, f"{THINGS[table.name]}: the rule {constraint} refuses this."


def rule_in_words(table: str, constraint: str) -> str | None:
    """A CHECK of a table in words, such as "must be 1 to 1,000"; None if it has no description."""
    if constraint in _WORDS:
        return _WORDS[constraint]
    for rule in metadata.tables[table].constraints:
        if isinstance(rule, CheckConstraint) and rule.name == constraint:
            for form, words in _FORMS:
                if found := re.fullmatch(form, str(rule.sqltext)):
                    return words(*found.groups())
    return None


def _sentence(table: Table, column: str, value: object, words: str) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    shown = "none" if value is None else _CREDENTIALS.sub("//***@", repr(value))
    if isinstance(value, int | float | Decimal):
        shown = f"{value:,}"
    return f"{column} {words}, not {shown} ({_comment(table, column)})."


def _comment(table: Table, column: str) -> str:
    return in_sentence(table.c[column].comment or "") if column in table.c else ""


def in_sentence(comment: str) -> str:
    """The comment of a column as a part of a sentence; a first word such as USD keeps its form."""
    text = comment.rstrip(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _number(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text
