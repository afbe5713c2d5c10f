"""The parts of its limits that a customer of several cells has in each of them. Pure.

Each cell has a lease on a part of the rates and of the concurrency, as in the Doorman service
(https://github.com/youtube/doorman). When a lease ends, Doorman grants a configured safe capacity; here half of the part
remains in force. Parts follow the demand: a cell gets what it was asked for in
proportion, and at least LEAST of an even part, so that a customer whose demand moves is served at once and at most that
much of its limits is unused.

The sum of the parts that may be in force is never above the whole (WHOLE), also while they change: parts are lowered first,
and raised by what is free after these calls were acknowledged. A call without a reply may have been executed: until it is over
for certain, the larger part counts.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

WHOLE = 10_000
"""The parts of a limit are whole numbers of this fraction, so that sums are exact."""

LEAST = 0.1
"""Of an even part: what a cell has without demand."""

EVEN, EVEN_PER_S = 0.02, 5.0
"""A part of the demand, and requests/s, that are assumed evenly in all cells, so that few requests do not change the parts."""

STEADY = 0.02
"""Of the whole: smaller differences change nothing, because a bucket whose part is lowered loses tokens."""

MEMORY_S = 3.0
"""The time in which a demand that has ended decays to 1 / e."""


def least_part(cells: int, burst: float, concurrency: float) -> int:
    """The smallest part of one of so many cells. Half of it is enough to admit one request."""
    half = math.ceil(LEAST * WHOLE / cells / 2)
    for limit in (burst, concurrency):
        if limit > 0:
            half = max(half, math.ceil(WHOLE / limit))
    return min(2 * half, WHOLE // cells)


def even_parts(cells: Collection[str]) -> dict[str, int]:
    """The same part for each cell."""
    return dict.fromkeys(cells, WHOLE // max(1, len(cells)))


def parts_by_demand(demand: Mapping[str, float], least: int) -> dict[str, int]:
    """The parts for these demands, in requests/s. Their sum is at most WHOLE."""
    if len(demand) == 1:
        return dict.fromkeys(demand, WHOLE)
    even = (EVEN * sum(demand.values()) + EVEN_PER_S) / len(demand)
    weights = {cell: max(0.0, asked) + even for cell, asked in demand.items()}
    total, free = sum(weights.values()), WHOLE - least * len(demand)
    return {cell: least + int(free * weight / total) for cell, weight in weights.items()}


def steady(now: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    """The wanted parts; those of now if all are near them."""
    if now.keys() == wanted.keys() and all(abs(now[cell] - part) <= STEADY * WHOLE for cell, part in wanted.items()):
        return dict(now)
    return dict(wanted)


def smoothed(before: float, requests: int, elapsed_s: float) -> float:
    """The mean demand, in requests/s, after so many requests in this time."""
    if elapsed_s <= 0:
        return before
    kept = math.exp(-elapsed_s / MEMORY_S)
    return before * kept + requests / elapsed_s * (1 - kept)


def raised(free: int, lacking: Mapping[str, int]) -> dict[str, int]:
    """How much is added to each part that lacks so much: at most `free` together, in proportion."""
    total = sum(lacking.values())
    if free <= 0 or total <= 0:
        return {}
    if total <= free:
        return {cell: lack for cell, lack in lacking.items() if lack > 0}
    return {cell: added for cell, lack in lacking.items() if (added := free * lack // total) > 0}


def grants(amount: int, spent: Mapping[str, int], reserved: int, weights: Mapping[str, int]) -> dict[str, int]:
    """What each cell may spend of a quota: what it has spent, and its part of the rest by weight. The sum is at most `amount`.

    `reserved`: what other cells may spend. The remainder of the division goes to the cell with the largest weight.
    """
    rest, total = amount - reserved - sum(spent.values()), sum(weights.get(cell, 0) for cell in spent)
    if rest <= 0 or total <= 0:
        return dict(spent)
    found = {cell: used + rest * weights.get(cell, 0) // total for cell, used in spent.items()}
    first = max(spent, key=lambda cell: (weights.get(cell, 0), cell))
    found[first] += amount - reserved - sum(found.values())
    return found


@dataclass(slots=True)
class LeasedPart:
    """A part in one cell. `share`: what was acknowledged last. `most`: the largest that may be in force until `ends`, in monotonic
    seconds; half of it afterwards, if `decays`.
    """

    share: int = 0
    most: int = 0
    ends: float = 0.0
    decays: bool = True

    def held(self, now: float) -> int:
        """The largest part that may be in force."""
        return self.most if now < self.ends or not self.decays else -(-self.most // 2)

    def sent(self, share: int, now: float, ends: float) -> None:
        """A call sets `share` until `ends`; its outcome is not known yet."""
        self.most, self.ends = max(self.held(now), share), max(self.ends, ends)

    def acknowledged(self, share: int, ends: float) -> None:
        """So much is in force until `ends`, and no earlier call can have an effect any more."""
        self.share = self.most = share
        self.ends = ends
