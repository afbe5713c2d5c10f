"""The health of every pool as this gateway sees it: gathers the inputs of the judgement.

Several pools become one document. A single pool's document stays as it is; that of several has the figures of all
together, and each pool's own beside them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.auth.authenticator import Authenticator
from gateway.catalog import CatalogView
from gateway.http.router import DrainState
from gateway.operations.health_checks import HealthInputs, health
from gateway.operations.health_losses import GatewayLosses, Losses, Restarts, scheduling_level, silent
from gateway.operations.health_model import (
    LEVELS,
    Check,
    Health,
    HealthFigures,
    HealthOfPools,
    PoolHealth,
    Status,
    TierHealth,
)
from gateway.pool import PoolParts
from gateway.pools import Pools
from ratelimit.capacity import CapacityEvidence
from scheduler.errors import RedisUnavailable


class CollectedHealth(NamedTuple):
    """One pool: what was known of it, the HTTP status and the document."""

    inputs: HealthInputs
    status: int
    document: Health


class Memory(NamedTuple):
    """What is remembered of one pool, since a single look does not show it."""

    losses: Losses
    gateways: GatewayLosses
    restarts: Restarts


class HealthCollector:
    """Gathers and judges. `wall` is seconds since the epoch."""

    def __init__(
        self,
        catalog: CatalogView,
        pools: Pools,
        drain_state: DrainState,
        authenticator: Authenticator,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._drain_state = drain_state
        self._authenticator = authenticator
        self._wall = wall
        self._memories: dict[str, Memory] = {}

    async def judge(self) -> dict[str, CollectedHealth]:
        """Every pool that a model names, by name; the gateway's own first."""
        found: dict[str, CollectedHealth] = {}
        for parts in self._pools.named:
            inputs = await self._inputs(parts)
            found[parts.config.pool] = CollectedHealth(inputs, *health(inputs))
        return found

    def facts(self) -> object:
        """What must be told at once when it changes: it compares equal as long as nothing of that did."""
        catalog = self._catalog
        return (
            [
                (
                    parts.config.pool,
                    parts.heartbeat.redis_problem is None,
                    _healthy(parts),
                    _roles(parts),
                    parts.direct.active,
                    parts.subscriber.subscribed.is_set(),
                )
                for parts in self._pools.named
            ],
            catalog.snapshot.cordoned if catalog.snapshot is not None else None,
            (catalog.snapshot is not None, catalog.fresh, catalog.problem, self._drain_state.leaving, self._paused()),
            [each[:3] for parts in self._pools.named for each in parts.ended_tasks],
        )

    def _paused(self) -> Sequence[str]:
        snapshot = self._catalog.snapshot
        return [tier.name for tier in snapshot.tiers if tier.paused] if snapshot else ()

    def _remembered(self, parts: PoolParts) -> Memory:
        memory = self._memories.setdefault(parts.config.pool, Memory(Losses(), GatewayLosses(), Restarts()))
        seen = parts.heartbeat.observation
        if seen is not None and parts.heartbeat.redis_problem is None:
            memory.losses.note(seen.workers, seen.now_ms)
            memory.gateways.note(seen.gateway_ages_ms, seen.now_ms)
            memory.restarts.note(seen.workers, seen.now_ms)
        return memory

    async def _inputs(self, parts: PoolParts) -> HealthInputs:
        catalog = self._catalog
        snapshot = catalog.snapshot
        memory = self._remembered(parts)
        return HealthInputs(
            observation=parts.heartbeat.observation,
            look_age_s=parts.heartbeat.age_s(),
            redis_problem=parts.heartbeat.redis_problem,
            catalog_loaded=snapshot is not None,
            catalog_fresh=catalog.fresh,
            catalog_age_s=catalog.age_s(),
            catalog_problem=catalog.problem,
            subscribed=parts.subscriber.subscribed.is_set(),
            leaving=self._drain_state.leaving,
            capacity_rps=parts.limits.capacity_rps,
            capacity_evidence=parts.limits.estimate.evidence,
            capacity_confidence=parts.limits.estimate.confidence,
            memory_share=parts.limits.memory_share,
            short_of_memory=parts.limits.short_of_memory,
            eviction_policy=parts.heartbeat.eviction_policy,
            no_model=snapshot is not None and not any(model.enabled for model in snapshot.models.values()),
            factors={tier.name: parts.limits.factor(tier.name) for tier in snapshot.tiers} if snapshot else {},
            paused=self._paused(),
            audit_lag_ms=await audit_lag_ms(parts),
            direct=parts.direct.view(),
            tokens_problem=self._authenticator.problem,
            losses=memory.losses.all,
            restarts=memory.restarts.all,
            lost_gateways=memory.gateways.all,
            gateway_id=parts.config.gateway_id,
            ended_tasks=parts.ended_tasks,
            time=datetime.fromtimestamp(self._wall(), tz=UTC).isoformat(timespec="milliseconds"),
        )


async def audit_lag_ms(parts: PoolParts) -> int | None:
    """How far the pool's audit is behind; None where it cannot be read."""
    if parts.heartbeat.redis_problem is not None:
        return None
    try:
        oldest_ms = await parts.audit_lag.oldest_ms()
    except RedisUnavailable:
        return None
    return 0 if oldest_ms is None else max(0, int(time.time() * 1000) - oldest_ms)


def _healthy(parts: PoolParts) -> frozenset[tuple[str, int]]:
    """Who is, with which model process."""
    seen = parts.heartbeat.observation
    return (
        frozenset((worker.id, worker.model_pid) for worker in seen.workers if worker.healthy) if seen else frozenset()
    )


def _roles(parts: PoolParts) -> object:
    """Whether schedulers pass, and which gateways are silent."""
    seen = parts.heartbeat.observation
    return (scheduling_level(seen), silent(seen.gateway_ages_ms)) if seen else None


def together(found: Mapping[str, tuple[int, Health]]) -> tuple[int, Health]:
    """The HTTP status and the document; the gateway's own pool comes first.

    It is `down` only where no pool can serve: with one that can, taking this gateway away would help nobody.
    """
    documents = list(found.values())
    if len(documents) == 1:
        return documents[0]
    statuses = [document["status"] for _, document in documents]
    status: Status = max(statuses, key=LEVELS.index)
    if status == "down" and set(statuses) != {"down"}:
        status = "degraded"
    document: HealthOfPools = {
        "status": status,
        "reasons": _reasons(found),
        **_figures([document for _, document in documents]),
        "checks": _checks(found),
        "pools": {pool: _pool(document) for pool, (_, document) in found.items()},
    }
    return (503 if status == "down" else 200), document


def _reasons(found: Mapping[str, tuple[int, Health]]) -> list[str]:
    """What several pools say alike is said once, for it is no pool's; else the pool is named."""
    said = [reason for _, document in found.values() for reason in document["reasons"]]
    common = list(dict.fromkeys(reason for reason in said if said.count(reason) == len(found)))
    return common + [
        f"Pool {pool}: {reason}"
        for pool, (_, document) in found.items()
        for reason in document["reasons"]
        if reason not in common
    ]


def _checks(found: Mapping[str, tuple[int, Health]]) -> dict[str, list[Check]]:
    """The own pool's by their names, those of the others with the pool's before it."""
    own, *others = found
    checks = dict(found[own][1]["checks"])
    for pool in others:
        checks |= {f"{pool}/{name}": check for name, check in found[pool][1]["checks"].items()}
    return checks


def _figures(documents: Sequence[Health]) -> HealthFigures:
    names = dict.fromkeys(name for each in documents for name in each["tiers"])
    gpus = sum(each["healthy_gpus"] for each in documents)
    busy = sum(each["gpu_utilization"] * each["healthy_gpus"] for each in documents)
    padded = sum(each["padding_waste"] * each["healthy_gpus"] for each in documents)
    lags = [each["audit_lag_ms"] for each in documents]
    known = [lag for lag in lags if lag is not None]
    return {
        "gpu_utilization": round(busy / gpus, 4) if gpus else 0.0,
        "padding_waste": round(padded / gpus, 4) if gpus else 0.0,
        "queue_depth": sum(each["queue_depth"] for each in documents),
        "requests_per_second": round(sum(each["requests_per_second"] for each in documents), 3),
        "healthy_gpus": gpus,
        "total_gpus": sum(each["total_gpus"] for each in documents),
        "capacity_rps": round(sum(each["capacity_rps"] for each in documents), 3),
        "capacity_evidence": max((each["capacity_evidence"] for each in documents), key=list(CapacityEvidence).index),
        "capacity_confidence": min(each["capacity_confidence"] for each in documents),
        # Each was made at a moment of its own: a tier that came or went in between is not in all.
        "tiers": {name: _tier([each["tiers"][name] for each in documents if name in each["tiers"]]) for name in names},
        "dlq": sum(each["dlq"] for each in documents),
        "audit_lag_ms": max(known) if len(known) == len(lags) else None,
    }


def _tier(rows: Sequence[TierHealth]) -> TierHealth:
    """Amounts are added up; of what cannot be, the worst pool's is told."""
    return {
        "depth": sum(row["depth"] for row in rows),
        "oldest_ms": max(row["oldest_ms"] for row in rows),
        "effective_limit_ratio": min(row["effective_limit_ratio"] for row in rows),
        "allocated_rps": round(sum(row["allocated_rps"] for row in rows), 3),
        "shed_per_second": round(sum(row["shed_per_second"] for row in rows), 3),
        "shadow_refusals_per_second": round(sum(row["shadow_refusals_per_second"] for row in rows), 3),
        "retry_amplification": max(row["retry_amplification"] for row in rows),
        "p95_ms": max(row["p95_ms"] for row in rows),
    }


def _pool(document: Health) -> PoolHealth:
    return {
        "status": document["status"],
        "gpu_utilization": document["gpu_utilization"],
        "padding_waste": document["padding_waste"],
        "queue_depth": document["queue_depth"],
        "requests_per_second": document["requests_per_second"],
        "healthy_gpus": document["healthy_gpus"],
        "total_gpus": document["total_gpus"],
        "capacity_rps": document["capacity_rps"],
        "capacity_evidence": document["capacity_evidence"],
        "capacity_confidence": document["capacity_confidence"],
        "tiers": document["tiers"],
        "dlq": document["dlq"],
        "audit_lag_ms": document["audit_lag_ms"],
    }
