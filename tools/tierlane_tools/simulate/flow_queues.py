"""The queues of the aggregated mode: of a class in a cell, and of a tier."""

import math
from collections import deque
from collections.abc import Sequence

from ledger.catalog.snapshot import Tier
from ratelimit.limits import MAX_CONCURRENCY, REQUEST_BUCKET, Values, value_of
from scheduler.cells.placement import workers_needed
from tierlane_tools.simulate.scenario import CustomerClass


class ClassFlow:
    """One class in one cell. `parcels`: [when they arrived, how many], the oldest first. Levels are those of one customer."""

    def __init__(self, each: CustomerClass, name: str, limits: Values) -> None:
        self.name = name
        self.section = each
        self.customers = 0
        self.rate = value_of(limits, REQUEST_BUCKET.rate) or math.inf
        self.burst = value_of(limits, REQUEST_BUCKET.size or REQUEST_BUCKET.rate) or self.rate
        self.concurrency = value_of(limits, MAX_CONCURRENCY) or math.inf
        self.level = self.base_level = self.burst
        self.parcels: deque[list[float]] = deque()
        self.waiting = 0
        self.running = 0.0

    def push(self, now: float, count: int) -> None:
        """Requests are queued."""
        if count:
            self.parcels.append([now, count])
            self.waiting += count

    def pop(self, count: int) -> list[tuple[float, int]]:
        """The oldest `count` requests, as (when they arrived, how many)."""
        taken: list[tuple[float, int]] = []
        self.waiting -= count
        while count > 0:
            parcel = self.parcels[0]
            part = min(count, int(parcel[1]))
            taken.append((parcel[0], part))
            parcel[1], count = parcel[1] - part, count - part
            if not parcel[1]:
                self.parcels.popleft()
        return taken

    def expired(self, before: float) -> int:
        """Drop the requests that arrived before a time; returns how many."""
        count = 0
        while self.parcels and self.parcels[0][0] < before:
            count += int(self.parcels.popleft()[1])
        self.waiting -= count
        return count


class TierFlow:
    """One tier in one cell: its classes, its bucket, and its limits."""

    def __init__(self, tier: Tier, classes: Sequence[ClassFlow]) -> None:
        self.tier = tier
        self.classes = classes
        self.demand = self.before = self.recent = 0.0
        self.factor, self.level = 1.0, 0.0
        self.ceiling = self.rate = math.inf
        self.share = self.wait_share = tier.guaranteed_share  # In this cell: of batches, and for predicted waits.

    @property
    def waiting(self) -> int:
        """Requests in its queue."""
        return sum(each.waiting for each in self.classes)

    @property
    def need(self) -> float:
        """The requests/s that it needs, for its arrivals and for what waits."""
        return workers_needed(self.demand, self.waiting, 1000.0)
