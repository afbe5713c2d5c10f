"""Changes of the catalog, in a transaction under the name of the actor, returned as the row before and after.

A dry run is the same transaction, rolled back, so that constraints and triggers apply. SQLAlchemy builds the statements from
the tables, and asyncpg runs them. Functions that change rows raise ChangeRejected.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from asyncpg import IntegrityConstraintViolationError
from sqlalchemy import (
    CheckConstraint,
    Table,
    and_,
    cast,
    column,
    delete,
    func,
    insert,
    literal_column,
    not_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, asyncpg
from sqlalchemy.sql.expression import ClauseElement

from ledger.admin.errors import (
    THINGS,
    BadValue,
    ChangeRejected,
    MissingRow,
    check_integers,
    rejected_change,
    violated_rule,
)
from ledger.postgres import Connection

Row = dict[str, Any]
"""Values by column name."""

_DIALECT: Any = asyncpg.dialect()  # type: ignore[no-untyped-call]

HIDDEN = frozenset({"secret_hash", "token_hash"})
"""Columns that are never read here."""

PIECE = 5000
"""Rows of one statement of `add_all` and the like."""

LEAST_UNSTORABLE = 2**15
"""From here on an integer may be too large for its column."""

_encode = msgspec.json.Encoder(decimal_format="number").encode


async def fetch(connection: Connection, query: ClauseElement) -> list[Row]:
    """The rows of a statement. Raises what asyncpg raises."""
    compiled: Any = query.compile(dialect=_DIALECT)
    values = [compiled.params[name] for name in compiled.positiontup or ()]
    return [dict(row) for row in await connection.fetch(str(compiled), *values)]


async def fetch_one(connection: Connection, query: ClauseElement) -> Row | None:
    rows = await fetch(connection, query)
    return rows[0] if rows else None


async def transaction_time(connection: Connection) -> datetime:
    """The start of the transaction, by PostgreSQL's clock."""
    row = await fetch_one(connection, select(func.now().label("now")))
    moment: datetime = (row or {})["now"]
    return moment


class Change(NamedTuple):
    """The change of one row. `thing` is tier, customer, ...; `name` identifies the row for users.

    `old` is None for a new row, `new` for a deleted one. They are equal if nothing changed.
    """

    thing: str
    name: str
    old: Row | None
    new: Row | None


@asynccontextmanager
async def changing(connection: Connection, actor: str, *, dry_run: bool) -> AsyncIterator[None]:
    """A transaction whose changes are recorded under `actor`. With `dry_run` it is rolled back at the end."""
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
    """The row with this primary key, locked until the transaction ends. Raises ChangeRejected if there is none."""
    (primary_key,) = table.primary_key.columns
    row = await fetch_one(connection, select(*seen(table)).where(primary_key == key).with_for_update())
    if row is None:
        raise missing(table, key)
    return row


async def add(connection: Connection, table: Table, values: Row, name: str | None = None) -> Change:
    """Insert a row. `name`: its name for users, if its table has no column for it."""
    row = await _write(connection, table, insert(table).values(**values), values)
    return Change(THINGS[table.name], name or _name(table, row), None, row)


async def alter(connection: Connection, table: Table, old: Row, values: Row, name: str | None = None) -> Change:
    """Set columns of a row that `find` returned, without those that have the value already; hidden ones are always set."""
    different = {column: value for column, value in values.items() if column in HIDDEN or old[column] != value}
    new = old
    if different:
        new = await _write(connection, table, update(table).where(_is(table, old)).values(**different), values)
    return Change(THINGS[table.name], name or _name(table, old), old, new)


async def remove(connection: Connection, table: Table, old: Row, name: str | None = None) -> Change:
    """Delete a row that `find` returned."""
    await _write(connection, table, delete(table).where(_is(table, old)), {})
    return Change(THINGS[table.name], name or _name(table, old), old, None)


async def add_all(connection: Connection, table: Table, rows: Sequence[Row]) -> list[Row]:
    """Insert rows that have the same columns; as they are stored, in no order."""
    return await _write_all(
        connection, table, rows, lambda given: insert(table).from_select(list(rows[0]), select(given))
    )


async def alter_all(connection: Connection, table: Table, rows: Sequence[Row]) -> list[Row]:
    """Set all columns that the rows have, which are the same, of the rows with their primary keys; as they are stored."""
    key = [each.name for each in table.primary_key.columns]
    return await _write_all(
        connection,
        table,
        rows,
        lambda given: (
            update(table)
            .values({name: given.c[name] for name in rows[0] if name not in key})
            .where(*(table.c[name] == given.c[name] for name in key))
        ),
    )


async def remove_all(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Delete the rows with these primary keys."""
    key = list(table.primary_key.columns)
    await _write_all(
        connection,
        table,
        [{each.name: row[each.name] for each in key} for row in rows],
        lambda given: delete(table).where(tuple_(*key).in_(select(given))),
    )


async def violations(connection: Connection, table: Table, rows: Sequence[Row]) -> list[tuple[int, str, str]]:
    """The CHECKs that rows would violate: index of the row, column, and a sentence each. A column that all rows lack is null."""
    found, storable = list[tuple[int, str, str]](), list[Row]()
    for index, row in enumerate(rows):
        storable.append(row)
        for name, value in row.items():
            if not isinstance(value, int) or abs(value) < LEAST_UNSTORABLE:
                continue
            try:
                check_integers(table, {name: value})
            except BadValue as error:
                found.append((index, name, str(error)))
                storable[index] = {**storable[index], name: None}
    holds: dict[str, Any] = {
        str(rule.name): func.coalesce(literal_column(f"({rule.sqltext})"), True)
        for rule in table.constraints
        if isinstance(rule, CheckConstraint)
    }
    for first, given in _pieces(table, storable):
        labels = [each.label(name) for name, each in holds.items()]
        query = select(given.c.ordinality, *labels).where(not_(and_(*holds.values())))
        for verdict in await fetch(connection, query):
            index = first + verdict.pop("ordinality") - 1
            broken = [name for name, kept in verdict.items() if not kept]
            found += [(index, *violated_rule(table, name, rows[index])) for name in broken]
    return sorted(found)


def missing(table: Table, key: object) -> MissingRow:
    """The error for a row that does not exist."""
    named = " named" if "name" in table.c and table.name != "api_keys" else ""
    ids = " `tierlane key list` shows the IDs." if table.name == "api_keys" else ""
    return MissingRow(f"There is no {THINGS[table.name]}{named} {key}.{ids}")


def seen(table: Table) -> list[Any]:
    """The columns of a table that users may see."""
    return [column for column in table.c if column.name not in HIDDEN]


async def _write(connection: Connection, table: Table, statement: Any, values: Row) -> Row:
    check_integers(table, values)
    try:
        row = await fetch_one(connection, statement.returning(*seen(table)))
    except IntegrityConstraintViolationError as error:
        raise rejected_change(error, table, values) from error
    if row is None:
        raise ChangeRejected(f"The {THINGS[table.name]} was deleted meanwhile.")
    return row


async def _write_all(connection: Connection, table: Table, rows: Sequence[Row], statement: Any) -> list[Row]:
    """Run `statement`, a function of the given rows as a FROM item, for each piece of the rows."""
    stored: list[Row] = []
    try:
        for _, given in _pieces(table, rows):
            part = select(*(given.c[name] for name in rows[0])).subquery()
            stored += await fetch(connection, statement(part).returning(*seen(table)))
    except IntegrityConstraintViolationError as error:
        raise rejected_change(error, table, {}) from error
    if len(stored) != len(rows):
        raise ChangeRejected(f"A {THINGS[table.name]} was deleted meanwhile.")
    return stored


def _pieces(table: Table, rows: Sequence[Row]) -> Iterator[tuple[int, Any]]:
    """Rows with the same columns as FROM items, each one parameter, with the index of its first row."""
    for first in range(0, len(rows), PIECE):
        document = cast(_encode(rows[first : first + PIECE]).decode(), JSONB)
        record = func.jsonb_populate_recordset(literal_column(f"NULL::{table.name}"), document)
        columns = [column(each.name, each.type) for each in table.c]
        yield first, record.table_valued(*columns, with_ordinality="ordinality")


def _is(table: Table, row: Row) -> Any:
    return and_(*(column == row[column.name] for column in table.primary_key.columns))


def _name(table: Table, row: Row) -> str:
    return str(row["id"] if table.name == "api_keys" else row["name"])
