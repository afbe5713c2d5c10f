"""Types of rows and of bodies, made from the tables: a new column needs no change here."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType
from sqlalchemy import BigInteger, Boolean, Column, DateTime, Double, Integer, Numeric, SmallInteger, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import ARRAY

from ledger.admin.changes import HIDDEN

T = TypeVar("T")
FieldOf = tuple[str, Any] | tuple[str, Any, Any]
"""A field of a struct: name, type, and the default if it has one."""

_TYPES: dict[Any, Any] = {
    Double: float,
    Numeric: float,
    Integer: int,
    SmallInteger: int,
    BigInteger: int,
    Boolean: bool,
    Text: str,
    Uuid: UUID,
    DateTime: datetime,
    ARRAY: list[str],
}


class Page(msgspec.Struct, Generic[T]):
    """A part of a list. `next`: the value of `after` for the next part, null at the end."""

    data: list[T]
    next: str | None


class ChangedRow(msgspec.Struct):
    """The change of one row: `old` is null for a new row, `new` for a deleted one; equal if nothing changed."""

    thing: str
    name: str
    old: dict[str, Any] | None
    new: dict[str, Any] | None


class Changed(msgspec.Struct):
    """The changes of a request, made or, with `dry_run`, only checked."""

    dry_run: bool
    changes: list[ChangedRow]


class IssuedKey(Changed):
    """A change with a new API key, which is shown only here; null in a dry run."""

    key: str | None


class IssuedToken(Changed):
    """A change with a new token, which is shown only here; null in a dry run."""

    token: str | None


class ProcessState(msgspec.Struct):
    """The state of the process."""

    status: str


def row_type(name: str, table: Table, extra: Sequence[FieldOf] = ()) -> type:
    """The type of a row as it is returned, for the description."""
    columns = [column for column in table.c if column.name not in HIDDEN]
    return msgspec.defstruct(name, [*((str(column.name), _type(column)) for column in columns), *extra])


def body_type(name: str, columns: Iterable[Column[Any]], extra: Sequence[FieldOf] = (), *, new: bool = False) -> type:
    """The type of a body with these columns as fields. With `new`, those of a column without a default are required."""
    required: list[FieldOf] = [field for field in extra if len(field) == 2]
    optional: list[FieldOf] = [field for field in extra if len(field) == 3]
    for column in columns:
        if new and not column.nullable and column.server_default is None:
            required.append((str(column.name), _type(column)))
        else:
            optional.append((str(column.name), _type(column) | UnsetType, UNSET))
    return msgspec.defstruct(name, [*required, *optional], forbid_unknown_fields=True)


def text_field(name: str, description: str, *, required: bool = False, pattern: str | None = None) -> FieldOf:
    """A field with a text that is not a column. `pattern`: what its value must match, for the description."""
    schema = {} if pattern is None else {"pattern": pattern}
    kind = Annotated[str, Meta(description=description, extra_json_schema=schema)]
    return (name, kind) if required else (name, kind | UnsetType, UNSET)


def given_fields(body: msgspec.Struct) -> dict[str, Any]:
    """The fields of a decoded body that were sent."""
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value is not UNSET}


def _type(column: Column[Any]) -> Any:
    kind = (
        list[float]
        if isinstance(column.type, ARRAY) and isinstance(column.type.item_type, Double)
        else _TYPES[type(column.type)]
    )
    return Annotated[kind | None if column.nullable else kind, Meta(description=column.comment)]
