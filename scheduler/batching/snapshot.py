"""The state of a pool at one time, from which a decision about the next batch is made."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from scheduler.batching.service import UNKNOWN, Service
from scheduler.protocol.pool_view import SlotView


@dataclass(frozen=True, slots=True)
class TierQueue:
    """A tier queue: its length, and the wait of its oldest request."""

    depth: int
    oldest_ms: float


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool at one time. A leased batch is ready or running; `workers`: the number of healthy ones.

    `since_ms`: time since the last batch was due to leave; `since_formed_ms`: since any dispatcher formed one.
    `background`: the background queue of each tier. `quiet`: tiers in which quiet customers wait. `slots`: None in a pool that
    runs batches.
    """

    tiers: Mapping[str, TierQueue]
    ready_batches: int
    leased_batches: int
    workers: int
    arrivals_per_s: float
    service: Service = UNKNOWN
    since_ms: float = math.inf
    background: Mapping[str, TierQueue] = field(default_factory=dict)
    quiet: Collection[str] = ()
    since_formed_ms: float = math.inf
    slots: SlotView | None = None

    @property
    def waiting(self) -> int:
        """Requests in all tier queues."""
        return sum(tier.depth for tier in self.tiers.values())

    @property
    def in_background(self) -> int:
        """Requests in all background queues."""
        return sum(tier.depth for tier in self.background.values())

    @property
    def idle(self) -> int:
        """Workers without a batch."""
        return max(0, self.workers - self.leased_batches)

    @property
    def oldest_ms(self) -> float:
        """The wait of the oldest request of all tiers; 0 if none is queued."""
        return max((tier.oldest_ms for tier in self.tiers.values() if tier.depth), default=0.0)
