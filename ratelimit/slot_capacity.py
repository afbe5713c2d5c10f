"""The capacity of engines with slots: requests start and end one by one, and the speed of each depends on how many run. Pure.

By Little's law, slots divided by the mean time of a request in a slot is the rate with all slots in use. While fewer run, each
is faster, so this is an upper bound, which becomes exact as the slots fill up. So the estimate sets limits only from a backlog
in full slots until they are clearly not full: before that, a rejected request could have run.

Requests differ: answers of 5 and of 2,000 tokens run side by side, and the mean time of a few hundred varies by a fifth. So the
estimate is the mean of about a thousand requests, and within two to three seconds that of a changed speed: one that differs by
more than the usual deviation, for that long.
"""

import math
from collections.abc import Sequence

from ratelimit.capacity import (
    BACKLOG_S,
    LONGEST_STEP_S,
    MEASURED_FROM,
    Capacity,
    CapacityEvidence,
    GpuRate,
    PoolLoad,
    PoolRate,
)

FULL = 0.9
"""The part of the slots from which an engine is full: a free slot is filled within milliseconds, not at once."""
ROOM = 0.75
"""Below this part of the slots for ROOM_S, an engine has room. The distance to FULL keeps limits from opening and closing."""
ROOM_S = 1.0
GROWTH = 1.25
"""Slots grow if they are this many times their mean of the last GROWTH_S: they are being learnt."""
GROWTH_S = 3.0
SAMPLES = 1000
"""Requests in the mean,"""
LEAST_S, MOST_S = 1.0, 60.0
"""within these times."""
STEP = 0.4
"""A speed has changed if it differs by this part, and by UNUSUAL times the usual deviation, for STEP_S."""
UNUSUAL = 3.0
STEP_S = 2.5
DEVIATION_S, MOST_DEVIATION = 20.0, 0.5
PROBE, MOST_PROBED = 1.1, 1.5
"""Growth per second while requests are rejected and slots are free, up to this multiple of the measured rate."""


class SlotEstimator:
    """The estimate of one pool with slots. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._each_rps = 0.0  # Requests/s of one slot.
        self._samples = 0.0
        self._deviation = 0.0  # Mean of |measured / estimate - 1|.
        self._unusual_from: tuple[float, bool] | None = None  # Since when, and whether it is faster.
        self._slots = 0.0  # Mean slots of an engine in the last seconds.
        self._looked_at: float | None = None
        self._backlog_from: float | None = None
        self._room_from: float | None = None
        self._full = False

    def look(self, gpus: Sequence[GpuRate], prior_rps: float, load: PoolLoad, now: float) -> Capacity:
        """Update with an observation of all healthy GPUs; `prior_rps` (requests/s of one GPU) counts while nothing was measured."""
        since_s = max(0.0, now - self._looked_at) if self._looked_at is not None else 0.0
        elapsed_s, self._looked_at = min(LONGEST_STEP_S, since_s), now
        if since_s > LONGEST_STEP_S:
            self.interrupt()
        measured = [gpu for gpu in gpus if gpu.seen_batch > 0 and gpu.slots]
        if not measured:
            return Capacity(prior_rps * len(gpus), CapacityEvidence.PRIOR, 0.0)
        slots = sum(gpu.slots for gpu in measured)
        used = min(1.0, sum(gpu.fresh_batch for gpu in measured) / slots)
        all_rps, own_rps = PoolRate.of(gpus, 1).full_rps, PoolRate.of(measured, 1).full_rps
        each_rps, becomes_full = own_rps / slots, self._becomes_full(slots / len(measured), used, load, elapsed_s, now)
        self._follow(each_rps, own_rps * used, elapsed_s, now, anew=becomes_full)
        if self._full and load.limiting and used < FULL:
            self._each_rps = max(self._each_rps, min(self._each_rps * PROBE**elapsed_s, MOST_PROBED * each_rps))
        evidence = CapacityEvidence.MEASURED if used >= MEASURED_FROM else CapacityEvidence.PROBING
        return Capacity(self._each_rps * slots * all_rps / own_rps, evidence, used, has_room=not self._full)

    def interrupt(self) -> None:
        """Note that no GPU is healthy, or none could be observed."""
        self._backlog_from = self._room_from = self._unusual_from = None

    def _becomes_full(self, slots: float, used: float, load: PoolLoad, elapsed_s: float, now: float) -> bool:
        """Update whether the engines are full; returns whether they are since now. `slots`: of each engine."""
        self._slots += (slots - self._slots) * (_weight(elapsed_s, GROWTH_S) if self._slots else 1.0)
        grows = slots > GROWTH * self._slots
        self._backlog_from = _since(self._backlog_from, load.backlogged and used >= FULL and not grows, now)
        self._room_from = _since(self._room_from, used < ROOM, now)
        if grows or (self._room_from is not None and now - self._room_from >= ROOM_S):
            self._full = False
        elif not self._full and self._backlog_from is not None and now - self._backlog_from >= BACKLOG_S:
            self._full = True
            return True
        return False

    def _follow(self, each_rps: float, served_rps: float, elapsed_s: float, now: float, *, anew: bool) -> None:
        """Take the measured rate of a slot into the mean. `served_rps`: of the pool. `anew`: a lower rate replaces the mean."""
        changed = False
        if self._each_rps:  # It is that of another speed if it is unusual for a while.
            off = each_rps / self._each_rps
            limit = 1 + max(STEP, UNUSUAL * self._deviation)
            self._deviation += (min(abs(off - 1), MOST_DEVIATION) - self._deviation) * _weight(elapsed_s, DEVIATION_S)
            if 1 / limit <= off <= limit:
                self._unusual_from = None
            elif self._unusual_from is None or self._unusual_from[1] != (off > 1):
                self._unusual_from = now, off > 1
            changed = self._unusual_from is not None and now - self._unusual_from[0] >= STEP_S
        if not self._each_rps or changed or (anew and each_rps < self._each_rps):
            self._each_rps, self._samples, self._unusual_from = each_rps, 0.0, None
        self._samples = min(SAMPLES, self._samples + served_rps * elapsed_s)
        over_s = min(max(LEAST_S, self._samples / max(served_rps, 0.001)), MOST_S)
        # A geometric mean: the first rates after a start, of short answers only, may be many times too high.
        self._each_rps *= (each_rps / self._each_rps) ** _weight(elapsed_s, over_s)


def _weight(elapsed_s: float, over_s: float) -> float:
    """The weight of a new value in a mean over so many seconds."""
    return 1 - math.exp(-elapsed_s / over_s)


def _since(before: float | None, holds: bool, now: float) -> float | None:  # noqa: FBT001
    """Since when a condition holds; None if it does not."""
    if not holds:
        return None
    return now if before is None else before
