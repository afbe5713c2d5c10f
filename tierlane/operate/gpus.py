"""`tierlane gpu`: the workers as Redis sees them and PostgreSQL wants them, and who is to get no new work."""

from collections.abc import Mapping
from typing import Any

import typer

from ledger.admin import rows as cordons
from ledger.admin.changes import Row
from ledger.postgres import Connection
from scheduler.protocol.pool_view import Observation, WorkerView
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.runner import APPLICATION, ChangeResult, changed
from tierlane.connect import database
from tierlane.operate.redis_connect import look_at, look_everywhere, pool_names
from tierlane.output import Column, print_rows, printable

COLUMNS = (
    Column("worker", "WORKER"),
    Column("pool", "POOL"),
    Column("status", "STATUS"),
    Column("healthy", "HEALTHY"),
    Column("utilization", "BUSY"),
    Column("in_flight", "IN FLIGHT"),
    Column("rps", "RPS"),
    Column("seen_s", "SEEN S AGO"),
    Column("backend", "BACKEND"),
    Column("fault", "FAULT"),
    Column("note", "NOTE"),
    Column("reason", "CORDONED FOR"),
)


def show_all(pool: str | None) -> Work:
    """Print the workers of one pool or of all. The work raises VerbError."""

    async def work(call: VerbCall) -> int:
        async with database(call.settings, APPLICATION) as connection:
            names = await pool_names(connection, call.settings, pool)
            reasons = {row["worker"]: row["reason"] for row in await cordons.list_cordons(connection)}
        seen = await look_at(call.settings, names, [])
        print_rows(call.output, COLUMNS, rows_of(seen, reasons, everywhere=pool is None), "workers")
        return 0

    return work


def rows_of(seen: Mapping[str, Observation], reasons: Mapping[str, str], *, everywhere: bool) -> list[Row]:
    """A row for each worker; with `everywhere` also for the cordoned ones that no pool has heard of lately."""
    rows = [_row(pool, worker, reasons) for pool, look in seen.items() for worker in look.workers]
    rows.sort(key=lambda row: (row["pool"], row["worker"]))
    known = {row["worker"] for row in rows}
    if everywhere:
        rows += [_away(worker, reason) for worker, reason in sorted(reasons.items()) if worker not in known]
    return rows


def _row(pool: str, worker: WorkerView, reasons: Mapping[str, str]) -> Row:
    return {
        "worker": worker.id,
        "pool": pool,
        "status": worker.status,
        "healthy": worker.healthy,
        "utilization": round(worker.utilization, 2),
        "in_flight": worker.in_flight,
        "rps": round(worker.rps, 1),
        "seen_s": round(worker.age_ms / 1000, 1),
        "backend": worker.backend,
        "fault": (worker.gpu.fault or None) if worker.gpu else None,
        "note": (worker.gpu.note or None) if worker.gpu else None,
        "cordoned": worker.id in reasons,
        "reason": _reason(reasons[worker.id]) if worker.id in reasons else None,
    }


def _away(worker: str, reason: str) -> Row:
    nothing: dict[str, Any] = dict.fromkeys(
        ("pool", "utilization", "in_flight", "rps", "seen_s", "backend", "fault", "note")
    )
    return {
        "worker": worker,
        **nothing,
        "status": "not seen",
        "healthy": False,
        "cordoned": True,
        "reason": _reason(reason),
    }


def _reason(reason: str) -> str:
    return reason or "no reason given"


def cordon(worker: str, reason: str, *, sure: bool) -> Work:
    """Cordon a worker; ask before where it is the last healthy one of its pool. The work raises Refused."""

    async def make(connection: Connection) -> ChangeResult:
        return ChangeResult([await cordons.cordon(connection, worker, reason)], notes=notes)

    notes: list[str] = []

    async def work(call: VerbCall) -> int:
        said, last = await _impact(call, worker)
        notes.append(said)
        if last and not (sure or call.dry_run):
            typer.confirm(f"{said} Cordon {printable(worker)}?", abort=True, err=True)
        return await changed(call, make)

    return work


def uncordon(worker: str) -> Work:
    """Undo it. The work raises Refused."""

    async def make(connection: Connection) -> ChangeResult:
        change = await cordons.uncordon(connection, worker)
        if change is None:
            return ChangeResult([], notes=[f"worker {printable(worker)}: is not cordoned, nothing to change"])
        return ChangeResult([change])

    return lambda call: changed(call, make)


async def _impact(call: VerbCall, worker: str) -> tuple[str, bool]:
    """What cordoning means now, in a sentence; and whether nothing healthy is left in the worker's pool."""
    seen = await look_everywhere(call, [])
    if seen is None:
        return "Redis does not answer: what the worker does now is not known.", False
    return impact(worker, seen)


def impact(worker: str, seen: Mapping[str, Observation]) -> tuple[str, bool]:
    """The same, from one look at each pool."""
    for pool, look in seen.items():
        for view in look.workers:
            if view.id == worker:
                left = sum(other.healthy for other in look.workers if other.id != worker)
                runs, gpus = _counted(view.in_flight, "request"), _counted(left, "healthy GPU")
                return f"It finishes {runs} that it has; pool {pool} is left with {gpus}.", view.healthy and not left
    return "No worker of this id was seen in the last five minutes; it holds from when it comes.", False


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
