"""Health of every pool as this gateway sees it now: what each of its parts knows, gathered for the pure judgement."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.catalog import CatalogView
from gateway.doors import Doors
from gateway.gateway_losses import GatewayLosses, silent
from gateway.identities import Identities
from gateway.losses import Losses
from gateway.operations.health_checks import HealthInputs, health
from gateway.operations.health_losses import scheduling_level
from gateway.operations.health_model import Health
from gateway.pool import PoolParts
from gateway.pools import Pools
from gateway.restarts import Restarts
from scheduler.errors import RedisUnavailable


class Judged(NamedTuple):
    """One pool: what was known of it, the HTTP status and the document."""

    inputs: HealthInputs
    status: int
    document: Health


class Memory(NamedTuple):
    """What is remembered of one pool, since a single look does not show it."""

    losses: Losses
    gateways: GatewayLosses
    restarts: Restarts


class Judging:
    """Gathers and judges. `wall` is seconds since the epoch."""

    def __init__(
        self,
        catalog: CatalogView,
        pools: Pools,
        doors: Doors,
        identities: Identities,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._doors = doors
        self._identities = identities
        self._wall = wall
        self._memories: dict[str, Memory] = {}

    async def judge(self) -> dict[str, Judged]:
        """Every pool that a model names, by name; the gateway's own first."""
        found: dict[str, Judged] = {}
        for parts in self._pools.named:
            inputs = await self._inputs(parts)
            found[parts.config.pool] = Judged(inputs, *health(inputs))
        return found

    def facts(self) -> object:
        """What must be told at once when it changes: it compares equal as long as nothing of that did."""
        catalog = self._catalog
        return (
            [
                (
                    parts.config.pool,
                    parts.beat.redis_problem is None,
                    _healthy(parts),
                    _roles(parts),
                    parts.direct.active,
                    parts.subscriber.subscribed.is_set(),
                )
                for parts in self._pools.named
            ],
            catalog.snapshot.cordoned if catalog.snapshot is not None else None,
            (catalog.snapshot is not None, catalog.fresh, catalog.problem, self._doors.leaving, self._paused()),
            [each[:3] for parts in self._pools.named for each in parts.ended_tasks],
        )

    def _paused(self) -> Sequence[str]:
        snapshot = self._catalog.snapshot
        return [tier.name for tier in snapshot.tiers if tier.paused] if snapshot else ()

    def _remembered(self, parts: PoolParts) -> Memory:
        memory = self._memories.setdefault(parts.config.pool, Memory(Losses(), GatewayLosses(), Restarts()))
        seen = parts.beat.observation
        if seen is not None and parts.beat.redis_problem is None:
            memory.losses.note(seen.workers, seen.now_ms)
            memory.gateways.note(seen.gateway_ages_ms, seen.now_ms)
            memory.restarts.note(seen.workers, seen.now_ms)
        return memory

    async def _inputs(self, parts: PoolParts) -> HealthInputs:
        catalog = self._catalog
        snapshot = catalog.snapshot
        memory = self._remembered(parts)
        return HealthInputs(
            observation=parts.beat.observation,
            look_age_s=parts.beat.age_s(),
            redis_problem=parts.beat.redis_problem,
            catalog_loaded=snapshot is not None,
            catalog_fresh=catalog.fresh,
            catalog_age_s=catalog.age_s(),
            catalog_problem=catalog.problem,
            subscribed=parts.subscriber.subscribed.is_set(),
            leaving=self._doors.leaving,
            capacity_rps=parts.limits.capacity_rps,
            capacity_evidence=parts.limits.estimate.evidence,
            capacity_confidence=parts.limits.estimate.confidence,
            memory_share=parts.limits.memory_share,
            short_of_memory=parts.limits.short_of_memory,
            eviction_policy=parts.beat.eviction_policy,
            no_model=snapshot is not None and not any(model.enabled for model in snapshot.models.values()),
            factors={tier.name: parts.limits.factor(tier.name) for tier in snapshot.tiers} if snapshot else {},
            paused=self._paused(),
            audit_lag_ms=await audit_lag_ms(parts),
            direct=parts.direct.view(),
            tokens_problem=self._identities.problem,
            losses=memory.losses.all,
            restarts=memory.restarts.all,
            lost_gateways=memory.gateways.all,
            gateway_id=parts.config.gateway_id,
            ended_tasks=parts.ended_tasks,
            time=datetime.fromtimestamp(self._wall(), tz=UTC).isoformat(timespec="milliseconds"),
        )


async def audit_lag_ms(parts: PoolParts) -> int | None:
    """How far the pool's audit is behind; None where it cannot be read."""
    if parts.beat.redis_problem is not None:
        return None
    try:
        oldest_ms = await parts.audit_lag.oldest_ms()
    except RedisUnavailable:
        return None
    return 0 if oldest_ms is None else max(0, int(time.time() * 1000) - oldest_ms)


def _healthy(parts: PoolParts) -> frozenset[tuple[str, int]]:
    """Who is, with which model process."""
    seen = parts.beat.observation
    return (
        frozenset((worker.id, worker.model_pid) for worker in seen.workers if worker.healthy) if seen else frozenset()
    )


def _roles(parts: PoolParts) -> object:
    """Whether schedulers pass, and which gateways are silent."""
    seen = parts.beat.observation
    return (scheduling_level(seen), silent(seen.gateway_ages_ms)) if seen else None
