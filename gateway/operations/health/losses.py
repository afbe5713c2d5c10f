"""Lost workers and gateways, restarted model processes, and the checks of schedulers, gateways and background tasks.

Redis removes a worker five minutes after its last heartbeat, or when it shuts down; its loss is remembered here for
longer, because it explains the missing capacity. A gateway that shuts down is removed from the list at once, so a silent
gateway is lost, until another one starts in its place under another name. A worker with a new model process has lost
its previous one. The checks are pure functions.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gateway.heartbeat import BEAT_S
from gateway.limits.capacity import is_slow
from gateway.operations.health.advice import problem
from gateway.operations.health.model import HealthFinding, Status, process_name, shortened, time_of_day
from scheduler.protocol.index_repair import REPAIRED
from scheduler.protocol.pool_view import Observation, WorkerView
from scheduler.tasks import EndedTask

INTENDED_STATUSES = ("cordoned", "draining")  # An operator caused these.
LOSS_KEEP_MS = 15 * 60_000
ACTIVE_STATUSES = ("ready", "busy", "paused")  # A worker without heartbeats whose last status is one of these is lost.


class Loss(NamedTuple):
    """A worker that was lost at `at_ms` of Redis' wall clock."""

    worker: str
    at_ms: int


class Losses:
    """The lost workers of one pool. `update` is called with each new observation. A pausing worker is not lost."""

    def __init__(self) -> None:
        self._serving: frozenset[str] = frozenset()
        self._lost: dict[str, Loss] = {}
        self._first_seen: dict[str, int] | None = None  # None before the first observation.
        self._replaced: dict[str, str] = {}  # Lost worker -> the worker that serves in its place.

    def update(self, workers: Sequence[WorkerView], now_ms: int, elsewhere: Collection[str] = ()) -> None:
        """Add workers that stopped serving; remove those that serve again or were lost more than LOSS_KEEP_MS ago.

        `elsewhere`: those that serve other cells.
        """
        serving = frozenset(worker.id for worker in workers if worker.healthy or worker.pausing)
        unhealthy = {worker.id: worker for worker in workers if worker.id not in serving}
        for worker_id, worker in unhealthy.items():
            if worker.status in INTENDED_STATUSES or is_slow(worker):
                continue
            # A worker that was never observed serving may just be starting.
            if worker_id in self._serving or worker.status in ACTIVE_STATUSES:
                self._lost.setdefault(worker_id, Loss(worker_id, now_ms - round(worker.age_ms)))
        for worker_id in self._serving - serving - unhealthy.keys():
            self._lost.setdefault(worker_id, Loss(worker_id, now_ms))
        oldest = now_ms - LOSS_KEEP_MS
        returned = serving.union(elsewhere)
        self._lost = {
            each.worker: each for each in self._lost.values() if each.at_ms > oldest and each.worker not in returned
        }
        self._serving = serving
        self._update_replaced(workers, unhealthy.keys(), now_ms)

    def _update_replaced(self, workers: Sequence[WorkerView], unhealthy: Collection[str], now_ms: int) -> None:
        """Assign to each lost worker, the longest lost first, one that was first observed later and serves."""
        # Workers of the first observation are not replacements: when they started is not known.
        known = {each.id: 0 for each in workers} if self._first_seen is None else self._first_seen
        self._first_seen = first_seen = {each.id: known.get(each.id, now_ms) for each in workers}
        self._replaced = {
            lost: other
            for lost, other in self._replaced.items()
            if lost not in self._serving and other in self._serving
        }
        for loss in reversed(self.all):
            taken = self._replaced.values()
            started = (each for each in self._serving if first_seen[each] >= loss.at_ms and each not in taken)
            other = min(started, key=lambda each: (first_seen[each], each), default=None)
            if other is not None:
                self._replaced[loss.worker] = other
        for worker in self._replaced.keys() - unhealthy:
            self._lost.pop(worker, None)

    def without_replaced(self, seen: Observation, elsewhere: Collection[str] = ()) -> Observation:
        """The observation without silent workers that were replaced: Redis lists them for five minutes.

        Also without those that serve other cells, `elsewhere`, and have not ended their batches here.
        """
        gone = {each.id for each in seen.workers if each.status in ACTIVE_STATUSES and each.id in self._replaced}
        gone |= {each.id for each in seen.workers if not each.healthy and each.id in elsewhere}
        return replace(seen, workers=[each for each in seen.workers if each.id not in gone]) if gone else seen

    @property
    def all(self) -> tuple[Loss, ...]:
        """The latest first."""
        lost = (each for each in self._lost.values() if each.worker not in self._replaced)
        return tuple(sorted(lost, key=lambda loss: loss.at_ms, reverse=True))


GATEWAY_SILENT_MS = 4000 * BEAT_S
"""A gateway without heartbeats for this time is lost. A second later Redis removes it."""

GATEWAY_LOSS_KEEP_MS = 5 * 60_000
"""A gateway that is not replaced within this time is no longer reported."""


class LostGateway(NamedTuple):
    """`at_ms`: its last heartbeat, by Redis' wall clock."""

    gateway: str
    at_ms: int


class GatewayLosses:
    """The lost gateways of one pool. `update` is called with each new observation."""

    def __init__(self) -> None:
        self._lost: dict[str, LostGateway] = {}
        self._first_seen: dict[str, int] = {}  # Listed gateways, and when each was first observed.
        self._replacements: set[str] = set()  # Gateways that count as the replacement of a lost one.

    def update(self, ages_ms: Mapping[str, float], now_ms: int) -> None:
        """Process the age of each gateway's last heartbeat."""
        # A gateway that has just started, perhaps as a replacement, does not know which others started after a loss.
        # It reports only gateways whose last heartbeat is later than one heartbeat before its first observation.
        first_ms = now_ms if self._first_seen else now_ms - round(1000 * BEAT_S)
        self._first_seen = {name: self._first_seen.get(name, first_ms) for name in ages_ms}
        self._replacements &= ages_ms.keys()
        silent = silent_gateways(ages_ms)
        for name in silent:
            self._lost.setdefault(name, LostGateway(name, now_ms - round(ages_ms[name])))
        for each in sorted(self._lost.values(), key=lambda lost: lost.at_ms):
            # A silent gateway that is still listed is reported even if its replacement has started.
            if each.gateway not in silent and self._is_resolved(each, now_ms):
                del self._lost[each.gateway]

    def _is_resolved(self, lost: LostGateway, now_ms: int) -> bool:
        """Whether it has returned, was lost too long ago, or was replaced; then marks the replacement."""
        if lost.gateway in self._first_seen or now_ms - lost.at_ms > GATEWAY_LOSS_KEEP_MS:
            return True
        started = (name for name, at_ms in self._first_seen.items() if at_ms >= lost.at_ms)
        replacement = next((name for name in started if name not in self._replacements), None)
        if replacement is not None:
            self._replacements.add(replacement)
        return replacement is not None

    @property
    def all(self) -> tuple[LostGateway, ...]:
        """The latest first."""
        return tuple(sorted(self._lost.values(), key=lambda lost: lost.at_ms, reverse=True))


def silent_gateways(ages_ms: Mapping[str, float]) -> Sequence[str]:
    """Listed gateways whose last heartbeat is older than GATEWAY_SILENT_MS."""
    return sorted(name for name, age_ms in ages_ms.items() if age_ms >= GATEWAY_SILENT_MS)


RESTART_REPORTED_MS = 3000
"""A restart is reported for this time, so that a client that polls each second sees it. Dashboard events last longer."""

MOST_RESTARTS_NAMED = 5
RESTARTS_COUNTED_MS = 60_000
MOST_RESTARTS_COUNTED = 100


class Restart(NamedTuple):
    """When a worker's new model process was first observed, by Redis' wall clock."""

    worker: str
    at_ms: int


class Restarts:
    """The restarted model processes of one pool. `update` is called with each new observation."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._latest: dict[str, Restart] = {}
        self._times: deque[int] = deque(maxlen=MOST_RESTARTS_COUNTED)

    def update(self, workers: Sequence[WorkerView], now_ms: int) -> None:
        """Compare the process ids that the workers report; 0 while there is no process."""
        for worker in workers:
            if worker.model_pid and self._pids.get(worker.id, worker.model_pid) != worker.model_pid:
                self._latest[worker.id] = Restart(worker.id, now_ms)
                self._times.append(now_ms)
        while self._times and now_ms - self._times[0] >= RESTARTS_COUNTED_MS:
            self._times.popleft()
        self._pids = {worker.id: worker.model_pid or self._pids.get(worker.id, 0) for worker in workers}
        self._pids = {name: pid for name, pid in self._pids.items() if pid}
        self._latest = {
            each.worker: each for each in self._latest.values() if now_ms - each.at_ms < RESTART_REPORTED_MS
        }

    @property
    def all(self) -> tuple[Restart, ...]:
        """The latest first."""
        return tuple(sorted(self._latest.values(), key=lambda each: each.at_ms, reverse=True))

    @property
    def last_minute(self) -> int:
        """The number of restarts within a minute, at most 100."""
        return len(self._times)


def restarted(latest: Sequence[Restart]) -> HealthFinding:
    """Whether a model process was replaced recently."""
    if not latest:
        return HealthFinding("models:restarted", "component", "healthy", 0, "workers")
    if len(latest) == 1:
        reason = f"{latest[0].worker}'s model process restarted at {time_of_day(latest[0].at_ms)}."
    else:
        named = shortened([f"{each.worker} (at {time_of_day(each.at_ms)})" for each in latest], MOST_RESTARTS_NAMED)
        reason = f"{len(latest)} model processes restarted: {named}."
    about = shortened([each.worker for each in latest], MOST_RESTARTS_NAMED)
    return problem(
        "model_restarted", "models:restarted", "component", "degraded", len(latest), "workers", reason, about
    )


SCHEDULER_SILENT_MS = 1000.0
"""A scheduler runs ten times a second."""

STOPPED_MS = 2000.0
"""By then, queued requests have reached the default queue timeout of a tier."""

MOST_ROLES_NAMED = 3


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
    missing = {each.gateway for each in lost}
    alive = len([each for each in seen.gateways if each.gateway_id not in missing]) if seen else 0
    if not lost:
        return HealthFinding("gateways:beating", "component", "healthy", alive, "gateways")
    names = {each.gateway: process_name(each.gateway) for each in lost}
    named = shortened(
        [f"{names[each.gateway]} (last heartbeat at {time_of_day(each.at_ms)})" for each in lost], MOST_ROLES_NAMED
    )
    verb = "gateway is" if len(lost) == 1 else "gateways are"
    reason = f"{len(lost)} {verb} lost: {named}; {alive} alive."
    about = shortened(list(names.values()), MOST_ROLES_NAMED)
    return problem("gateway_lost", "gateways:beating", "component", "degraded", alive, "gateways", reason, about)


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
    if not reports:
        return HealthFinding("tasks:ended", "component", "healthy", 0, "tasks")
    subject = "A background task" if len(reports) == 1 else f"{len(reports)} background tasks"
    verb = "was" if len(reports) == 1 else "were"
    reason = f"{subject} ended unexpectedly and {verb} restarted: {'; '.join(reports[:MOST_ROLES_NAMED])}."
    return problem("task_ended", "tasks:ended", "component", "degraded", len(reports), "tasks", reason)


def repaired_keys(seen: Observation | None) -> HealthFinding:
    """Whether schedulers had to repair an index in Redis."""
    repairs = [notice for notice in seen.notices if notice.startswith(REPAIRED)] if seen else []
    if not repairs:
        return HealthFinding("redis:repaired", "datastore", "healthy", 0, "keys")
    reason = f"{'; '.join(repairs[:MOST_ROLES_NAMED])}. Another client writes to this Redis."
    return problem("redis_key_repaired", "redis:repaired", "datastore", "degraded", len(repairs), "keys", reason)
