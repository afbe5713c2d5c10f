"""From the catalog to the batch policy of one pool: which tiers there are, and how the pool's model wants its batches."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ledger.snapshot import Model, Snapshot
from scheduler.batch_policy import BatchPolicy, TierPolicy

if TYPE_CHECKING:
    from tierlane.settings import Settings

DEFAULT_TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))
DEFAULT_BATCH_SIZE, DEFAULT_WINDOW_MS = 32, 40.0
"""What holds until PostgreSQL has been reached for the first time: work that is queued already must go on."""


def pool_model(models: Iterable[Model], pool: str) -> Model | None:
    """The model whose row rules the pool's batches: the enabled one that asks for the smallest batch.

    A pool normally serves one model; with several, a batch must fit each of them.
    """
    enabled = (model for model in models if model.enabled and model.pool == pool)
    return min(enabled, key=lambda model: (model.max_batch_size, model.name), default=None)


def batch_policy(snapshot: Snapshot | None, settings: "Settings") -> BatchPolicy:
    """The policy as of this snapshot, or the defaults without one."""
    model = pool_model(snapshot.models.values(), settings.pool) if snapshot else None
    tiers = (
        tuple(TierPolicy(tier.name, tier.priority, tier.guaranteed_share) for tier in snapshot.tiers)
        if snapshot
        else DEFAULT_TIERS
    )
    return BatchPolicy(
        max_batch_size=model.max_batch_size if model else DEFAULT_BATCH_SIZE,
        max_wait_ms=model.max_wait_ms if model else DEFAULT_WINDOW_MS,
        lookahead_workers=settings.batch_lookahead_workers,
        ageing_ms=settings.ageing_ms,
        tiers=tiers,
    )
