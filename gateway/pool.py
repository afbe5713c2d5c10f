"""The parts of a gateway for one pool in one cell: admission, pending requests, limits, responses, direct mode, jobs.

Every gateway has one for its own pool in the default cell (gateway/wiring.py), and one for each other pool and cell of the
catalog (gateway/pool_lifecycle.py). The catalog and the counters are `Shared` by all of them.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gateway.autoscale import ScaleAdvice
from gateway.cells import CellObservations
from gateway.circuit_breaker import RedisWatch, ping
from gateway.config import GatewayConfig
from gateway.direct.audit import DirectAudit
from gateway.direct.mode import Direct, DirectParts
from gateway.heartbeat import GatewayHeartbeat
from gateway.http.error_responses import ErrorResponses
from gateway.inference.admission import AdmissionBatcher, AdmissionLimits
from gateway.inference.deadlines import Cancellations, DeadlineSweep
from gateway.inference.events import RequestLog
from gateway.inference.pending import PendingRequest, PendingRequests
from gateway.inference.pipeline import InferenceParts, InferencePipeline
from gateway.inference.recovery.loss_recovery import LossRecovery
from gateway.inference.recovery.recent_outcomes import RecentOutcomes
from gateway.inference.responses import ResponseSubscriber
from gateway.inference.traces import RequestTraces
from gateway.jobs.dead_letter_rerun import DeadLetterReruns
from gateway.jobs.service import JobParts, Jobs
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter
from gateway.limits.gpu_time import tier_gpu_time
from gateway.limits.handover import Handover
from gateway.limits.quota_uses import QuotaUses
from gateway.limits.rejection_log import RejectionLog
from gateway.metrics.counters import Counters
from gateway.pools import Pools
from gateway.standby_scheduler import Schedule, StandbyScheduler
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity, Snapshot
from ratelimit.limits import effective
from scheduler.body_store import BodyStore
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.admission import Admissions, Submission, SubmissionGroup
from scheduler.protocol.adoption import Adoption
from scheduler.protocol.audit_outbox import AuditLag
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.handover import LimitsHandover
from scheduler.protocol.limits import LimitState, find_rejection, recent_rejections
from scheduler.protocol.pool_view import Observation, Unfinished
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Results
from scheduler.redis_client.connections import command_client, pipelined, subscriber_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import EndedTask, Loop, TaskRegistry, next_tick

READ_AUDIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts that all pools of a gateway share."""

    catalog: Catalog
    pools: Pools
    faults: ErrorResponses
    charge_replay: Callable[[Identity], None] = lambda _: None
    counters: Counters = field(default_factory=Counters)
    body_store: BodyStore = field(default_factory=BodyStore)
    tasks: TaskRegistry = field(default_factory=TaskRegistry)
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    schedule: Schedule | None = None
    observations: CellObservations = field(default_factory=CellObservations)
    quota_uses: QuotaUses = field(default_factory=QuotaUses)


class PoolParts:
    """The parts of `config.place`. They do nothing until their `loops` run."""

    def __init__(self, config: GatewayConfig, shared: Shared) -> None:
        self.config = config
        self._shared = shared
        self._client = command_client(config.redis_url)
        self._subscriber_client = subscriber_client(config.redis_url)
        keys = self._keys = Keys.at(config.redis_url, config.pool)
        self.results = Results(self._client, keys)
        terminations = Terminations(self._client, keys, lease_ms=config.lease_ms)
        admissions = Admissions(self._client, keys, config.gateway_id, replays=config.replays, pass_ms=config.reap_ms)
        adoption, ends = Adoption(self._client, keys), RecentOutcomes(config.gateway_id)
        self._presence = Presence(self._client, keys, gone_ms=config.gone_ms)
        self._demand_meter = DemandMeter(
            config.gateway_id, time.monotonic(), partial(shared.counters.batches, config.place)
        )
        self.rejection_log = RejectionLog()
        self.pending_requests = PendingRequests(self._ended, shared.body_store.discard)
        self.cancellations = Cancellations(terminations)
        self.limits = LiveLimits(config.pool, config.request_limits)
        self.distance = pipelined(self._client).distance
        self.watch = RedisWatch(
            lambda: ping(self._client), slack_s=lambda: self.distance.slack_s, on_change=self._redis_changed
        )
        self.handover = Handover(
            LimitsHandover(self._client, keys),
            shared.catalog,
            config.cell,
            homes=shared.pools.homes,
            others=partial(shared.pools.handovers, config.pool, config.cell),
            answers=lambda: self.watch.answers,
        )
        self.admission = self._admission(admissions)
        self.recovery = LossRecovery(
            pending_requests=self.pending_requests,
            ends=ends,
            admissions=admissions,
            adoption=adoption,
            limits=self._limits_now,
            cancellations=self.cancellations,
            p95_ms=lambda: self.heartbeat.service_p95_ms,
        )
        self.sweep = DeadlineSweep(self.pending_requests, terminations, self.cancellations)
        self.heartbeat = self._heartbeat()
        self._standby = (
            None if shared.schedule is None else StandbyScheduler(config, shared.schedule, self._presence.census)
        )
        self.scale = ScaleAdvice(
            config.scale, config.pool, catalog=shared.catalog, heartbeat=self.heartbeat, limits=self.limits
        )
        self.audit_lag = AuditLag(self._client, keys)
        self.unfinished = Unfinished(self._client).pools
        self.read_limits = LimitState(self._client, keys).read
        self.recent_rejections = partial(recent_rejections, self._client, keys)
        self.find_rejection = partial(find_rejection, self._client, keys)
        self.reruns = DeadLetterReruns(self._client, keys, self._presence, admissions, config.request_limits)
        self.direct = self._direct(adoption, ends)
        self.subscriber = self._subscriber()
        self.inference, self.jobs = self._serving(ends)

    def gpu_share(self, identity: Identity) -> float | None:
        """A customer's share of the GPU time of its tier in the last minute: exact at this gateway, and as others publish it."""
        seen, name, tier = self.heartbeat.observation, identity.customer_name, identity.tier
        own_ms = self._demand_meter.gpu_time.customer_ms(name, tier)
        others = [each for each in (seen.gateways if seen else ()) if each.gateway_id != self.config.gateway_id]
        found = tier_gpu_time(tier, others)
        total_ms = found.total_ms + self._demand_meter.gpu_time.tier_ms(tier)
        return round(min(1.0, (own_ms + found.used_ms(name)) / total_ms), 4) if total_ms else None

    @property
    def ended_tasks(self) -> tuple[EndedTask, ...]:
        """Background tasks of this process that ended recently."""
        return self._shared.tasks.ended

    @property
    def snapshot(self) -> Snapshot | None:
        """The current catalog."""
        return self._shared.catalog.snapshot

    def loops(self) -> dict[str, Loop]:
        """The background tasks, by name."""
        return {
            "admission": self.admission.run,
            "handover": self.handover.run,
            "cancellations": self.cancellations.run,
            "subscriber": self.subscriber.run,
            "catch-up": self.subscriber.catch_up_forever,
            "deadlines": self.sweep.run,
            "heartbeat": self.heartbeat.run,
            "recovery": self.recovery.run,
            "audit": self._follow_audit,
            "autoscale": self.scale.run,
            **({} if self._standby is None else {"standby scheduler": self._standby.run}),
            **self.direct.loops(),
            **self.jobs.loops(),
        }

    async def _follow_audit(self) -> None:
        """Read what PostgreSQL does not have yet; never returns."""
        while True:
            await next_tick(READ_AUDIT_S)
            with contextlib.suppress(RedisUnavailable):
                self.recovery.unwritten(await self.audit_lag.oldest_ms())

    @property
    def under_way(self) -> int:
        """The number of pending requests, and of jobs being accepted."""
        return len(self.pending_requests) + self.jobs.under_way

    @property
    def unsettled(self) -> int:
        """The number of pending requests, and of cancellations that Redis does not have yet."""
        return len(self.pending_requests) + len(self.cancellations)

    async def close(self) -> None:
        """Close direct mode, jobs and clients, once the background tasks have ended; remove the gateway from Redis."""
        await self.direct.close()
        await self.jobs.close()
        with contextlib.suppress(RedisUnavailable):
            await self._presence.gateway_gone(self.config.gateway_id)
        if self._standby is not None:  # Last: it writes the audit of everything above.
            await self._standby.close()
        await self._client.aclose()
        await self._subscriber_client.aclose()

    def _heartbeat(self) -> GatewayHeartbeat:
        shared, config = self._shared, self.config
        return GatewayHeartbeat(
            self._presence,
            shared.catalog,
            self.limits,
            self._demand_meter,
            listener=self.recovery,
            watch=self.watch,
            rejections=self.rejection_log.drain,
            took=self._called,
            observed=self._observed,
            others=partial(shared.observations.others, config.pool, config.cell),
            ended_tasks=lambda: [ended.sentence() for ended in shared.tasks.ended],
        )

    def _redis_changed(self) -> None:
        """Redis was lost, or is available again."""
        self.direct.update()

    def _called(self, name: str, took_s: float) -> None:
        self._shared.counters.called(name, took_s)
        if name == "beat":
            self.distance.beat(took_s)

    def _admission(self, admissions: Admissions) -> AdmissionBatcher:
        return AdmissionBatcher(
            admissions,
            self._limits_now,
            self.cancellations,
            self.config.max_pending,
            watch=self.watch,
            accepted_late=self._ended,
            took=partial(self._shared.counters.called, "admit"),
            hold=self.handover.hold,
            quota_uses=self._shared.quota_uses,
        )

    def _subscriber(self) -> ResponseSubscriber:
        return ResponseSubscriber(
            self._subscriber_client,
            self._keys.responses(self.config.gateway_id),
            self.pending_requests,
            self.results,
            resubscribed=lambda: self.recovery.suspect("the subscription was lost"),
            on_increments=self.pending_requests.receive_all,
        )

    def _direct(self, adoption: Adoption, ends: RecentOutcomes) -> Direct:
        audit = DirectAudit(
            self.config.data_dir,
            self.config.gateway_id,
            self.config.spool_max_bytes,
            adoption,
            redis_available=lambda: self.watch.breaker.well,
            remember=ends.keep,
        )
        return Direct(
            DirectParts(
                config=self.config,
                catalog=self._shared.catalog,
                limits=self.limits,
                pending_requests=self.pending_requests,
                cancellations=self.cancellations,
                heartbeat=self.heartbeat,
                watch=self.watch,
                audit=audit,
            )
        )

    def _serving(self, ends: RecentOutcomes) -> tuple[InferencePipeline, Jobs]:
        """The inference pipeline and the jobs of the pool."""
        shared = self._shared
        parts = InferenceParts(
            config=self.config,
            catalog=shared.catalog,
            limits=self.limits,
            pending_requests=self.pending_requests,
            admission=self.admission,
            cancellations=self.cancellations,
            demand_meter=self._demand_meter,
            error_responses=shared.faults,
            results=self.results,
            direct=self.direct,
            charge_replay=shared.charge_replay,
            all_names=shared.pools.names,
            residence=shared.pools.homes.residence,
            record_rejection=self.rejection_log.note,
            record_rejected_caller=self._record_rejected_caller,
            remember=ends.keep,
            model_version=lambda: self.heartbeat.model_version,
            greedy=lambda: self.heartbeat.greedy,
            passes_on=lambda: self.heartbeat.passes_on,
            body_store=shared.body_store,
            counters=shared.counters,
            request_log=shared.request_log,
            traces=shared.traces,
        )
        inference, limits, client = InferencePipeline(parts), self._limits_now, self._client
        return inference, Jobs(
            JobParts(
                inference=inference,
                parts=parts,
                client=client,
                limits=limits,
                watch=self.watch,
                tasks=shared.tasks,
                hold=self.handover.hold,
                ask=self.handover.ask,
                quota_uses=shared.quota_uses,
            )
        )

    def _record_rejected_caller(self, endpoint: str, request_id: str, identity: Identity, error: RequestError) -> None:
        """Record the request in the customer's cell, where `explain` reads its rejections."""
        home, caller = self._shared.pools.home(identity), (identity.tier, identity.customer_id, identity.key_id)
        submission = Submission(
            request_id, SubmissionGroup(*caller, "", effective(identity), endpoint), "", 0, 0, 0, b""
        )
        home.rejection_log.note(submission, identity, error, None, home.limits.factor(identity.tier))

    def _observed(self, seen: Observation | None) -> None:
        if self._standby is not None:
            self._standby.observed(seen)
        if seen is not None:
            self._shared.observations.record(self.config.pool, self.config.cell, seen)
        if seen is not None and self.limits.model_too_slow:
            self.sweep.end_sent(ErrorCode.MODEL_TOO_SLOW, time.monotonic())

    def _ended(self, pending: PendingRequest) -> None:
        if self.admission.rejections.held:
            self.admission.rejections.forget(pending.submission.customer_id)
        self.recovery.ended(pending)

    def _limits_now(self) -> AdmissionLimits:
        snapshot = self._shared.catalog.snapshot
        limits = AdmissionLimits((), 0.0) if snapshot is None else self.limits.current(snapshot)
        return limits._replace(redis_ms=self.heartbeat.redis_ms(), run_ms=math.ceil(self.heartbeat.service_p95_ms))
