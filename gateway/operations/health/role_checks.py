"""The checks of schedulers, gateways, model processes, background tasks and repaired indexes: pure functions."""

from collections.abc import Sequence

from gateway.operations.health.advice import finding, problem
from gateway.operations.health.gateway_losses import LostGateway
from gateway.operations.health.model import HealthFinding, Status, process_name, shortened, time_of_day
from gateway.operations.health.restarts import Restart
from scheduler.protocol.index_repair import REPAIRED
from scheduler.protocol.pool_view import Observation
from scheduler.tasks import EndedTask

SCHEDULER_SILENT_MS = 1000.0
"""A scheduler runs ten times a second."""

STOPPED_MS = 2000.0
"""By then, queued requests have reached the default queue timeout of a tier."""

MOST_ROLES_NAMED = 3
MOST_RESTARTS_NAMED = 5


def restarted(latest: Sequence[Restart]) -> HealthFinding:
    """Whether a model process was replaced recently."""
    reason = None
    if len(latest) == 1:
        reason = f"{latest[0].worker}'s model process restarted at {time_of_day(latest[0].at_ms)}."
    elif latest:
        named = shortened([f"{each.worker} (at {time_of_day(each.at_ms)})" for each in latest], MOST_RESTARTS_NAMED)
        reason = f"{len(latest)} model processes restarted: {named}."
    about = shortened([each.worker for each in latest], MOST_RESTARTS_NAMED)
    return finding("models:restarted", "component", len(latest), "workers", reason, "model_restarted", about)


def scheduling(seen: Observation | None, *, registering: bool = False, expected: bool = True) -> HealthFinding:
    """Whether batches are formed by a scheduler, or at least by gateways. Otherwise accepted requests are not served.

    `registering`: Redis was restarted without its data a moment ago. `expected`: schedulers are deployed.
    """
    if seen is None:  # Reported by the check of Redis.
        return HealthFinding("scheduler:pass_age", "component", "healthy", None, "ms")
    age_ms, level = _scheduling_age(seen, expected=expected), scheduling_level(seen, expected=expected)
    if level == "healthy":
        return HealthFinding("scheduler:pass_age", "component", level, round(age_ms or 0.0), "ms")
    if registering and age_ms is None:
        reason = "No scheduler is known since Redis was restarted without its data; schedulers are registering again."
        return problem("workers_registering", "scheduler:pass_age", "component", "degraded", age_ms, "ms", reason)
    silence = "No scheduler is known" if age_ms is None else f"No scheduler has been active for {age_ms / 1000:.1f} s"
    if not expected:
        silence += ", nor a gateway in its place"
    if _gateways_schedule(seen):
        reason = f"{silence}: gateways form the batches and write the audit meanwhile."
    else:
        reason = f"{silence}: no batches are formed, and queued requests time out."
    return problem("no_scheduler", "scheduler:pass_age", "component", level, age_ms, "ms", reason)


def scheduling_level(seen: Observation, *, expected: bool = True) -> Status:
    """The level of the scheduler check."""
    age_ms = _scheduling_age(seen, expected=expected)
    if age_ms is not None and age_ms < SCHEDULER_SILENT_MS:
        return "healthy"
    return "degraded" if _gateways_schedule(seen) or (age_ms is not None and age_ms < STOPPED_MS) else "down"


def _scheduling_age(seen: Observation, *, expected: bool) -> float | None:
    """The age of the last pass: of a scheduler, or of any process where no schedulers are deployed."""
    return seen.scheduler_age_ms if expected else seen.pass_age_ms


def _gateways_schedule(seen: Observation) -> bool:
    """Whether gateways do the work of the schedulers."""
    return seen.pass_age_ms is not None and seen.pass_age_ms < SCHEDULER_SILENT_MS


def lost_gateways(seen: Observation | None, lost: Sequence[LostGateway]) -> HealthFinding:
    """Whether all known gateways send heartbeats."""
    names = {each.gateway: process_name(each.gateway) for each in lost}
    alive = len([each for each in seen.gateways if each.gateway_id not in names]) if seen else 0
    named = shortened(
        [f"{names[each.gateway]} (last heartbeat at {time_of_day(each.at_ms)})" for each in lost], MOST_ROLES_NAMED
    )
    verb = "gateway is" if len(lost) == 1 else "gateways are"
    reason = f"{len(lost)} {verb} lost: {named}; {alive} alive." if lost else None
    about = shortened(list(names.values()), MOST_ROLES_NAMED)
    return finding("gateways:beating", "component", alive, "gateways", reason, "gateway_lost", about)


def ended_tasks(own: Sequence[EndedTask], seen: Observation | None, gateway_id: str) -> HealthFinding:
    """Whether a background task of any process ended and was restarted. `gateway_id`: this gateway's."""
    reports = [f"{process_name(gateway_id)}: {ended.sentence()}" for ended in own]
    if seen:
        reports += [
            f"{process_name(other.gateway_id)}: {sentence}"
            for other in seen.gateways
            if other.gateway_id != gateway_id
            for sentence in other.ended_tasks
        ]
        reports += [notice for notice in seen.notices if not notice.startswith(REPAIRED)]
    subject, verb = ("A background task", "was") if len(reports) == 1 else (f"{len(reports)} background tasks", "were")
    reason = f"{subject} ended unexpectedly and {verb} restarted: {'; '.join(reports[:MOST_ROLES_NAMED])}."
    return finding("tasks:ended", "component", len(reports), "tasks", reason if reports else None, "task_ended")


def repaired_keys(seen: Observation | None) -> HealthFinding:
    """Whether schedulers had to repair an index in Redis."""
    repairs = [notice for notice in seen.notices if notice.startswith(REPAIRED)] if seen else []
    reason = f"{'; '.join(repairs[:MOST_ROLES_NAMED])}. Another client writes to this Redis." if repairs else None
    return finding("redis:repaired", "datastore", len(repairs), "keys", reason, "redis_key_repaired")
