"""From the catalog to the batch policy of one pool: which tiers there are, and how the pool's model wants its batches."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ledger.catalog.snapshot import Model, Snapshot
from scheduler.batching.policy import BatchPolicy, TierPolicy

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

DEFAULT_TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))
DEFAULT_BATCH_SIZE, DEFAULT_WINDOW_MS = 32, 40.0
"""What holds until PostgreSQL has been reached for the first time: work that is queued already must go on."""

LEAVING_S = 600.0


class LeavingTiers:
    """Tiers that were renamed or deleted a moment ago, in their old place but without a share.

    A gateway may hear of it later than we do, or be cut off from PostgreSQL for a while: what it still lets in under the
    old name, and what waits already, would otherwise stand in a queue that nobody serves until its deadline.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._known: dict[str, tuple[float, TierPolicy]] = {}

    def kept(self, policy: BatchPolicy) -> BatchPolicy:
        """The policy, and those that were in one within the last ten minutes."""
        now, names = self._clock_s(), {tier.name for tier in policy.tiers}
        self._known |= {tier.name: (now + LEAVING_S, tier) for tier in policy.tiers}
        if len(self._known) == len(names):
            return policy
        self._known = {name: known for name, known in self._known.items() if now < known[0]}
        left = [replace(tier, guaranteed_share=0.0) for name, (_, tier) in self._known.items() if name not in names]
        return replace(policy, tiers=(*policy.tiers, *left))


def pool_model(models: Iterable[Model], pool: str) -> Model | None:
    """The model whose row rules the pool's batches: the enabled one that asks for the smallest batch.

    A pool normally serves one model; with several, a batch must fit each of them.
    """
    enabled = (model for model in models if model.enabled and model.pool == pool)
    return min(enabled, key=lambda model: (model.max_batch_size, model.name), default=None)


def without_paused(policy: BatchPolicy) -> BatchPolicy:
    """The policy for forming batches: a paused tier is as good as empty there. What else is done for its queue goes on."""
    if not any(tier.paused for tier in policy.tiers):
        return policy
    return replace(policy, tiers=tuple(tier for tier in policy.tiers if not tier.paused))


def batch_policy(snapshot: Snapshot | None, settings: "Settings") -> BatchPolicy:
    """The policy as of this snapshot, or the defaults without one."""
    model = pool_model(snapshot.models.values(), settings.pool) if snapshot else None
    tiers = (
        tuple(TierPolicy(tier.name, tier.priority, tier.guaranteed_share, tier.paused) for tier in snapshot.tiers)
        if snapshot
        else DEFAULT_TIERS
    )
    return BatchPolicy(
        max_batch_size=model.max_batch_size if model else DEFAULT_BATCH_SIZE,
        max_wait_ms=model.max_wait_ms if model else DEFAULT_WINDOW_MS,
        lookahead_workers=settings.batch_lookahead_workers,
        headroom=settings.batch_headroom,
        ageing_ms=settings.ageing_ms,
        tiers=tiers,
        max_batch_tokens=(model.max_batch_tokens or 0) if model else 0,
    )
