"""Direct mode: while Redis is unavailable, requests go to the workers' direct endpoints, and the audit into a spool.

    off      requests are admitted through Redis
    on       Redis is unavailable: requests go to workers directly
    leaving  Redis was available for long enough: new requests go through Redis, direct requests are completed

Leaving takes two seconds without a failed call, so that requests do not alternate between the paths while Redis is
unstable. If no worker can be called directly, direct mode ends at once; if no worker has a direct endpoint, requests are
rejected at once. Direct mode accepts new requests in place of admission, and takes over pending requests, the highest tier
first. A request may run twice, which costs only the second run: inference has no side effects, and each request gets one
response and one audit row.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from gateway.circuit_breaker import RedisWatch
from gateway.config import GatewayConfig
from gateway.direct.audit import DirectAudit
from gateway.direct.completion import END_MARGIN_S, DirectCompletion, reject
from gateway.direct.limits import DirectAdmission
from gateway.direct.probe import DirectProbe, Unreachable
from gateway.direct.queue import DirectEntry, DirectQueue
from gateway.direct.workers import WorkerConnections
from gateway.heartbeat import GatewayHeartbeat
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequest, PendingRequests
from gateway.limits.capacity import LiveLimits
from ledger.catalog.follower import Catalog
from scheduler.errors import ErrorCode
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.admission import TierLimit
from scheduler.protocol.direct import Hello, direct_token
from scheduler.states import Admission
from scheduler.tasks import Loop, end_all, next_tick

LEAVE_AFTER_S = 2.0

TICK_S = 0.025

log = structlog.get_logger("gateway")


class RequestPath(StrEnum):
    """The path of requests."""

    OFF = "off"  # Through Redis.
    ON = "on"  # Directly to workers.
    LEAVING = "leaving"  # New requests through Redis; direct requests are completed.


class DirectMode:
    """The policy that chooses the path. Times are monotonic seconds."""

    def __init__(self, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self._leave_after_s = leave_after_s
        self._well_since: float | None = None
        self.mode = RequestPath.OFF
        self.since = 0.0  # When direct mode started; valid while the mode is not OFF.

    def update(self, now: float, *, redis_open: bool, redis_well: bool, can_serve: bool, waiting: int) -> RequestPath:
        """Choose and return the mode.

        `redis_open`: the circuit breaker of Redis is not closed. `redis_well`: it is closed, and the last call succeeded.
        `waiting`: the number of direct requests without a response.
        """
        if redis_open:
            if self.mode is RequestPath.OFF:
                self.since = now
            self.mode = RequestPath.ON
        if redis_open or not redis_well:
            self._well_since = None
        elif self.mode is not RequestPath.OFF:
            if self._well_since is None:
                self._well_since = now
            if self.mode is RequestPath.ON and (not can_serve or now - self._well_since >= self._leave_after_s):
                self.mode = RequestPath.LEAVING
            if self.mode is RequestPath.LEAVING and not waiting:
                self.mode = RequestPath.OFF
        return self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectView:
    """The state of direct mode at one time."""

    active: bool  # Requests go to workers directly, or direct requests are still being completed.
    for_s: float
    workers: int  # Workers that can be called.
    serves: bool
    waiting: int
    spool_bytes: int
    spool_problem: str | None
    bad_lines: int  # Unreadable lines in spools.
    unreachable: tuple[Unreachable, ...] = ()  # Direct endpoints that this gateway cannot use.
    breakers: Mapping[str, str] = field(default_factory=dict)  # Dependency -> state.


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectParts:
    """The components that direct mode uses. Built once per pool by gateway/pool.py."""

    config: GatewayConfig
    catalog: Catalog
    limits: LiveLimits
    pending_requests: PendingRequests
    cancellations: Cancellations
    heartbeat: GatewayHeartbeat
    watch: RedisWatch
    audit: DirectAudit
    clock: Callable[[], float] = time.monotonic


class Direct:
    """The direct mode of one pool. While Redis is available, requests read only `active`."""

    def __init__(self, parts: DirectParts) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._policy = DirectMode()
        self._queue = DirectQueue()
        self._admission = DirectAdmission(self._queue)
        self._completion = DirectCompletion(parts.config.gateway_id, parts.audit, parts.cancellations, parts.clock)
        config = parts.config
        hello = Hello(config.gateway_id, config.direct_token or direct_token(config.service_token))
        self._connections = WorkerConnections(self._queue, hello, self._completion, parts.clock)
        self._probe = DirectProbe(
            lambda: parts.heartbeat.workers,
            # Probes run only while direct mode is off: in direct mode, each connection has its circuit breaker.
            lambda: parts.audit.opened and self._policy.mode is RequestPath.OFF,
            hello,
            parts.clock,
        )
        self._was_available = True  # Whether Redis was available at the last update.
        self.active = False

    @property
    def redis_answers(self) -> bool:
        """Whether requests that need Redis may use it, although direct mode is active."""
        return self._parts.watch.answers

    def why_refused(self) -> str | None:
        """The reason of a `no_capacity` rejection in direct mode; None without a specific one."""
        if self._policy.mode is RequestPath.OFF:
            return None
        audit = self._parts.audit
        if audit.opened and not audit.accepts:
            return "This gateway cannot record further requests while Redis is not available; try again soon."
        if self._connections.available == 0:
            return "No GPU can be reached while Redis is not available; try again soon."
        return None

    def open(self) -> None:
        """Open the spool."""
        if self._parts.config.direct:
            self._parts.audit.open()

    def loops(self) -> dict[str, Loop]:
        """The background tasks of direct mode."""
        probe = {"direct probe": self._probe.run} if self._parts.config.direct else {}
        return {"direct": self._run, **probe, **self._parts.audit.loops()}

    def enter(self, pending: PendingRequest) -> bool:
        """Accept or reject a new request, in place of admission. Always returns True."""
        now = self._clock()
        tier = self._tier(pending.submission.tier)
        if tier is None:
            pending.finish(ErrorCode.CATALOG_UNAVAILABLE)
            return True
        if not self._serves():
            pending.finish(ErrorCode.NO_CAPACITY)
            return True
        limit, priority = tier
        in_use = self._completion.of_customer(pending.submission.customer_id)
        verdict = pending.verdict = self._admission.judge(pending.submission, limit, priority, now, in_use=in_use)
        if verdict.outcome is Admission.ACCEPTED:
            self._take(pending, priority, now)
        else:
            pending.finish(verdict)
        return True

    def keeps_out(self, first: PendingRequest) -> bool:
        """Reject a list, by its first member, if the limits do not allow all members now. Returns whether it was rejected."""
        tier = self._tier(first.submission.tier)
        if tier is None or not self._serves():
            return False
        submissions = [pending.submission for pending in first.together]
        in_use = self._completion.of_customer(first.submission.customer_id)
        verdict = self._admission.keeps_out(submissions, *tier, self._clock(), in_use=in_use)
        if verdict is not None:
            first.verdict = verdict
            first.finish(verdict)
        return verdict is not None

    def update(self) -> None:
        """Update the mode, and start or end direct mode if it changed."""
        now, breaker, before = self._clock(), self._parts.watch.breaker, self._policy.mode
        mode = self._policy.update(
            now,
            redis_open=not self._parts.watch.answers,
            redis_well=breaker.well,
            can_serve=self._serves(),
            waiting=len(self._completion),
        )
        self.active = mode is RequestPath.ON
        if mode is not before:
            log.warning("direct mode changed", direct=mode.value)
        if mode is RequestPath.OFF and before is not RequestPath.OFF:
            self._connections.close_all()
            self._parts.limits.reached(0)
            self._admission.close()
        elif before is RequestPath.OFF and mode is not RequestPath.OFF:
            seen = self._parts.heartbeat.observation
            self._admission.open(len(seen.gateways) if seen else 1)
            self._update_workers()
        lost, self._was_available = self._was_available and not self._parts.watch.answers, self._parts.watch.answers
        if lost:  # Also while it was available again in direct mode: requests may have been sent to it.
            self._take_over(now)

    def view(self) -> DirectView:
        """The state for health and metrics."""
        on, audit = self._policy.mode is not RequestPath.OFF, self._parts.audit
        return DirectView(
            active=on,
            for_s=self._clock() - self._policy.since if on else 0.0,
            workers=self._connections.available,
            serves=on and self._serves(),
            waiting=len(self._completion),
            spool_bytes=audit.spool.bytes,
            spool_problem=audit.problem,
            bad_lines=audit.spool.bad_lines,
            unreachable=self._probe.unreachable,
            breakers={"redis": self._parts.watch.breaker.state.value, **self._connections.breakers()},
        )

    async def close(self) -> None:
        """Finish open requests, record them, and close the files. The background tasks must have ended."""
        self._parts.watch.close()
        await end_all(self._connections.close_all())
        self._completion.sweep(float("inf"))
        self._completion.retry_records()
        await self._parts.audit.close()

    async def _run(self) -> None:
        while True:
            await next_tick(TICK_S)
            with LoggedFaults("direct mode failed"):
                self._completion.retry_records()
                now = self._clock()
                self._parts.watch.update(now)
                self.update()
                if self._policy.mode is not RequestPath.OFF:
                    self._update_workers()
                    self._parts.limits.reached(self._connections.available if self._serves() else 0)
                    self._completion.sweep(now)
                    self._queue.remove_if(lambda entry: not self._completion.may_run(entry))

    def _update_workers(self) -> None:
        workers = self._parts.heartbeat.workers
        if workers and self._parts.audit.opened:
            self._connections.update(workers)

    def _serves(self) -> bool:
        return self._parts.audit.accepts and self._connections.available > 0

    def _take_over(self, now: float) -> None:
        """Take over pending requests, the highest tier first."""
        least_s = END_MARGIN_S + self._parts.heartbeat.service_p95_ms / 1000
        waiting = [w for w in self._parts.pending_requests.all() if not w.direct and not w.done]
        for pending in sorted(waiting, key=lambda w: self._priority(w.submission.tier)):
            priority = self._priority(pending.submission.tier)
            if pending.submission.idempotency and not pending.accepted:  # Only Redis knows whether it has run already.
                reject(pending, ErrorCode.NO_CAPACITY, self._parts.cancellations)
            elif not pending.sent:
                self.enter(pending)
            elif self._serves() and pending.deadline - now > least_s and self._queue.has_room(priority):
                self._take(pending, priority, now)
            else:
                reject(pending, ErrorCode.NO_CAPACITY, self._parts.cancellations)

    def _take(self, pending: PendingRequest, priority: int, now: float) -> None:
        entry = DirectEntry(pending, priority, now)
        self._completion.add(entry)
        if shed := self._queue.put(entry):
            self._completion.reject(shed, ErrorCode.SHED_FOR_PRIORITY)
        self._connections.wake()

    def _tier(self, name: str) -> tuple[TierLimit, int] | None:
        """The tier's limits and its priority; None if the tier was removed since the caller was authenticated."""
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
