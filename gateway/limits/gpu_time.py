"""The GPU time of each customer over the last minute: counted here, published with each heartbeat, compared within a tier.

Each completed request adds its cost to the current slot of five seconds. A slot has at most MOST_COUNTED customers, and a
heartbeat those of them that used or wait the most, so that the figures of all gateways can be added. Jobs are not counted:
they have queues of their own, and no gateway gets their replies.

Jain's index of x1...xn is their squared sum divided by n times the sum of their squares: 1 if all are equal, 1/n if one of
them has everything. Here x is the GPU time of a customer divided by its weight, of those customers that could have used
more: on average at least one of their requests waited, or at least UNMET of them failed for lack of capacity.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ledger.catalog.snapshot import Identity
from scheduler.protocol.pool_view import CustomerGpuTime, GatewayStats
from scheduler.protocol.replies import Reply

SLOT_S = 5.0
SLOTS = 12
WINDOW_MS = SLOT_S * SLOTS * 1000
MOST_COUNTED = 1024
TOP_USED = 10
TOP_WAITING = 32
UNMET = 10

Customer = tuple[str, str]
"""Name and tier."""

OTHERS = ""
"""The name of all customers beyond MOST_COUNTED in a slot."""


class _Counts:
    """GPU time and wait in microseconds, whole numbers so that a slot can be subtracted exactly; `slots` that have a part."""

    __slots__ = ("customer_id", "gpu_us", "slots", "unmet", "wait_us", "weight")

    def __init__(self, weight: float, customer_id: str) -> None:
        self.gpu_us = self.wait_us = self.unmet = self.slots = 0
        self.weight = weight
        self.customer_id = customer_id

    def add(self, other: "_Counts", sign: int) -> None:
        self.gpu_us += sign * other.gpu_us
        self.wait_us += sign * other.wait_us
        self.unmet += sign * other.unmet
        self.slots += sign
        self.weight = other.weight if sign > 0 else self.weight


class GpuTimeMeter:
    """The GPU time of the customers of one gateway."""

    def __init__(self) -> None:
        self._slot: dict[Customer, _Counts] = {}
        self._slots: deque[tuple[int, dict[Customer, _Counts]]] = deque()
        self._number = -1
        self._totals: dict[Customer, _Counts] = {}
        self._of_tiers: dict[str, float] = {}
        self._ranked: list[CustomerGpuTime] = []

    def ran(self, identity: Identity, reply: Reply) -> None:
        """Count a completed request."""
        counts = self._slot.get((identity.customer_name, identity.tier)) or self._counts(identity)
        if reply.cost_ms > 0:
            counts.gpu_us += int(reply.cost_ms * 1000)
        if reply.queue_ms > 0:
            counts.wait_us += int(reply.queue_ms * 1000)

    def unmet(self, identity: Identity) -> None:
        """Count a request that failed for lack of capacity, or for another reason that is not its client's."""
        self._counts(identity).unmet += 1

    def _counts(self, identity: Identity) -> _Counts:
        key, slot = (identity.customer_name, identity.tier), self._slot
        if key not in slot and len(slot) >= MOST_COUNTED:
            key = (OTHERS, identity.tier)
        counts = slot.get(key)
        if counts is None:
            counts = slot[key] = _Counts(identity.weight, identity.customer_id)
        return counts

    def heartbeat(self, now: float) -> tuple[dict[str, float], list[CustomerGpuTime]]:
        """The GPU time of each tier in ms, and the customers to publish, as of the last slot. `now`: monotonic seconds."""
        number = int(now / SLOT_S)
        if number == self._number:
            return self._of_tiers, self._ranked
        self._number = number
        self._slots.append((number, self._slot))
        for key, counts in self._slot.items():
            self._totals.setdefault(key, _Counts(counts.weight, counts.customer_id)).add(counts, 1)
        self._slot = {}
        while self._slots[0][0] <= number - SLOTS:  # It has left the window.
            for key, counts in self._slots.popleft()[1].items():
                total = self._totals[key]
                total.add(counts, -1)
                if not total.slots:
                    del self._totals[key]
        known = [(key, counts) for key, counts in self._totals.items() if key[0] != OTHERS]
        used = heapq.nlargest(TOP_USED, known, key=lambda each: each[1].gpu_us)
        waiting = heapq.nlargest(TOP_WAITING, known, key=lambda each: each[1].wait_us)
        unmet = heapq.nlargest(TOP_WAITING, known, key=lambda each: each[1].unmet)
        self._ranked = [
            CustomerGpuTime(
                *key,
                c.weight,
                c.gpu_us / 1000,
                round(c.wait_us / 1000 / WINDOW_MS, 3),
                c.unmet,
                c.customer_id if c.unmet >= UNMET else "",
            )
            for key, c in dict(used + waiting + unmet).items()
        ]
        self._of_tiers = {}
        for (_, tier), counts in self._totals.items():
            self._of_tiers[tier] = self._of_tiers.get(tier, 0.0) + counts.gpu_us / 1000
        return self._of_tiers, self._ranked

    def customer_ms(self, name: str, tier: str) -> float:
        """The GPU time of a customer at this gateway, also if it is not published."""
        counts = self._totals.get((name, tier))
        return counts.gpu_us / 1000 if counts else 0.0

    def tier_ms(self, tier: str) -> float:
        """The GPU time of a tier at this gateway."""
        return self._of_tiers.get(tier, 0.0)


class TierGpuTime(NamedTuple):
    """The GPU time of one tier in the last minute over all gateways, and of its published customers, the highest first."""

    total_ms: float
    customers: Sequence[CustomerGpuTime]

    @property
    def fairness(self) -> float:
        """Jain's index of the customers that could have used more GPU time; 1 with fewer than two of them."""
        short = [each for each in self.customers if each.waiting >= 1 or each.unmet >= UNMET]
        return jain_index([each.gpu_ms / each.weight for each in short])

    def share(self, gpu_ms: float) -> float:
        """The part, 0..1, of the GPU time of the tier."""
        return min(1.0, gpu_ms / self.total_ms) if self.total_ms > 0 else 0.0

    def used_ms(self, name: str) -> float:
        """The GPU time of a customer; 0 if it is not published."""
        return next((each.gpu_ms for each in self.customers if each.name == name), 0.0)


def jain_index(values: Sequence[float]) -> float:
    """1: all are equal."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares > 0 else 1.0


def tier_gpu_time(tier: str, gateways: Iterable[GatewayStats]) -> TierGpuTime:
    """The sums over all gateways."""
    total_ms, customers = 0.0, dict[str, CustomerGpuTime]()
    for gateway in gateways:
        total_ms += gateway.gpu_ms.get(tier, 0.0)
        for each in gateway.gpu_times:
            if each.tier != tier:
                continue
            if (known := customers.get(each.name)) is not None:
                each = replace(
                    each,
                    gpu_ms=known.gpu_ms + each.gpu_ms,
                    waiting=known.waiting + each.waiting,
                    unmet=known.unmet + each.unmet,
                    customer_id=known.customer_id or each.customer_id,
                )
            customers[each.name] = each
    ordered = sorted(customers.values(), key=lambda each: (-each.gpu_ms, each.name))
    return TierGpuTime(total_ms, ordered)
