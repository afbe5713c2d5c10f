"""Collects the inputs of the health checks for every pool."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import inf
from typing import NamedTuple

from gateway.auth.authenticator import Authenticator
from gateway.http.router import DrainState
from gateway.operations.health.checks import HealthInputs, health
from gateway.operations.health.gateway_losses import GatewayLosses, silent_gateways
from gateway.operations.health.outcomes import HeldLevels, TierObjective, levels_now, tier_results
from gateway.operations.health.pool_state import MeasuredPool
from gateway.operations.health.restarts import Restarts
from gateway.operations.health.role_checks import scheduling_level
from gateway.operations.health.worker_losses import WorkerLosses
from gateway.pool import PoolParts
from gateway.pools import Pools
from ledger.catalog.follower import Catalog
from ledger.jobs import UNTRIED
from scheduler.errors import RedisUnavailable
from scheduler.tasks import next_tick

AWAY_S = 2.0
"""How long PostgreSQL must not answer the catalog, which asks every second, before it is away: a reconnect takes less."""

RESUMING_S, RESUMING_STEP_S = 2.0, 0.02
"""For how long new observations are waited for after a suspension of this process."""


class CollectedHealth(NamedTuple):
    """One pool: inputs of the checks, and its state."""

    inputs: HealthInputs
    state: MeasuredPool


class PoolMemory(NamedTuple):
    """State of one pool that a single observation does not show."""

    losses: WorkerLosses
    gateways: GatewayLosses
    restarts: Restarts
    held: HeldLevels


class HealthCollector:
    """Runs the health checks of every pool."""

    def __init__(
        self,
        catalog: Catalog,
        pools: Pools,
        drain_state: DrainState,
        authenticator: Authenticator,
        *,
        connection_problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`connection_problem`: why PostgreSQL accepts no new connections; None if it does."""
        self._catalog = catalog
        self._pools = pools
        self._drain_state = drain_state
        self._authenticator = authenticator
        self._connection_problem = connection_problem
        self._memories: dict[str, PoolMemory] = {}
        self._most_left_s = -inf

    async def collect(self) -> dict[str, CollectedHealth]:
        """Check every pool that a model names; the gateway's own is first."""
        found: dict[str, CollectedHealth] = {}
        resumed_at = max(parts.watch.resumed_at() for parts in self._pools.named)
        while time.monotonic() < resumed_at + RESUMING_S and not self._observed_since(resumed_at):
            await next_tick(RESUMING_STEP_S)
        for parts in self._pools.named:
            inputs = await self._inputs(parts)
            found[parts.config.place] = CollectedHealth(inputs, health(inputs))
        return found

    def _observed_since(self, at: float) -> bool:
        """Whether Redis and PostgreSQL responded later than `at`, where they ever did. Older observations are no evidence."""
        catalog, beats = self._catalog, [parts.heartbeat for parts in self._pools.named]
        confirmed = catalog.snapshot is None or catalog.bad_row or catalog.age_s() <= time.monotonic() - at
        return confirmed and all(beat.observation is None or beat.observed_at >= at for beat in beats)

    def urgent_state(self) -> object:
        """State whose changes are published at once; equal as long as nothing changed."""
        catalog = self._catalog
        pools: list[object] = []
        for parts in self._pools.named:
            seen = parts.heartbeat.observation
            workers: object = None
            roles: object = None
            if seen is not None:
                workers = {(worker.id, worker.model_pid) for worker in seen.workers if worker.healthy}
                level = scheduling_level(seen, expected=parts.config.schedulers_expected)
                roles = (level, silent_gateways(seen.gateway_ages_ms))
            pools.append(
                (
                    parts.config.place,
                    parts.heartbeat.redis_problem is None,
                    workers,
                    roles,
                    parts.direct.active,
                    parts.subscriber.subscribed.is_set(),
                    self._jobs_problem(parts) is None,
                )
            )
        return (
            pools,
            catalog.snapshot.cordons if catalog.snapshot is not None else None,
            (
                catalog.snapshot is not None,
                catalog.fresh,
                catalog.problem,
                catalog.left_s < 0,
                self._drain_state.leaving,
                self._paused(),
                self._connection_problem(),
            ),
            [each[:3] for parts in self._pools.named for each in parts.ended_tasks],
        )

    @property
    def draining(self) -> frozenset[str]:
        """The cells that are draining."""
        snapshot = self._catalog.snapshot
        return frozenset(row.name for row in snapshot.cells if row.state == "draining") if snapshot else frozenset()

    def _paused(self) -> Sequence[str]:
        snapshot = self._catalog.snapshot
        return [tier.name for tier in snapshot.tiers if tier.paused] if snapshot else ()

    def _updated_memory(self, parts: PoolParts) -> PoolMemory:
        memory = self._memories.setdefault(
            parts.config.place, PoolMemory(WorkerLosses(), GatewayLosses(), Restarts(), HeldLevels())
        )
        seen = parts.heartbeat.observation
        if seen is not None and parts.heartbeat.redis_problem is None:
            memory.losses.update(seen.workers, seen.now_ms, _workers_elsewhere(parts))
            memory.gateways.update(seen.gateway_ages_ms, seen.now_ms)
            memory.restarts.update(seen.workers, seen.now_ms)
            names = [tier.name for tier in self._catalog.snapshot.tiers] if self._catalog.snapshot else []
            memory.held.update(levels_now(tier_results(names, self._objectives(), seen)), seen.now_ms)
        elif seen is not None:  # Old outcomes say nothing about requests that are served without Redis.
            memory.held.update({}, seen.now_ms + round(1000 * (parts.heartbeat.age_s() or 0.0)))
        return memory

    def _objectives(self) -> dict[str, TierObjective]:
        snapshot = self._catalog.snapshot
        tiers = snapshot.tiers if snapshot else ()
        return {tier.name: TierObjective(tier.slo_ms, tier.slo_success) for tier in tiers}

    def _jobs_problem(self, parts: PoolParts) -> str | None:
        """Why jobs cannot be stored: the last insert failed, or none was tried and PostgreSQL is away.

        The catalog shows only whether the server at its own URL is away: jobs may go through a pooler.
        """
        jobs, catalog = parts.config.jobs, self._catalog
        self._most_left_s = max(self._most_left_s, catalog.left_s)
        if jobs is None:
            return None
        problem = parts.jobs.problem
        if problem != UNTRIED:
            return problem
        if catalog.snapshot is None or jobs.session_url not in ("", jobs.database_url):
            return None
        # The age grows with an invalid row, too. The time that is left for known keys is full again after each answer.
        silent_s = self._most_left_s - catalog.left_s if catalog.bad_row else catalog.age_s()
        return catalog.problem if silent_s > AWAY_S else None

    async def _inputs(self, parts: PoolParts) -> HealthInputs:
        catalog = self._catalog
        snapshot = catalog.snapshot
        memory = self._updated_memory(parts)
        seen = parts.heartbeat.observation
        lag_ms, lag_problem = await audit_lag(parts)
        return HealthInputs(
            observation=None if seen is None else memory.losses.without_replaced(seen, _workers_elsewhere(parts)),
            look_age_s=parts.heartbeat.age_s(),
            redis_problem=parts.heartbeat.redis_problem,
            catalog_loaded=snapshot is not None,
            catalog_fresh=catalog.fresh,
            catalog_age_s=catalog.age_s(),
            catalog_problem=catalog.problem,
            catalog_left_s=catalog.left_s,
            bad_row=catalog.bad_row,
            jobs_problem=self._jobs_problem(parts),
            connection_problem=self._connection_problem(),
            subscribed=parts.subscriber.subscribed.is_set(),
            leaving=self._drain_state.leaving,
            open_requests=sum(each.under_way for each in self._pools.all),
            capacity_rps=parts.limits.cell_capacity_rps,
            capacity_evidence=parts.limits.estimate.evidence,
            capacity_confidence=parts.limits.estimate.confidence,
            memory_share=parts.limits.memory_share,
            short_of_memory=parts.limits.short_of_memory,
            gpus_elsewhere=len(_workers_elsewhere(parts)),
            registering=parts.limits.registering,
            eviction_policy=parts.heartbeat.eviction_policy,
            round_trip_s=parts.distance.round_trip_s,
            no_model=snapshot is not None and not any(model.enabled for model in snapshot.models.values()),
            factors={tier.name: parts.limits.factor(tier.name) for tier in snapshot.tiers} if snapshot else {},
            paused=self._paused(),
            cordons=snapshot.cordons if snapshot else {},
            audit_lag_ms=lag_ms,
            audit_problem=lag_problem,
            direct=parts.direct.view(),
            tokens_problem=self._authenticator.problem,
            losses=memory.losses.all,
            restarts=memory.restarts.all,
            restarts_last_minute=memory.restarts.last_minute,
            lost_gateways=memory.gateways.all,
            held=memory.held.levels,
            objectives=self._objectives(),
            total_ms=parts.limits.request.total_ms,
            schedulers_expected=parts.config.schedulers_expected,
            gateway_id=parts.config.gateway_id,
            ended_tasks=parts.ended_tasks,
            time=datetime.now(tz=UTC).isoformat(timespec="milliseconds"),
        )


async def audit_lag(parts: PoolParts) -> tuple[int | None, str]:
    """Age in ms of the oldest audit record of the pool that is not written yet; None if it cannot be read, and why."""
    if parts.heartbeat.redis_problem is not None:
        return None, parts.heartbeat.redis_problem
    try:
        oldest_ms = await parts.audit_lag.oldest_ms()
    except RedisUnavailable as error:
        return None, str(error)
    return 0 if oldest_ms is None else max(0, int(time.time() * 1000) - oldest_ms), ""


def _workers_elsewhere(parts: PoolParts) -> frozenset[str]:
    """The healthy workers of the pool that serve other cells."""
    seen, whole = parts.heartbeat.observation, parts.heartbeat.whole
    here = {worker.id for worker in seen.workers if worker.healthy} if seen else set[str]()
    return frozenset(worker.id for worker in whole.workers if worker.healthy) - here if whole else frozenset()
