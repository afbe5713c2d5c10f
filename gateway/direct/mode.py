"""Direct mode: while Redis is unavailable, requests go to the workers' direct endpoints, and the audit into a spool.

    off      requests are admitted through Redis
    on       Redis is unavailable: requests go to workers directly
    leaving  Redis has been well for long enough: new requests are admitted there, direct ones are served to their end

Leaving takes five seconds without one failed call, so that an unstable Redis does not make every request change sides;
where no worker can be called directly, the change is made at once. Direct mode takes new requests past admission, and
takes over those that wait already, the highest tier first. Inference has no side effects, a waiter is answered once,
and the audit ends a request once, so a request that runs twice costs a second run and nothing else. Where no worker has
a direct endpoint, requests are rejected at once.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from gateway.catalog import CatalogView
from gateway.circuit_breaker import RedisWatch
from gateway.config import GatewayConfig
from gateway.direct.completion import DirectCompletion, refuse
from gateway.direct.limits import DirectAdmission
from gateway.direct.queue import DirectEntry, DirectQueue
from gateway.direct.spool_tasks import DirectAudit
from gateway.direct.workers import END_MARGIN_S, DirectProbe, Unreachable, WorkerConnections
from gateway.heartbeat import GatewayHeartbeat
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequest, PendingRequests
from gateway.limits.capacity import LiveLimits
from scheduler.errors import ErrorCode
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import TierLimit
from scheduler.protocol.direct import Hello, direct_token
from scheduler.protocol.pool_view import WorkerView
from scheduler.states import Admission
from scheduler.tasks import Loop, end_all

LEAVE_AFTER_S = 5.0


class RequestPath(StrEnum):
    """The way that requests go."""

    OFF = "off"  # Through Redis.
    ON = "on"  # Past Redis.
    LEAVING = "leaving"  # New ones through Redis; those that were taken past it are served to their end.


class DirectMode:
    """The policy. Times are monotonic seconds."""

    def __init__(self, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self._leave_after_s = leave_after_s
        self._well_since: float | None = None
        self.mode = RequestPath.OFF
        self.since = 0.0  # When it was entered; stands while the mode is not OFF.

    def look(self, now: float, *, redis_open: bool, redis_well: bool, can_serve: bool, waiting: int) -> RequestPath:
        """The mode from now on.

        `redis_open`: its breaker is not closed. `redis_well`: it is closed and the last call was answered. `waiting`:
        requests that were taken past Redis and have no answer yet.
        """
        if redis_open:
            self._enter(now)
        elif self.mode is not RequestPath.OFF:
            self._come_back(now, redis_well=redis_well, can_serve=can_serve, waiting=waiting)
        return self.mode

    def _enter(self, now: float) -> None:
        if self.mode is RequestPath.OFF:
            self.since = now
        self.mode = RequestPath.ON
        self._well_since = None

    def _come_back(self, now: float, *, redis_well: bool, can_serve: bool, waiting: int) -> None:
        if not redis_well:
            self._well_since = None
            return
        if self._well_since is None:
            self._well_since = now
        if self.mode is RequestPath.ON and (not can_serve or now - self._well_since >= self._leave_after_s):
            self.mode = RequestPath.LEAVING
        if self.mode is RequestPath.LEAVING and not waiting:
            self.mode = RequestPath.OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectView:
    """One look at direct mode."""

    active: bool  # Requests go past Redis, or did until a moment ago and some are still served so.
    for_s: float
    workers: int  # That can be called.
    serves: bool
    waiting: int
    spool_bytes: int
    spool_problem: str | None
    bad_lines: int  # Of spools, set aside.
    unreachable: tuple[Unreachable, ...] = ()  # Direct endpoints that cannot be used from here.
    breakers: Mapping[str, str] = field(default_factory=dict)  # Dependency -> state.


TICK_S = 0.025

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectParts:
    """What direct mode stands on; built once by the composition root."""

    config: GatewayConfig
    catalog: CatalogView
    limits: LiveLimits
    pending_requests: PendingRequests
    cancellations: Cancellations
    heartbeat: GatewayHeartbeat
    watch: RedisWatch
    audit: DirectAudit
    clock: Callable[[], float] = time.monotonic


class Direct:
    """The way past Redis. `active` is all that a request looks at while Redis is well."""

    def __init__(self, parts: DirectParts) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._policy = DirectMode()
        self._queue = DirectQueue()
        self._door = DirectAdmission(self._queue)
        self._ends = DirectCompletion(parts.config.gateway_id, parts.audit, parts.cancellations, parts.clock)
        config = parts.config
        hello = Hello(config.gateway_id, config.direct_token or direct_token(config.service_token))
        self._lines = WorkerConnections(self._queue, hello, self._ends, parts.clock)
        self._probe = DirectProbe(self._workers, self._probes, hello, parts.clock)
        self._answered = True  # Whether Redis did when it was looked at last.
        self.active = False
        parts.watch.on_change = self.look

    @property
    def redis_answers(self) -> bool:
        """Whether what cannot do without Redis may go there, though the others still go past it."""
        return self._parts.watch.answers

    def why_refused(self) -> str | None:
        """What a client is told that gets no capacity while requests go past Redis; None where they do not, or for no
        reason of this gateway's own.
        """
        if self._policy.mode is RequestPath.OFF:
            return None
        audit = self._parts.audit
        if audit.begun and not audit.takes:
            return "This gateway cannot note further requests while its queues are away; try again soon."
        if self._lines.able == 0:
            return "No GPU can be reached while the queues are away; try again soon."
        return None

    def begin(self) -> None:
        """Open the spool."""
        if self._parts.config.direct:
            self._parts.audit.begin()

    def loops(self) -> dict[str, Loop]:
        """What runs for as long as the gateway does."""
        probe = {"direct probe": self._probe.run} if self._parts.config.direct else {}
        return {"direct": self._run, **probe, **self._parts.audit.loops()}

    def enter(self, pending: PendingRequest) -> bool:
        """Take a new request instead of the admitter, or refuse it at once. True, as it is dealt with."""
        now = self._clock()
        tier = self._tier(pending.submission.tier)
        if tier is None:
            pending.finish(ErrorCode.CATALOG_UNAVAILABLE)
            return True
        if not self._serves():
            pending.finish(ErrorCode.NO_CAPACITY)
            return True
        limit, priority = tier
        in_use = self._ends.of_customer(pending.submission.customer_id)
        verdict = pending.verdict = self._door.judge(pending.submission, limit, priority, now, in_use=in_use)
        if verdict.outcome is Admission.ACCEPTED:
            self._take(pending, priority, now)
        else:
            pending.finish(verdict)
        return True

    def keeps_out(self, first: PendingRequest) -> bool:
        """Refuse a list, by its first, where not all of it may enter now. False: each of them may be asked to."""
        tier = self._tier(first.submission.tier)
        if tier is None or not self._serves():
            return False
        together = [pending.submission for pending in first.together]
        in_use = self._ends.of_customer(first.submission.customer_id)
        verdict = self._door.keeps_out(together, *tier, self._clock(), in_use=in_use)
        if verdict is not None:
            first.verdict = verdict
            first.finish(verdict)
        return verdict is not None

    def look(self) -> None:
        """Decide anew which way requests go."""
        now, breaker, before = self._clock(), self._parts.watch.breaker, self._policy.mode
        mode = self._policy.look(
            now,
            redis_open=not self._parts.watch.answers,
            redis_well=breaker.well,
            can_serve=self._serves(),
            waiting=len(self._ends),
        )
        self.active = mode is RequestPath.ON
        if mode is not before:
            log.warning("requests go another way", direct=mode.value)
        if mode is RequestPath.OFF and before is not RequestPath.OFF:
            self._lines.hang_up()
            self._parts.limits.reached(0)
            self._door.close()
        elif before is RequestPath.OFF and mode is not RequestPath.OFF:
            self._begin_mode()
        went_away, self._answered = self._answered and not self._parts.watch.answers, self._parts.watch.answers
        if went_away:  # Also where it had come back and was not trusted yet: some may have gone there all the same.
            self._take_over(now)

    def view(self) -> DirectView:
        """What health tells of it."""
        on, audit = self._policy.mode is not RequestPath.OFF, self._parts.audit
        return DirectView(
            active=on,
            for_s=self._clock() - self._policy.since if on else 0.0,
            workers=self._lines.able,
            serves=on and self._serves(),
            waiting=len(self._ends),
            spool_bytes=audit.spool.bytes,
            spool_problem=audit.problem,
            bad_lines=audit.spool.bad_lines,
            unreachable=self._probe.unreachable,
            breakers={"redis": self._parts.watch.breaker.state.value, **self._lines.breakers()},
        )

    async def close(self) -> None:
        """End what is left, note it, and let the files go. The loops have ended before."""
        self._parts.watch.close()
        await end_all(self._lines.hang_up())
        self._ends.sweep(float("inf"))
        self._ends.settle()
        await self._parts.audit.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._ends.settle()
                self._tick(self._clock())
            except Exception as error:  # noqa: BLE001  # no fault may end this loop
                log_fault("direct mode failed", error)

    def _tick(self, now: float) -> None:
        self._parts.watch.look(now)
        self.look()
        if self._policy.mode is RequestPath.OFF:
            return
        self._follow()
        self._parts.limits.reached(self._lines.able if self._serves() else 0)
        self._ends.sweep(now)
        self._queue.take_out(lambda entry: not self._ends.may_run(entry))

    def _begin_mode(self) -> None:
        seen = self._parts.heartbeat.observation
        self._door.open(len(seen.gateways) if seen else 1)
        self._follow()

    def _follow(self) -> None:
        seen = self._parts.heartbeat.observation
        if seen is not None and self._parts.audit.begun:
            self._lines.follow(seen.workers)

    def _workers(self) -> Sequence[WorkerView]:
        seen = self._parts.heartbeat.observation
        return seen.workers if seen else ()

    def _probes(self) -> bool:
        """Whether probes say something: not while the endpoints are in use, and who calls them has a breaker for each."""
        return self._parts.audit.begun and self._policy.mode is RequestPath.OFF

    def _serves(self) -> bool:
        return self._parts.audit.takes and self._lines.able > 0

    def _take_over(self, now: float) -> None:
        """Those who wait already, the highest tier first."""
        least_s = END_MARGIN_S + self._parts.heartbeat.service_p95_ms / 1000
        waiting = [w for w in self._parts.pending_requests.all() if not w.direct and not w.done]
        for pending in sorted(waiting, key=lambda w: self._priority(w.submission.tier)):
            priority = self._priority(pending.submission.tier)
            if pending.submission.idempotency and not pending.accepted:  # Only Redis knows whether it has run already.
                refuse(pending, ErrorCode.NO_CAPACITY, self._parts.cancellations)
            elif not pending.sent:
                self.enter(pending)
            elif self._serves() and pending.deadline - now > least_s and self._queue.has_room(priority):
                self._take(pending, priority, now)
            else:
                refuse(pending, ErrorCode.NO_CAPACITY, self._parts.cancellations)

    def _take(self, pending: PendingRequest, priority: int, now: float) -> None:
        entry = DirectEntry(pending, priority, now)
        self._ends.take(entry)
        if shed := self._queue.put(entry):
            self._ends.refuse(shed, ErrorCode.SHED_FOR_PRIORITY)
        self._lines.wake()

    def _tier(self, name: str) -> tuple[TierLimit, int] | None:
        """The tier's limits and its priority; None where an admin took it away since the key was looked at."""
        snapshot = self._parts.catalog.snapshot
        if snapshot is None:
            return None
        limits = self._parts.limits.current(snapshot).tiers
        return next(
            ((limit, tier.priority) for limit in limits for tier in snapshot.tiers if limit.name == tier.name == name),
            None,
        )

    def _priority(self, name: str) -> int:
        tier = self._tier(name)
        return tier[1] if tier else 1_000_000
