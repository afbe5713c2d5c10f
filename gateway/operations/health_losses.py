"""Health of those that a pool stands on beside its workers: schedulers that pass, and the other gateways. Pure."""

from collections.abc import Sequence

from gateway.finding import Finding, Status, clock, first_of
from gateway.gateway_losses import LostGateway
from scheduler.protocol.index_repair import REPAIRED
from scheduler.protocol.pool_view import Observation
from scheduler.tasks import EndedTask

SILENT_MS = 1000.0
"""A scheduler passes ten times a second."""

STOPPED_MS = 2000.0
"""By now what waits has run out of its time in the queue, as tiers have it by default."""

NAMED = 3


def scheduling(seen: Observation | None) -> Finding:
    """Whether any scheduler still passes: without one no batch is formed, and nothing that is accepted is served."""
    if seen is None:  # That nothing is seen is said by the check of Redis.
        return Finding("scheduler:pass_age", "component", "healthy", None, "ms")
    age_ms, level = seen.scheduler_age_ms, scheduling_level(seen)
    if level == "healthy":
        return Finding("scheduler:pass_age", "component", level, round(age_ms or 0.0), "ms")
    since = "No scheduler is known" if age_ms is None else f"No scheduler has passed for {age_ms / 1000:.1f} s"
    if _stood_in(seen):
        reason = f"{since}: gateways form the batches and write the audit meanwhile; start a scheduler."
    else:
        reason = f"{since}: no batches are formed, and requests wait until their time is up."
    return Finding("scheduler:pass_age", "component", level, age_ms, "ms", reason)


def scheduling_level(seen: Observation) -> Status:
    """How bad it is."""
    age_ms = seen.scheduler_age_ms
    if age_ms is not None and age_ms < SILENT_MS:
        return "healthy"
    return "degraded" if _stood_in(seen) or (age_ms is not None and age_ms < STOPPED_MS) else "down"


def _stood_in(seen: Observation) -> bool:
    """Whether somebody else did their work just now."""
    return seen.pass_age_ms is not None and seen.pass_age_ms < SILENT_MS


def other_gateways(seen: Observation | None, lost: Sequence[LostGateway]) -> Finding:
    """Whether all gateways beat that did before."""
    missing = {each.gateway for each in lost}
    beating = len([each for each in seen.gateways if each.gateway_id not in missing]) if seen else 0
    if not lost:
        return Finding("gateways:beating", "component", "healthy", beating, "gateways")
    named = first_of([f"{each.gateway} (last heard at {clock(each.at_ms)})" for each in lost], NAMED)
    verb = "gateway is" if len(lost) == 1 else "gateways are"
    reason = f"{len(lost)} {verb} lost: {named}; {beating} beat."
    return Finding("gateways:beating", "component", "degraded", beating, "gateways", reason)


def ended_tasks(own: Sequence[EndedTask], seen: Observation | None, gateway_id: str) -> Finding:
    """Whether an endless task of any process ended, and was started again. `gateway_id` is this gateway's."""
    told = [f"this gateway: {ended.sentence()}" for ended in own]
    if seen:
        told += [
            f"gateway {other.gateway_id}: {sentence}"
            for other in seen.gateways
            if other.gateway_id != gateway_id
            for sentence in other.ended_tasks
        ]
        told += [notice for notice in seen.notices if not notice.startswith(REPAIRED)]
    if not told:
        return Finding("tasks:ended", "component", "healthy", 0, "tasks")
    verb = "A background task" if len(told) == 1 else f"{len(told)} background tasks"
    reason = (
        f"{verb} ended unexpectedly and {'was' if len(told) == 1 else 'were'} started again: {'; '.join(told[:NAMED])}. "
        "The log of that process has the place of the fault in its line `task_ended`: report it, and restart the process "
        "if this does not end."
    )
    return Finding("tasks:ended", "component", "degraded", len(told), "tasks", reason)


def repaired_keys(seen: Observation | None) -> Finding:
    """Whether schedulers had to repair an index in Redis."""
    told = [notice for notice in seen.notices if notice.startswith(REPAIRED)] if seen else []
    if not told:
        return Finding("redis:repaired", "datastore", "healthy", 0, "keys")
    reason = f"{'; '.join(told[:NAMED])}: find out who else writes to this Redis, and keep it out."
    return Finding("redis:repaired", "datastore", "degraded", len(told), "keys", reason)
