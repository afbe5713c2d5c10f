"""The policy by which batches are formed: the order and shares of tiers, sizes and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """The order of a tier: priority 1 is first; the share is 0..1 of every batch. A paused tier gets no batches."""

    name: str
    priority: int
    guaranteed_share: float
    paused: bool = False
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The policy from the model's row and the settings. Times in ms, sizes in requests, input tokens (0: no limit).

    `headroom`: the share (0..1) of its workers' time that a saturated pool keeps free (`distances`); 0: batches have no distances.
    `background_share`: the share (0..1) of every batch for background work while it waits.
    """

    max_batch_size: int
    max_wait_ms: float
    lookahead_workers: int
    ageing_ms: float
    tiers: Sequence[TierPolicy]
    background_share: float
    max_batch_tokens: int = 0
    headroom: float = 0.0

    @property
    def order(self) -> Sequence[TierPolicy]:
        """The tiers by priority."""
        return sorted(self.tiers, key=lambda tier: tier.priority)

    def with_shares(self, shares: Mapping[str, float]) -> "BatchPolicy":
        """The policy with these guaranteed shares of tiers; a tier that is not in `shares` keeps its own."""
        if not shares:
            return self
        tiers = [replace(t, guaranteed_share=shares.get(t.name, t.guaranteed_share)) for t in self.tiers]
        return replace(self, tiers=tiers)
