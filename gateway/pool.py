"""What a gateway has of one pool: its queues' admission, its waiters, its limits, its answers, its way past Redis.

One stands in every gateway for the pool that it is named for (gateway/wiring.py), and one more for each other pool that
the catalog names (gateway/pools.py). What customers are, and which doors stand open, is `Shared` by all of them.
"""

import contextlib
import math
import time
from dataclasses import dataclass, field
from functools import partial

from gateway.auth.authenticator import Doorman
from gateway.autoscale import ScaleAdvice
from gateway.catalog import CatalogView, SnapshotView
from gateway.circuit_breaker import RedisWatch, ping
from gateway.config import GatewayConfig
from gateway.dead_letter_rerun import Reruns
from gateway.direct.mode import Direct, DirectParts
from gateway.direct.spool_tasks import DirectAudit
from gateway.heartbeat import Beat
from gateway.http.errors import Faults
from gateway.http.request import BodyBudget
from gateway.http.router import Doors
from gateway.inference.admission import Admitter, Limits
from gateway.inference.deadlines import Cancels, DeadlineSweep
from gateway.inference.events import RequestLog
from gateway.inference.pending import Waiter, Waiters
from gateway.inference.pipeline import Inference, InferenceParts
from gateway.inference.recovery import LastEnds, Witness
from gateway.inference.responses import Subscriber
from gateway.inference.traces import RequestTraces
from gateway.jobs.service import JobParts, Jobs
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import Meter
from gateway.limits.rejections import Refusals
from gateway.metrics.counters import Tally
from gateway.standby_scheduler import Schedule, StandIn
from scheduler.errors import RedisUnavailable
from scheduler.protocol.admission import Admissions, Adoption
from scheduler.protocol.audit_outbox import AuditLag
from scheduler.protocol.cancellation import Endings
from scheduler.protocol.pool_view import Observation
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Results
from scheduler.redis_client.connections import command_client, subscriber_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import EndedTask, Loop, TaskRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all pools of a gateway have in common."""

    catalog: CatalogView
    doors: Doors
    doorman: Doorman
    faults: Faults
    bodies: BodyBudget
    tally: Tally = field(default_factory=Tally)
    tasks: TaskRegistry = field(default_factory=TaskRegistry)
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    schedule: Schedule | None = None


class PoolParts:
    """The parts of one pool; `config.pool` says of which. Nothing runs until `loops` do."""

    def __init__(self, config: GatewayConfig, shared: Shared) -> None:
        self.config = config
        self._shared = shared
        self._client = command_client(config.redis_url)
        self._subscriber_client = subscriber_client(config.redis_url)
        keys = self._keys = Keys(config.pool)
        self.results = Results(self._client, keys)
        endings = Endings(self._client, keys)
        admissions = Admissions(self._client, keys, config.gateway_id, replays=config.replays, pass_ms=config.reap_ms)
        adoption, ends = Adoption(self._client, keys), LastEnds(config.gateway_id)
        self._presence = Presence(self._client, keys, gone_ms=config.gone_ms)
        self._meter = Meter(config.gateway_id, time.monotonic(), partial(shared.tally.batches, config.pool))
        self.refusals = Refusals()
        self.waiters = Waiters(self._ended)
        self.cancels = Cancels(endings)
        self.limits = LiveLimits(config.pool)
        self.watch = RedisWatch(lambda: ping(self._client))
        self.admitter = Admitter(
            admissions,
            self._limits_now,
            self.cancels,
            config.max_pending,
            watch=self.watch,
            accepted_late=self._ended,
            took=partial(shared.tally.called, "admit"),
        )
        self.witness = Witness(
            waiters=self.waiters,
            ends=ends,
            admissions=admissions,
            adoption=adoption,
            limits=self._limits_now,
            cancels=self.cancels,
            p95_ms=lambda: self.beat.service_p95_ms,
        )
        self.sweep = DeadlineSweep(self.waiters, endings, self.cancels)
        self.beat = Beat(
            self._presence,
            shared.catalog,
            self.limits,
            self._meter,
            listener=self.witness,
            watch=self.watch,
            refusals=self.refusals.drain,
            took=shared.tally.called,
            looked=self._looked,
            ended_tasks=lambda: [ended.sentence() for ended in shared.tasks.ended],
        )
        self._stand_in = None if shared.schedule is None else StandIn(config, shared.schedule, self._presence.census)
        self.scale = ScaleAdvice(config.scale, config.pool, catalog=shared.catalog, beat=self.beat, limits=self.limits)
        self.audit_lag = AuditLag(self._client, keys)
        self.reruns = Reruns(self._client, keys, config.gateway_id, config.total_ms, config.gone_ms)
        self.direct = self._direct(adoption, ends)
        self.subscriber = self._subscriber()
        self.inference, self.jobs = self._serving(ends)

    @property
    def ended_tasks(self) -> tuple[EndedTask, ...]:
        """Endless tasks of this process that ended lately."""
        return self._shared.tasks.ended

    @property
    def snapshot(self) -> SnapshotView | None:
        """The catalog as it is now."""
        return self._shared.catalog.snapshot

    def loops(self) -> dict[str, Loop]:
        """What has to run, by name."""
        return {
            "admitter": self.admitter.run,
            "cancels": self.cancels.run,
            "subscriber": self.subscriber.run,
            "catch-up": self.subscriber.catch_up_forever,
            "deadlines": self.sweep.run,
            "beat": self.beat.run,
            "witness": self.witness.run,
            "scale": self.scale.run,
            **({} if self._stand_in is None else {"stand-in": self._stand_in.run}),
            **self.direct.loops(),
            **self.jobs.loops(),
        }

    @property
    def under_way(self) -> int:
        """Requests that wait for their answer, and jobs that are being taken in."""
        return len(self.waiters) + self.jobs.under_way

    @property
    def unsettled(self) -> int:
        """Requests that wait, and ends that Redis was not told yet."""
        return len(self.waiters) + len(self.cancels)

    async def close(self) -> None:
        """Say goodbye to Redis, and end what is under way, once the loops are ended."""
        await self.direct.close()
        await self.jobs.close()
        with contextlib.suppress(RedisUnavailable):
            await self._presence.gateway_gone(self.config.gateway_id)
        await self._client.aclose()
        await self._subscriber_client.aclose()

    def _subscriber(self) -> Subscriber:
        return Subscriber(
            self._subscriber_client,
            self._keys.responses(self.config.gateway_id),
            self.waiters,
            self.results,
            anew=lambda: self.witness.suspect("the subscription was lost"),
            hear=self.waiters.hear_all,
        )

    def _direct(self, adoption: Adoption, ends: LastEnds) -> Direct:
        audit = DirectAudit(
            self.config.data_dir,
            self.config.gateway_id,
            self.config.spool_max_bytes,
            adoption,
            may_merge=lambda: self.watch.breaker.well,
            remember=ends.keep,
        )
        return Direct(
            DirectParts(
                config=self.config,
                catalog=self._shared.catalog,
                limits=self.limits,
                waiters=self.waiters,
                cancels=self.cancels,
                beat=self.beat,
                watch=self.watch,
                audit=audit,
            )
        )

    def _serving(self, ends: LastEnds) -> tuple[Inference, Jobs]:
        """What serves those who wait, and those who do not."""
        shared = self._shared
        parts = InferenceParts(
            config=self.config,
            catalog=shared.catalog,
            limits=self.limits,
            waiters=self.waiters,
            admitter=self.admitter,
            cancels=self.cancels,
            meter=self._meter,
            faults=shared.faults,
            doors=shared.doors,
            bodies=shared.bodies,
            results=self.results,
            direct=self.direct,
            doorman=shared.doorman,
            note_refusal=self.refusals.note,
            remember=ends.keep,
            model_version=lambda: self.beat.model_version,
            greedy=lambda: self.beat.greedy,
            tally=shared.tally,
            request_log=shared.request_log,
            traces=shared.traces,
        )
        inference, limits, client = Inference(parts), self._limits_now, self._client
        return inference, Jobs(
            JobParts(
                inference=inference, parts=parts, client=client, limits=limits, watch=self.watch, tasks=shared.tasks
            )
        )

    def _looked(self, seen: Observation | None) -> None:
        if self._stand_in is not None:
            self._stand_in.looked(seen)

    def _ended(self, waiter: Waiter) -> None:
        if self.admitter.rejections.held:
            self.admitter.rejections.forget(waiter.submission.customer_id)
        self.witness.ended(waiter)

    def _limits_now(self) -> Limits:
        snapshot = self._shared.catalog.snapshot
        limits = Limits((), 0.0) if snapshot is None else self.limits.current(snapshot)
        return limits._replace(redis_ms=self.beat.redis_ms(), run_ms=math.ceil(self.beat.service_p95_ms))
