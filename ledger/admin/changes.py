"""One change of the catalog: made in a transaction under the actor's name, returned as the row before and after.

A dry run is the same transaction, rolled back: constraints and triggers act in it as they would in earnest. Statements
are built by SQLAlchemy from the tables, so names and types stand once, and run by asyncpg.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from asyncpg import IntegrityConstraintViolationError
from sqlalchemy import Table, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.sql.expression import ClauseElement

from ledger.admin.errors import THINGS, ChangeRejected, check_integers, refusal
from ledger.postgres import Connection

Row = dict[str, Any]
"""A row by its columns' names."""

_DIALECT: Any = asyncpg.dialect()  # type: ignore[no-untyped-call]


async def fetch(connection: Connection, query: ClauseElement) -> list[Row]:
    """Run a statement; its rows. Raises what asyncpg raises."""
    compiled: Any = query.compile(dialect=_DIALECT)
    values = [compiled.params[name] for name in compiled.positiontup or ()]
    return [dict(row) for row in await connection.fetch(str(compiled), *values)]


async def fetch_one(connection: Connection, query: ClauseElement) -> Row | None:
    """Run a statement; its first row, None where it has none. Raises what asyncpg raises."""
    rows = await fetch(connection, query)
    return rows[0] if rows else None


HIDDEN = frozenset({"secret_hash"})
"""Columns that are never read here: nobody needs to see them."""


class Change(NamedTuple):
    """What became of one row: `thing` is tier, customer, ...; `name` what people call the row.

    `old` is None for a new row, `new` for a deleted one; they are equal where nothing was to do.
    """

    thing: str
    name: str
    old: Row | None
    new: Row | None


@asynccontextmanager
async def changing(connection: Connection, actor: str, *, dry_run: bool) -> AsyncIterator[None]:
    """A transaction whose changes are written down as the actor's; with `dry_run` it is rolled back at the end."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await fetch(connection, select(func.set_config("tierlane.actor", actor, True)))  # noqa: FBT003 - as in SQL: SET LOCAL
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.rollback() if dry_run else transaction.commit())


async def find(connection: Connection, table: Table, key: Any) -> Row:
    """The row with this primary key, locked until the transaction ends. Raises Refused where there is none."""
    row = await fetch_one(connection, select(*seen(table)).where(_key(table) == key).with_for_update())
    if row is None:
        raise missing(table, key)
    return row


async def add(connection: Connection, table: Table, values: Row, name: str | None = None) -> Change:
    """Insert a row. `name`: what it is called, where its table has no column that says so. Raises Refused."""
    row = await _write(connection, table, insert(table).values(**values), values)
    return Change(THINGS[table.name], name or _name(table, row), None, row)


async def alter(connection: Connection, table: Table, old: Row, values: Row, name: str | None = None) -> Change:
    """Set columns of a row that `find` gave; what has the value already is not written. Raises Refused."""
    different = {column: value for column, value in values.items() if old[column] != value}
    new = old
    if different:
        key = _key(table)
        new = await _write(connection, table, update(table).where(key == old[key.name]).values(**different), values)
    return Change(THINGS[table.name], name or _name(table, old), old, new)


async def remove(connection: Connection, table: Table, old: Row, name: str | None = None) -> Change:
    """Delete a row that `find` gave. Raises Refused."""
    key = _key(table)
    await _write(connection, table, delete(table).where(key == old[key.name]), {})
    return Change(THINGS[table.name], name or _name(table, old), old, None)


def missing(table: Table, key: object) -> ChangeRejected:
    """The sentence for a row that is not there."""
    named = " named" if "name" in table.c and table.name != "api_keys" else ""
    return ChangeRejected(f"There is no {THINGS[table.name]}{named} {key}.")


def seen(table: Table) -> list[Any]:
    """The columns of a table that people may see."""
    return [column for column in table.c if column.name not in HIDDEN]


async def _write(connection: Connection, table: Table, statement: Any, values: Row) -> Row:
    check_integers(table, values)
    try:
        row = await fetch_one(connection, statement.returning(*seen(table)))
    except IntegrityConstraintViolationError as error:
        raise refusal(error, table, values) from error
    if row is None:
        raise ChangeRejected(f"The {THINGS[table.name]} was deleted meanwhile.")
    return row


def _key(table: Table) -> Any:
    (key,) = table.primary_key.columns
    return key


def _name(table: Table, row: Row) -> str:
    return str(row["id"] if table.name == "api_keys" else row["name"])
