"""The policy of a pool, from the catalog and the settings. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from ledger.catalog.snapshot import Model, Snapshot
from ratelimit.shares import TierShare
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.cells.moves import PoolPlan
from tierlane.settings.model import Settings

DEFAULT_TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))
DEFAULT_BATCH_SIZE, DEFAULT_WINDOW_MS = 32, 40.0
"""What holds until PostgreSQL has been reached for the first time: work that is queued already must go on."""


def pool_model(models: Iterable[Model], pool: str) -> Model | None:
    """The model whose row rules the pool's batches: the enabled one with the smallest batch size.

    A pool normally serves one model; with several, a batch must fit each of them.
    """
    enabled = (model for model in models if model.enabled and model.pool == pool)
    return min(enabled, key=lambda model: (model.max_batch_size, model.name), default=None)


def tpot_objective(snapshot: Snapshot | None, pool: str) -> float:
    """The smallest objective of the pool's models for the milliseconds per token; 0: none."""
    models = [model for model in snapshot.models.values() if model.enabled and model.pool == pool] if snapshot else []
    return min((model.tpot_ms for model in models if model.tpot_ms), default=0.0)


def without_paused(policy: BatchPolicy) -> BatchPolicy:
    """The policy for forming batches: a paused tier is as good as empty there. What else is done for its queue goes on."""
    if not any(tier.paused for tier in policy.tiers):
        return policy
    return replace(policy, tiers=tuple(tier for tier in policy.tiers if not tier.paused))


def batch_policy(snapshot: Snapshot | None, settings: Settings) -> BatchPolicy:
    """The policy as of this snapshot, or the defaults without one."""
    model = pool_model(snapshot.models.values(), settings.pool) if snapshot else None
    tiers = (
        tuple(
            TierPolicy(tier.name, tier.priority, tier.guaranteed_share, tier.paused, tier.slo_ms)
            for tier in snapshot.tiers
        )
        if snapshot
        else DEFAULT_TIERS
    )
    return BatchPolicy(
        max_batch_size=model.max_batch_size if model else DEFAULT_BATCH_SIZE,
        max_wait_ms=model.max_wait_ms if model else DEFAULT_WINDOW_MS,
        lookahead_workers=settings.batch_lookahead_workers,
        headroom=settings.batch_headroom,
        background_share=settings.background_share,
        ageing_ms=settings.ageing_ms,
        tiers=tiers,
        max_batch_tokens=(model.max_batch_tokens or 0) if model else 0,
    )


def pool_plan(snapshot: Snapshot | None, pool: str, settings: Settings) -> PoolPlan:
    """What the moves of a pool's workers depend on, as of this snapshot."""
    policy = batch_policy(snapshot, settings.model_copy(update={"pool": pool}))
    model = pool_model(snapshot.models.values(), pool) if snapshot else None
    return PoolPlan(
        pool,
        [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in policy.tiers],
        frozenset(tier.name for tier in policy.tiers if tier.paused),
        policy.max_batch_size,
        1000 / max(1.0, model.rps_per_gpu if model else 0.0),
        settings.gone_ms,
    )
