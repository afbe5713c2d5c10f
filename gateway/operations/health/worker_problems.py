"""The clauses about workers that are not healthy: workers with the same cause share one."""

from collections.abc import Mapping, Sequence

from gateway.limits.capacity import is_slow
from gateway.operations.health.model import shortened
from gateway.operations.health.outcomes import slow_batches
from gateway.operations.health.worker_losses import ACTIVE_STATUSES
from ledger.catalog.snapshot import WorkerCordon
from scheduler.protocol.pool_view import WorkerView

NAMED_WORKERS = 5
MIN_GROUP = 3
"""Fewer workers with the same cause have a clause each, with their own figures."""


def worker_problems(workers: Sequence[WorkerView], cordons: Mapping[str, WorkerCordon]) -> str:
    """What is wrong with each worker: the largest groups with a common cause first, then the other workers."""
    faults = {worker.id: _fault(worker, cordons.get(worker.id)) for worker in workers}
    groups: dict[tuple[str, str], list[WorkerView]] = {}
    for worker in workers:
        groups.setdefault(_kind(worker, faults[worker.id]), []).append(worker)
    large = sorted((each for each in groups.values() if len(each) >= MIN_GROUP), key=len, reverse=True)
    others = [[worker] for worker in workers if len(groups[_kind(worker, faults[worker.id])]) < MIN_GROUP]
    clauses = [*large, *others]
    left = sum(map(len, clauses[NAMED_WORKERS:]))
    named = [_clause(group, faults[group[0].id]) for group in clauses[:NAMED_WORKERS]]
    return "; ".join([*named, *([f"and {left} more"] if left else [])])


def reported_reasons(workers: Sequence[WorkerView]) -> str:
    """The reason that each worker reports, equal ones once, without a full stop."""
    groups: dict[str, list[str]] = {}
    for worker in workers:
        groups.setdefault(worker.reason.rstrip("."), []).append(worker.id)
    named = [f"{shortened(ids, NAMED_WORKERS)}: {reason}" for reason, ids in groups.items()]
    return "; ".join(named[:NAMED_WORKERS])


def _fault(worker: WorkerView, cordon: WorkerCordon | None) -> str:
    if worker.status == "cordoned" and cordon is not None:
        return str(cordon)
    return (worker.gpu.fault if worker.gpu is not None else "") or worker.reason.rstrip(".")


def _kind(worker: WorkerView, fault: str) -> tuple[str, str]:
    """Status and cause; equal for workers that share a clause."""
    if worker.pausing or is_slow(worker):
        return ("paused" if worker.pausing else "slow"), ""
    if worker.status in ACTIVE_STATUSES:
        return "lost", ""
    return worker.status, worker.cause or fault


def _clause(group: Sequence[WorkerView], fault: str) -> str:
    """The clause of one worker, or of several of the same kind; `fault`: of the first."""
    worker = group[0]
    ages_s = sorted({f"{each.age_ms / 1000:.1f}" for each in group}, key=float)
    seen = f"{' to '.join(dict.fromkeys((ages_s[0], ages_s[-1])))} s ago"
    subject, verb, past, named = worker.id, "is", "was", ""
    if len(group) > 1:
        subject, verb, past = f"{len(group)} workers", "are", "were"
        named = f": {shortened([each.id for each in group], NAMED_WORKERS)}"
    if worker.pausing:
        return f"{subject} {verb} briefly paused{named}"
    if is_slow(worker):
        return f"{subject} {verb} too slow: {slow_batches(worker)}{f' ({named[2:]})' if named else ''}"
    if worker.status in ACTIVE_STATUSES:
        return f"{subject} {past} last seen {seen}{named}"
    return f"{subject} {verb} {worker.status}{f' ({fault})' if fault else ''}, last seen {seen}{named}"
