"""The schedule of an open loop: when each request is due, and of which tier.

It is absolute: a late request does not move the next one, and latency counts from the due time, so a server that stalls
cannot hide it by slowing down its own load (coordinated omission).
"""

import math
from collections.abc import Iterator
from enum import StrEnum
from random import Random
from typing import NamedTuple

from tierlane_tools.bench.plan.mix import Mix, tier_at
from tierlane_tools.traces.replay import ReplayedRequest


class Arrivals(StrEnum):
    """How requests are spread over time."""

    POISSON = "poisson"
    """Independent users: exponential gaps, bursts included."""
    CONSTANT = "constant"
    """A metronome: equal gaps."""


class Due(NamedTuple):
    """One request of the schedule: seconds from the start, and the tier's place in the mix. `request`: of a trace."""

    at_s: float
    tier: int
    request: ReplayedRequest | None = None


def schedule(arrivals: Arrivals, rate: float, seconds: float, mix: Mix, seed: int) -> Iterator[Due]:
    """All requests in order of time; the same arguments give the same schedule. `rate` is requests a second."""
    # Two sources, so that another mix leaves the times as they are.
    times = _times(arrivals, rate, seconds, Random(f"{seed}/arrivals"))
    point = Random(f"{seed}/tiers").random
    bounds = mix.cumulative()
    for at_s in times:
        yield Due(at_s, tier_at(bounds, point()))


def _times(arrivals: Arrivals, rate: float, seconds: float, random: Random) -> Iterator[float]:
    if arrivals is Arrivals.CONSTANT:
        # Counted rather than added up, so that rounding does not drift.
        yield from (number / rate for number in range(round(rate * seconds)))
        return
    # As Random.expovariate, without its call for each request.
    log, point = math.log, random.random
    at_s = -log(1.0 - point()) / rate
    while at_s < seconds:
        yield at_s
        at_s -= log(1.0 - point()) / rate
