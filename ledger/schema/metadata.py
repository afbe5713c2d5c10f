"""How tables are declared: one metadata with a naming convention, and a column that cannot go without its comment."""

from typing import Any

from sqlalchemy import CheckConstraint, Column, MetaData
from sqlalchemy.types import TypeEngine

# Names are spelled out so that a migration, an error message and a test can all point at the same constraint.
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
    """A column that is NOT NULL unless `null`, with the comment that psql shows (unit and meaning)."""
    return Column(name, type_, *args, nullable=null, comment=comment, **options)


def check(name: str, condition: str) -> CheckConstraint:
    """A CHECK named `ck_<table>_<name>`; one of a null-able column passes on NULL, as SQL has it."""
    return CheckConstraint(condition, name=name)


def within(name: str, least: float, most: float) -> CheckConstraint:
    """A CHECK named after its column that keeps it in `least..most`.

    The upper bound is not only for typing errors: PostgreSQL sorts NaN and Infinity above every number, so this is
    what keeps them out.
    """
    return check(name, f"{name} BETWEEN {least} AND {most}")


def matches(name: str, pattern: str) -> CheckConstraint:
    """A CHECK named after its text column that keeps it to a regular expression."""
    return check(name, f"{name} ~ '{pattern}'")


def one_of(name: str, *values: str) -> CheckConstraint:
    """A CHECK named after its text column that keeps it to a few words."""
    words = ", ".join(f"'{value}'" for value in values)
    return check(name, f"{name} IN ({words})")
