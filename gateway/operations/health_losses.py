"""Lost workers, lost gateways and restarted model processes, kept as long as they explain something; the other roles.

A worker that is gone for five minutes is forgotten by Redis, and one that leaves in order at once; the missing capacity
lasts longer. A gateway that leaves in order is removed from the list at once, so a silent one is lost, until another
one starts in its place under another name. A worker that stayed on the list with another model process has lost its
model. The judgement of schedulers and gateways is pure.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.heartbeat import BEAT_S
from gateway.operations.health_model import HealthFinding, Status, clock, first_of
from scheduler.protocol.index_repair import REPAIRED
from scheduler.protocol.pool_view import Observation, WorkerView
from scheduler.tasks import EndedTask

ON_PURPOSE = ("cordoned", "draining")  # Somebody wanted it so.
LOSS_KEEP_MS = 15 * 60_000
SILENT = ("ready", "busy", "paused")  # The last word of a worker that did not know that it would be lost.


class Loss(NamedTuple):
    """A worker that served and does not any more; `at_ms` is Redis' wall clock."""

    worker: str
    at_ms: int


class Losses:
    """Those of one pool. `note` is called with every fresh look. One that pauses for a moment serves."""

    def __init__(self) -> None:
        self._serving: frozenset[str] = frozenset()
        self._lost: dict[str, Loss] = {}

    def note(self, workers: Sequence[WorkerView], now_ms: int) -> None:
        """Remember who serves no more, and forget who is back, or was lost long ago."""
        serving = frozenset(worker.id for worker in workers if worker.healthy or worker.pausing)
        ill = {worker.id: worker for worker in workers if worker.id not in serving}
        for worker_id, worker in ill.items():
            if worker.status in ON_PURPOSE:
                continue
            # A worker that was never seen to serve may just be starting.
            if worker_id in self._serving or worker.status in SILENT:
                self._lost.setdefault(worker_id, Loss(worker_id, now_ms - round(worker.age_ms)))
        for worker_id in self._serving - serving - ill.keys():
            self._lost.setdefault(worker_id, Loss(worker_id, now_ms))
        oldest = now_ms - LOSS_KEEP_MS
        self._lost = {
            each.worker: each for each in self._lost.values() if each.at_ms > oldest and each.worker not in serving
        }
        self._serving = serving

    @property
    def all(self) -> tuple[Loss, ...]:
        """The latest first."""
        return tuple(sorted(self._lost.values(), key=lambda loss: loss.at_ms, reverse=True))


GATEWAY_SILENT_MS = 4000 * BEAT_S
"""A gateway that was silent for so long is missed. A second later Redis forgets it."""

GATEWAY_LOSS_KEEP_MS = 5 * 60_000
"""Whoever does not replace it in so long does not want to."""


class LostGateway(NamedTuple):
    """`at_ms`: its last heartbeat, by Redis' wall clock."""

    gateway: str
    at_ms: int


class GatewayLosses:
    """Those of one pool. `note` is called with every fresh look."""

    def __init__(self) -> None:
        self._lost: dict[str, LostGateway] = {}
        self._begun: dict[str, int] = {}  # Who is on the list, and when it was first seen there.
        self._heirs: set[str] = set()  # Who has taken a lost one's place.

    def note(self, ages_ms: Mapping[str, float], now_ms: int) -> None:
        """Take the age of each gateway's last heartbeat."""
        # A gateway that has just started, perhaps in place of a lost one, cannot tell which of the others began after
        # that loss. It reports only gateways whose last heartbeat is later than one heartbeat before its first look.
        begun_ms = now_ms if self._begun else now_ms - round(1000 * BEAT_S)
        self._begun = {name: self._begun.get(name, begun_ms) for name in ages_ms}
        self._heirs &= ages_ms.keys()
        unheard = silent(ages_ms)
        for name in unheard:
            self._lost.setdefault(name, LostGateway(name, now_ms - round(ages_ms[name])))
        for each in sorted(self._lost.values(), key=lambda lost: lost.at_ms):
            # One that is still on the list is told, even if another is there already.
            if each.gateway not in unheard and self._is_over(each, now_ms):
                del self._lost[each.gateway]

    def _is_over(self, lost: LostGateway, now_ms: int) -> bool:
        """Whether it is back, or too long ago, or another one has begun since, whose place that is from now on."""
        if lost.gateway in self._begun or now_ms - lost.at_ms > GATEWAY_LOSS_KEEP_MS:
            return True
        heirs = (name for name, at_ms in self._begun.items() if at_ms >= lost.at_ms and name not in self._heirs)
        heir = next(heirs, None)
        if heir is not None:
            self._heirs.add(heir)
        return heir is not None

    @property
    def all(self) -> tuple[LostGateway, ...]:
        """The latest first."""
        return tuple(sorted(self._lost.values(), key=lambda lost: lost.at_ms, reverse=True))


def silent(ages_ms: Mapping[str, float]) -> Sequence[str]:
    """Who is missed by this look."""
    return sorted(name for name, age_ms in ages_ms.items() if age_ms >= GATEWAY_SILENT_MS)


TOLD_MS = 3000
"""For so long health tells of one: whoever looks each second sees it. The page's events keep it for longer."""

MOST_RESTARTS_NAMED = 5


class Restart(NamedTuple):
    """When another model process was first seen, by Redis' wall clock."""

    worker: str
    at_ms: int


class Restarts:
    """Those of one pool. `note` is called with every fresh look."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._latest: dict[str, Restart] = {}

    def note(self, workers: Sequence[WorkerView], now_ms: int) -> None:
        """Take the process ids that the workers tell; 0 while there is none."""
        for worker in workers:
            if worker.model_pid and self._pids.get(worker.id, worker.model_pid) != worker.model_pid:
                self._latest[worker.id] = Restart(worker.id, now_ms)
        self._pids = {worker.id: worker.model_pid or self._pids.get(worker.id, 0) for worker in workers}
        self._pids = {name: pid for name, pid in self._pids.items() if pid}
        self._latest = {each.worker: each for each in self._latest.values() if now_ms - each.at_ms < TOLD_MS}

    @property
    def all(self) -> tuple[Restart, ...]:
        """Of the last seconds, the latest first."""
        return tuple(sorted(self._latest.values(), key=lambda each: each.at_ms, reverse=True))


def restarted(latest: Sequence[Restart]) -> HealthFinding:
    """Whether any model process was replaced just now."""
    if not latest:
        return HealthFinding("models:restarted", "component", "healthy", 0, "workers")
    named = first_of([f"{each.worker} (at {clock(each.at_ms)})" for each in latest], MOST_RESTARTS_NAMED)
    reason = f"Another model process than before: {named}."
    return HealthFinding("models:restarted", "component", "degraded", len(latest), "workers", reason)


SCHEDULER_SILENT_MS = 1000.0
"""A scheduler passes ten times a second."""

STOPPED_MS = 2000.0
"""By now what waits has run out of its time in the queue, as tiers have it by default."""

MOST_ROLES_NAMED = 3


def scheduling(seen: Observation | None) -> HealthFinding:
    """Whether any scheduler still passes: without one no batch is formed, and nothing that is accepted is served."""
    if seen is None:  # That nothing is seen is said by the check of Redis.
        return HealthFinding("scheduler:pass_age", "component", "healthy", None, "ms")
    age_ms, level = seen.scheduler_age_ms, scheduling_level(seen)
    if level == "healthy":
        return HealthFinding("scheduler:pass_age", "component", level, round(age_ms or 0.0), "ms")
    since = "No scheduler is known" if age_ms is None else f"No scheduler has passed for {age_ms / 1000:.1f} s"
    if _stood_in(seen):
        reason = f"{since}: gateways form the batches and write the audit meanwhile; start a scheduler."
    else:
        reason = f"{since}: no batches are formed, and requests wait until their time is up."
    return HealthFinding("scheduler:pass_age", "component", level, age_ms, "ms", reason)


def scheduling_level(seen: Observation) -> Status:
    """How bad it is."""
    age_ms = seen.scheduler_age_ms
    if age_ms is not None and age_ms < SCHEDULER_SILENT_MS:
        return "healthy"
    return "degraded" if _stood_in(seen) or (age_ms is not None and age_ms < STOPPED_MS) else "down"


def _stood_in(seen: Observation) -> bool:
    """Whether somebody else did their work just now."""
    return seen.pass_age_ms is not None and seen.pass_age_ms < SCHEDULER_SILENT_MS


def other_gateways(seen: Observation | None, lost: Sequence[LostGateway]) -> HealthFinding:
    """Whether all gateways beat that did before."""
    missing = {each.gateway for each in lost}
    beating = len([each for each in seen.gateways if each.gateway_id not in missing]) if seen else 0
    if not lost:
        return HealthFinding("gateways:beating", "component", "healthy", beating, "gateways")
    named = first_of([f"{each.gateway} (last heard at {clock(each.at_ms)})" for each in lost], MOST_ROLES_NAMED)
    verb = "gateway is" if len(lost) == 1 else "gateways are"
    reason = f"{len(lost)} {verb} lost: {named}; {beating} beat."
    return HealthFinding("gateways:beating", "component", "degraded", beating, "gateways", reason)


def ended_tasks(own: Sequence[EndedTask], seen: Observation | None, gateway_id: str) -> HealthFinding:
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
        return HealthFinding("tasks:ended", "component", "healthy", 0, "tasks")
    verb = "A background task" if len(told) == 1 else f"{len(told)} background tasks"
    reason = (
        f"{verb} ended unexpectedly and {'was' if len(told) == 1 else 'were'} started again: {'; '.join(told[:MOST_ROLES_NAMED])}. "
        "The log of that process has the place of the fault in its line `task_ended`: report it, and restart the process "
        "if this does not end."
    )
    return HealthFinding("tasks:ended", "component", "degraded", len(told), "tasks", reason)


def repaired_keys(seen: Observation | None) -> HealthFinding:
    """Whether schedulers had to repair an index in Redis."""
    told = [notice for notice in seen.notices if notice.startswith(REPAIRED)] if seen else []
    if not told:
        return HealthFinding("redis:repaired", "datastore", "healthy", 0, "keys")
    reason = f"{'; '.join(told[:MOST_ROLES_NAMED])}: find out who else writes to this Redis, and keep it out."
    return HealthFinding("redis:repaired", "datastore", "degraded", len(told), "keys", reason)
