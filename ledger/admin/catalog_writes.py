"""Reads the whole catalog and writes a plan of it, in one transaction and a few statements, whatever the number of rows.

All functions raise what asyncpg raises; those that write raise ChangeRejected.
"""

import asyncio
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from asyncpg import IntegrityConstraintViolationError, LockNotAvailableError
from sqlalchemy import ARRAY, Table, Uuid, cast, func, select

from ledger.admin.catalog_plan import KEYS, RowFault, RowsByTable, TablePlan
from ledger.admin.changes import Change, Row, add_all, alter_all, fetch, remove_all, seen, violations
from ledger.admin.errors import THINGS, rejected_change
from ledger.admin.rows import price_name
from ledger.postgres import Connection
from ledger.schema import metadata
from ledger.schema.catalog import api_keys, tiers

LOCK = f"LOCK TABLE {', '.join(KEYS)} IN EXCLUSIVE MODE"
LOCK_ATTEMPTS = 20
LOCK_PAUSE_S = 0.05


async def lock_catalog(connection: Connection) -> None:
    """Let no other transaction write or lock rows of the catalog until this one ends; they can be read.

    Locks are not waited for one after the other, which could be a deadlock, until a transaction holds one for a second. The
    wait after that ends with an error that names it.
    """
    for _ in range(LOCK_ATTEMPTS):
        try:
            async with connection.transaction():
                await connection.execute(f"{LOCK} NOWAIT")
        except LockNotAvailableError:
            await asyncio.sleep(LOCK_PAUSE_S)
        else:
            return
    await connection.execute(LOCK)


async def read_catalog(connection: Connection) -> RowsByTable:
    """All rows in the order of their names, tiers of their priority; quotas in that of their creation."""
    rows = {name: await fetch(connection, select(*seen(table))) for name, table in _tables().items()}
    for name, columns in KEYS.items():
        order = {"tiers": ("priority",), "quotas": ("id",)}.get(name, columns)
        rows[name].sort(key=itemgetter(*order))
    return rows


async def rule_faults(connection: Connection, catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> list[RowFault]:
    """The rules of the tables that planned rows violate. A fault of a quota is one of its owner."""
    faults = []
    owners = _customers(catalog, plans)
    for name, table in _tables().items():
        for rows in (plans[name].created, [new for _, new in plans[name].changed]):
            for index, column, sentence in await violations(connection, table, rows):
                row = rows[index]
                if name == "quotas":
                    of_tier = row["customer_id"] is None
                    owner = row["tier"] if of_tier else owners[row["customer_id"]]
                    faults.append(RowFault("tiers" if of_tier else "customers", owner, "quotas", sentence))
                else:
                    faults.append(RowFault(name, _name(name, row, owners), column, sentence))
    return faults


async def write_plan(connection: Connection, catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> list[Change]:
    """Make the planned changes. Rules between rows hold at the end, so that tiers can exchange priorities and shares."""
    changes: list[Change] = []
    await connection.execute("SET CONSTRAINTS ALL DEFERRED")
    owners = _customers(catalog, plans)
    for name, table in _tables().items():
        created, changed = plans[name].created, plans[name].changed
        stored = _by_key(name, await add_all(connection, table, created))
        stored |= _by_key(name, await alter_all(connection, table, [new for _, new in changed]))
        written: list[tuple[Row | None, Row]] = [*((None, row) for row in created), *changed]
        for old, new in written:
            row = stored[_key(name, new)]
            changes.append(Change(THINGS[name], _name(name, row, owners), old, row))
    for name, table in reversed(_tables().items()):
        await remove_all(connection, table, plans[name].deleted)
        changes += [Change(THINGS[name], _name(name, row, owners), row, None) for row in plans[name].deleted]
    try:
        await connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    except IntegrityConstraintViolationError as error:
        raise rejected_change(error, tiers, {}) from error
    return changes


async def count_live_keys(connection: Connection, customers: list[Row]) -> int:
    """How many keys that are not revoked these customers have."""
    ids = cast([row["id"] for row in customers], ARRAY(Uuid))
    of_them = api_keys.c.customer_id == func.any(ids), api_keys.c.revoked_at.is_(None)
    (row,) = await fetch(connection, select(func.count().label("keys")).where(*of_them))
    return int(row["keys"])


def _tables() -> dict[str, Table]:
    return {name: metadata.tables[name] for name in KEYS}


def _customers(catalog: RowsByTable, plans: Mapping[str, TablePlan]) -> dict[object, str]:
    """The names of customers by id, created ones included."""
    return {row["id"]: row["name"] for row in (*catalog["customers"], *plans["customers"].created)}


def _key(table: str, row: Row) -> tuple[Any, ...]:
    return tuple(row[column] for column in KEYS[table])


def _by_key(table: str, rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    return {_key(table, row): row for row in rows}


def _name(table: str, row: Row, owners: Mapping[object, str]) -> str:
    if table == "prices":
        return price_name(row)
    if table == "quotas":
        return f"{row['quota']} of {owners[row['customer_id']] if row['customer_id'] else 'tier ' + row['tier']}"
    return str(row["name"])
