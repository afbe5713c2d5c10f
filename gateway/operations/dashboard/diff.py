"""The events of the dashboard: the differences between two states, and between two configurations. Pure functions."""

from collections.abc import Iterator, Mapping

from gateway.operations.dashboard.state import DashboardEvent, DashboardState, TierState, WorkerState
from gateway.operations.health.model import process_name
from gateway.operations.health.worker_losses import ACTIVE_STATUSES, INTENDED_STATUSES
from ledger.catalog.snapshot import Snapshot

MIN_REDUCTION = 0.1  # Limits vary all the time under load: an event reports only where a reduction starts and ends.


def state_changes(before: DashboardState, now: DashboardState) -> Iterator[DashboardEvent]:
    """The events between two states. Workers and gateways are compared only if Redis responded both times."""
    at_ms = now.at_ms
    if before.status != now.status:
        reason = f": {now.reasons[0]}" if now.reasons else "."
        level = "good" if now.status == "healthy" else "bad"
        yield DashboardEvent(at_ms, level, f"Status is {now.status}{reason}", "status")
    if before.redis_problem is None and now.redis_problem is not None:
        yield DashboardEvent(at_ms, "bad", f"Redis is not available: {now.redis_problem.rstrip('.')}.", "redis")
    elif before.redis_problem is not None and now.redis_problem is None:
        yield DashboardEvent(at_ms, "good", "Redis is available again.", "redis")
    earlier = {tier.name: tier for tier in before.tiers}
    for tier in now.tiers:
        was = earlier.get(tier.name)
        if was is not None and _is_reduced(was) != (reduced := _is_reduced(tier)):
            text = f"are reduced to {tier.limit_ratio:.0%}" if reduced else "are nearly restored"
            yield DashboardEvent(at_ms, "bad" if reduced else "good", f"Limits of {tier.name} {text}.", "limits")
    if now.dlq > before.dlq:
        text = f"{now.dlq - before.dlq} new dead letters, {now.dlq} in total."
        yield DashboardEvent(at_ms, "bad", text, "dead_letters")
    elif now.dlq < before.dlq:
        text = f"{before.dlq - now.dlq} dead letters removed, {now.dlq} remain."
        yield DashboardEvent(at_ms, "news", text, "dead_letters")
    if before.redis_problem is None and now.redis_problem is None:
        yield from _worker_events(before, now)
        for gateway in sorted(set(now.gateways) - set(before.gateways)):
            yield DashboardEvent(at_ms, "news", f"{process_name(gateway)} joined.", "gateway")
        for gateway in sorted(set(before.gateways) - set(now.gateways)):
            yield DashboardEvent(at_ms, "news", f"{process_name(gateway)} left.", "gateway")


def _is_reduced(tier: TierState) -> bool:
    return tier.limit_ratio < 1 - MIN_REDUCTION


def _worker_events(before: DashboardState, now: DashboardState) -> Iterator[DashboardEvent]:
    earlier = {(worker.pool, worker.id): worker for worker in before.workers}
    later = {(worker.pool, worker.id): worker for worker in now.workers}
    at_ms = now.at_ms
    for key, worker in later.items():
        was, pool = earlier.get(key), worker.pool
        if was is not None and was.cordoned != worker.cordoned:
            how = f" {worker.cordon}" if worker.cordon else ""
            text = f"cordoned{how.rstrip('.')}" if worker.cordoned else "uncordoned"
            yield DashboardEvent(at_ms, "news", f"{worker.id} was {text}.", "cordon", pool)
        if was is None:
            yield DashboardEvent(at_ms, "news", f"{worker.id} joined: {worker.status}.", "worker", pool)
        elif _serves(was) and not _serves(worker) and worker.status in ACTIVE_STATUSES:
            text = f"{worker.id} was lost: this was its last heartbeat."
            yield DashboardEvent(at_ms - worker.age_ms, "bad", text, "loss", pool)
        elif _serves(was) and not _serves(worker) and not worker.cordoned:
            fault = f", {worker.gpu.fault}" if worker.gpu is not None and worker.gpu.fault else ""
            level, kind = ("news", "worker") if worker.status in INTENDED_STATUSES else ("bad", "loss")
            yield DashboardEvent(at_ms, level, f"{worker.id} is {worker.status}{fault}.", kind, pool)
        elif _serves(worker) and not _serves(was):
            yield DashboardEvent(at_ms, "good", f"{worker.id} is serving.", "worker", pool)
        elif worker.healthy and was.model_pid and worker.model_pid not in (0, was.model_pid):
            yield DashboardEvent(at_ms, "bad", f"{worker.id}'s model process restarted.", "restart", pool)
    for key, worker in earlier.items():
        if key not in later:
            text = f"{worker.id} {'left' if _serves(worker) else 'was removed'}."
            yield DashboardEvent(at_ms, "news", text, "worker", worker.pool)


def _serves(worker: WorkerState) -> bool:
    """A brief pause is not an event: an endpoint at its rate limit causes several a minute."""
    return worker.healthy or worker.pausing


def config_changes(before: Snapshot | None, now: Snapshot | None, at_ms: int) -> Iterator[DashboardEvent]:
    """The events for rows of tiers and models that were added, changed or deleted."""
    if before is None or now is None or before is now:
        return
    tables: tuple[tuple[str, Mapping[str, object], Mapping[str, object]], ...] = (
        ("tier", {row.name: row for row in before.tiers}, {row.name: row for row in now.tiers}),
        ("model", dict(before.models), dict(now.models)),
    )
    for table, old, new in tables:
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                verb = "added" if name not in old else "deleted" if name not in new else "changed"
                yield DashboardEvent(at_ms, "news", f"Configuration: {table} {name} was {verb}.", "config")
