"""The metadata of all tables with its naming convention, and functions that declare columns and constraints."""

from typing import Any

from sqlalchemy import Boolean, CheckConstraint, Column, MetaData, text
from sqlalchemy.types import TypeEngine

from ratelimit.limits import MOST_COUNT, LimitColumn

# Explicit names, so that a migration, an error message and a test can refer to the same constraint.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

NAME_PATTERN = "^[a-z][a-z0-9_-]{0,62}$"
REQUEST_ID_PATTERN = "^req_[0-9a-f]{32}$"


def column(
    name: str,
    type_: type[TypeEngine[Any]] | TypeEngine[Any],
    comment: str,
    *args: Any,
    null: bool = False,
    **options: Any,
) -> Column[Any]:
    """A column with its comment (meaning and unit, shown by psql). NOT NULL unless `null`."""
    return Column(name, type_, *args, nullable=null, comment=comment, **options)


def flag(name: str, comment: str) -> Column[Any]:
    """A column that is false by default."""
    return column(name, Boolean, comment, server_default=text("false"))


def check(name: str, condition: str) -> CheckConstraint:
    """A CHECK named `ck_<table>_<name>`. NULL passes, as in SQL."""
    return CheckConstraint(condition, name=name)


def within(name: str, least: float, most: float) -> CheckConstraint:
    """A CHECK named after its column that limits it to `least..most`.

    The upper bound also excludes NaN and Infinity, which PostgreSQL sorts above every number.
    """
    return check(name, f"{name} BETWEEN {least} AND {most}")


def matches(name: str, pattern: str) -> CheckConstraint:
    """A CHECK named after its text column that requires a regular expression to match."""
    return check(name, f"{name} ~ '{pattern}'")


def one_of(name: str, *values: str) -> CheckConstraint:
    """A CHECK named after its text column that limits it to these values."""
    words = ", ".join(f"'{value}'" for value in values)
    return check(name, f"{name} IN ({words})")


def limit_check(limit: LimitColumn) -> CheckConstraint:
    """The values that the column of a limit may have."""
    if limit.least:
        return within(limit.name, limit.least, limit.most or MOST_COUNT)
    return check(limit.name, f"{limit.name} > 0" + (f" AND {limit.name} <= {limit.most}" if limit.most else ""))
