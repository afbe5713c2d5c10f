"""`tierlane gpu` and `queue`: the workers and queues of pools in Redis, cordons and pauses in PostgreSQL."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import typer

from ledger.admin import rows as cordons
from ledger.admin.changes import Row, alter, find
from ledger.admin.rows import list_tiers
from ledger.postgres import Connection
from ledger.schema.catalog import tiers
from ratelimit.request_limits import FUNCTION, LANGUAGE_MODEL, limits_of_workers
from scheduler.protocol.pool_view import Observation, WorkerView
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import tag_at
from scheduler.redis_client.keys import Keys, is_pool_name, place_name
from tierlane.admin import remote as catalog
from tierlane.admin.change_result import ChangeResult
from tierlane.admin.options import VerbCall
from tierlane.admin.remote import APPLICATION
from tierlane.admin.runner import apply
from tierlane.connect import UsageError, VerbError, database
from tierlane.operate.cells import pools_to_read, redis_at, urls_of_cells
from tierlane.output import Column, counted, named, print_rows, printable
from tierlane.settings.model import Settings

WORKER_COLUMNS = (
    *named("worker", "pool", "status", "healthy"),
    Column("utilization", "BUSY"),
    *named("in_flight", "slots", "rps"),
    Column("seen_s", "SEEN S AGO"),
    Column("backend", "BACKEND"),
    Column("slots_source", "SLOTS FROM"),
    *named("fault", "note", "cause", "problem"),
    Column("reason", "CORDONED FOR"),
)
QUEUE_COLUMNS = named("tier", "pool", "depth", "most", "oldest_ms", "most_ms", "paused")


class Places(NamedTuple):
    """The pools in cells that a verb reads."""

    pools: Sequence[str]
    urls: Mapping[str, str]  # Of cells, by name.


async def observe(settings: Settings, places: Places, tier_names: Sequence[str]) -> dict[str, Observation]:
    """Read each pool in each cell once, by place. A cell that does not respond is left out, with a warning.

    Raises VerbError if no cell responds.
    """
    found: dict[str, Observation] = {}
    faults: list[str] = []
    for cell, url in places.urls.items():
        try:
            async with redis_at(url) as client:
                for pool in places.pools:
                    presence = Presence(client, Keys(pool, tag_at(client)), gone_ms=settings.gone_ms)
                    found[place_name(pool, cell)] = await presence.observe(tier_names)
        except VerbError as error:
            faults.append(str(error) if len(places.urls) == 1 else f"Cell {cell} cannot be read: {error}")
    if len(faults) == len(places.urls):
        raise VerbError(" ".join(faults))
    for fault in faults:
        typer.echo(f"Warning: {fault}", err=True)
    return found


async def places_of(
    connection: Connection, settings: Settings, pool: str | None = None, cell: str | None = None
) -> Places:
    """The pool `pool`, or the own pool and those of enabled models; in the cell `cell`, or in all.

    Raises UsageError and VerbError.
    """
    urls = await urls_of_cells(connection, settings, cell)
    if pool is not None:
        if not is_pool_name(pool):
            raise UsageError(f"--pool: must be made of letters, digits, - and _, got {pool!r}")
        return Places([pool], urls)
    return Places(sorted(await pools_to_read(connection, settings)), urls)


async def _observe_all(call: VerbCall, tier_names: Sequence[str]) -> dict[str, Observation] | None:
    """Read all places once; None if no Redis responds. Raises VerbError for PostgreSQL."""
    if not call.settings.redis_url:
        return None
    async with database(call.settings, APPLICATION) as connection:
        places = await places_of(connection, call.settings)
    try:
        return await observe(call.settings, places, tier_names)
    except VerbError:
        return None


async def show_workers(call: VerbCall, pool: str | None, cell: str | None) -> int:
    """Print the workers of a pool or of all pools, in a cell or in all."""
    async with database(call.settings, APPLICATION) as connection:
        places = await places_of(connection, call.settings, pool, cell)
        reasons = {row["worker"]: row["reason"] for row in await cordons.list_cordons(connection)}
    rows = worker_rows(await observe(call.settings, places, []), reasons, with_absent=pool is None and cell is None)
    print_rows(call.output, WORKER_COLUMNS, rows, "workers")
    return 0


def worker_rows(pools: Mapping[str, Observation], reasons: Mapping[str, str], *, with_absent: bool) -> list[Row]:
    """A row for each worker; `reasons` are those of cordons. `with_absent`: also cordoned workers that were not seen."""
    rows = [_worker_row(pool, worker, reasons) for pool, observed in pools.items() for worker in observed.workers]
    rows.sort(key=lambda row: (row["pool"], row["worker"]))
    if with_absent:
        seen = {row["worker"] for row in rows}
        absent: Row = dict.fromkeys(column.field for column in WORKER_COLUMNS)
        rows += [
            {
                **absent,
                "worker": worker,
                "status": "not seen",
                "healthy": False,
                "cordoned": True,
                "reason": reason or "no reason given",
            }
            for worker, reason in sorted(reasons.items())
            if worker not in seen
        ]
    return rows


def _worker_row(pool: str, worker: WorkerView, reasons: Mapping[str, str]) -> Row:
    seen_s = round(worker.age_ms / 1000, 1)
    # A lost worker cannot say so: its last heartbeat has the status and the figures that it had then.
    lost = worker.status in {"ready", "busy", "paused"} and not worker.healthy and not worker.pausing
    row: Row = {
        "worker": worker.id,
        "pool": pool,
        "status": "lost" if lost else worker.status,
        "healthy": worker.healthy,
        "utilization": round(worker.utilization, 2),
        "in_flight": worker.in_flight,
        "slots": worker.slots or None,
        "rps": round(worker.rps, 1),
        "seen_s": seen_s,
        "backend": worker.backend,
        "slots_source": worker.slots_source or None,
        "fault": (worker.gpu.fault or None) if worker.gpu else None,
        "note": (worker.gpu.note or None) if worker.gpu else None,
        "cause": worker.cause or None,
        "problem": worker.reason or None,
        "cordoned": worker.id in reasons,
        "reason": (reasons[worker.id] or "no reason given") if worker.id in reasons else None,
    }
    if lost:
        row |= dict.fromkeys(("utilization", "in_flight", "slots", "rps", "slots_source", "cause"))
        row["problem"] = f"last seen {seen_s} s ago"
    return row


async def cordon(call: VerbCall, worker: str, reason: str, *, sure: bool) -> int:
    """Cordon a worker, after a confirmation if it is the last healthy one of its pool and not `sure`."""
    pools = await _observe_all(call, [])
    effect, last = ("Redis does not respond: the state of the worker is unknown.", False)
    if pools is not None:
        effect, last = cordon_effect(worker, pools)
    if last and not (sure or call.dry_run):
        typer.confirm(f"{effect} Cordon {printable(worker)}?", abort=True, err=True)

    async def change(connection: Connection) -> ChangeResult:
        return ChangeResult([await catalog.cordon(connection, worker, reason)], notes=[effect])

    return await apply(call, change)


async def uncordon(connection: Connection, worker: str) -> ChangeResult:
    row = await catalog.uncordon(connection, worker)
    if row is None:
        return ChangeResult([], notes=[f"worker {printable(worker)}: is not cordoned, nothing to change"])
    return ChangeResult([row])


def cordon_effect(worker: str, pools: Mapping[str, Observation]) -> tuple[str, bool]:
    """The effect of a cordon as a sentence, and whether the worker is the last healthy one of its pool."""
    for pool, observed in pools.items():
        for view in observed.workers:
            if view.id == worker:
                left = sum(other.healthy for other in observed.workers if other.id != worker)
                running, gpus = counted(view.in_flight, "request"), counted(left, "healthy GPU")
                return f"It finishes {running}; pool {pool} keeps {gpus}.", view.healthy and not left
    return "No worker with this id was seen in the last five minutes; the cordon applies when it starts.", False


async def show_queues(call: VerbCall, pool: str | None, cell: str | None) -> int:
    """Print the queues of a pool or of all pools, in a cell or in all, in order of priority."""
    async with database(call.settings, APPLICATION) as connection:
        places = await places_of(connection, call.settings, pool, cell)
        tier_rows = await list_tiers(connection)
    pools = await observe(call.settings, places, [tier["name"] for tier in tier_rows])
    rows = [
        {
            "tier": tier["name"],
            "pool": name,
            "depth": observed.tiers[tier["name"]].depth,
            "most": tier["max_queue_depth"],
            "oldest_ms": round(observed.tiers[tier["name"]].oldest_ms, 1),
            "most_ms": tier["max_queue_ms"] or limits_of_workers(observed.workers, LANGUAGE_MODEL).queue_ms,
            "paused": tier["paused"],
        }
        for tier in tier_rows
        for name, observed in pools.items()
    ]
    print_rows(call.output, QUEUE_COLUMNS, rows, "tiers")
    return 0


async def pause(call: VerbCall, name: str, *, sure: bool) -> int:
    """Pause a tier, after a confirmation unless `sure`."""
    async with database(call.settings, APPLICATION) as connection:
        most_ms = (await find(connection, tiers, name))["max_queue_ms"]
    default = f"{FUNCTION.queue_ms:,} ms (language models: {LANGUAGE_MODEL.queue_ms:,} ms)"
    longest = default if most_ms is None else f"{most_ms:,} ms"
    effect = f"{await _waiting(call, name)} Requests that wait for more than {longest} get queue_timeout."
    if not (sure or call.dry_run):
        typer.confirm(f"{effect} Pause {printable(name)}?", abort=True, err=True)
    return await apply(call, lambda connection: _set_paused(connection, name, paused=True, note=effect))


async def resume(call: VerbCall, name: str) -> int:
    waiting = await _waiting(call, name)
    return await apply(call, lambda connection: _set_paused(connection, name, paused=False, note=waiting))


async def _set_paused(connection: Connection, name: str, *, paused: bool, note: str) -> ChangeResult:
    change = await alter(connection, tiers, await find(connection, tiers, name), {"paused": paused})
    return ChangeResult([change], notes=[note] if change.old != change.new else [])


async def _waiting(call: VerbCall, name: str) -> str:
    """The number of waiting requests of the tier in all pools, as a sentence."""
    pools = await _observe_all(call, [name])
    if pools is None:
        return "Redis does not respond: the number of waiting requests is unknown."
    depth = sum(observed.tiers[name].depth for observed in pools.values())
    return f"{depth:,} {'request waits' if depth == 1 else 'requests wait'} in tier {printable(name)}."
