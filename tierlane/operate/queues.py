"""`tierlane queue`: what waits in each tier, and tiers of which no batch is to be formed for now."""

from collections.abc import Mapping, Sequence

import typer

from ledger.admin.changes import Row, alter, find
from ledger.admin.rows import list_tiers
from ledger.postgres import Connection
from ledger.schema.catalog import tiers
from scheduler.protocol.pool_view import Observation
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.runner import APPLICATION, ChangeResult, changed
from tierlane.connect import database
from tierlane.operate.redis_connect import look_at, look_everywhere, pool_names
from tierlane.output import Column, print_rows, printable

COLUMNS = (
    Column("tier", "TIER"),
    Column("pool", "POOL"),
    Column("depth", "DEPTH"),
    Column("most", "MOST"),
    Column("oldest_ms", "OLDEST MS"),
    Column("most_ms", "MOST MS"),
    Column("paused", "PAUSED"),
)


def show_all(pool: str | None) -> Work:
    """Print the queues of one pool or of all. The work raises VerbError."""

    async def work(call: VerbCall) -> int:
        async with database(call.settings, APPLICATION) as connection:
            names = await pool_names(connection, call.settings, pool)
            known = await list_tiers(connection)
        seen = await look_at(call.settings, names, [tier["name"] for tier in known])
        print_rows(call.output, COLUMNS, rows_of(known, seen), "tiers")
        return 0

    return work


def rows_of(known: Sequence[Row], seen: Mapping[str, Observation]) -> list[Row]:
    """A row for each tier of each pool, in order of service."""
    return [
        {
            "tier": tier["name"],
            "pool": pool,
            "depth": look.tiers[tier["name"]].depth,
            "most": tier["max_queue_depth"],
            "oldest_ms": round(look.tiers[tier["name"]].oldest_ms, 1),
            "most_ms": tier["max_queue_ms"],
            "paused": tier["paused"],
        }
        for tier in known
        for pool, look in seen.items()
    ]


def pause(name: str, *, sure: bool) -> Work:
    """Pause a tier, and ask before unless `sure` or trying. The work raises Refused."""

    async def work(call: VerbCall) -> int:
        said = await _impact(call, name)
        if not (sure or call.dry_run):
            typer.confirm(f"{said} Pause {printable(name)}?", abort=True, err=True)
        return await changed(call, lambda connection: _set(connection, name, paused=True, note=said))

    return work


def resume(name: str) -> Work:
    """Undo it. The work raises Refused."""

    async def work(call: VerbCall) -> int:
        said = await _waiting(call, name)
        return await changed(call, lambda connection: _set(connection, name, paused=False, note=said))

    return work


async def _set(connection: Connection, name: str, *, paused: bool, note: str) -> ChangeResult:
    change = await alter(connection, tiers, await find(connection, tiers, name), {"paused": paused})
    return ChangeResult([change], notes=[note] if change.old != change.new else [])


async def _impact(call: VerbCall, name: str) -> str:
    async with database(call.settings, APPLICATION) as connection:
        most_ms = (await find(connection, tiers, name))["max_queue_ms"]
    return f"{await _waiting(call, name)} Whoever waits for more than {most_ms:,} ms is answered queue_timeout."


async def _waiting(call: VerbCall, name: str) -> str:
    """How many wait in the tier, over all pools, in a sentence."""
    seen = await look_everywhere(call, [name])
    if seen is None:
        return "Redis does not answer: how many wait is not known."
    depth = sum(look.tiers[name].depth for look in seen.values())
    return f"{depth:,} {'request waits' if depth == 1 else 'requests wait'} in tier {printable(name)}."
