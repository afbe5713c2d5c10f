"""How a run went over time: what came back in each second, by tier. Read from the tallies, so no request pays for it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tierlane.bench.histogram import Histogram
from tierlane.bench.load import Load
from tierlane.bench.tally import TierTally

STEP_S = 1.0


@dataclass(frozen=True)
class TierMoment:
    """One tier in one step. `p99_s` of its 200s, None without one."""

    completed: int
    failed: int
    p99_s: float | None


@dataclass(frozen=True)
class Moment:
    """One step, by tier in the order of the mix. `at_s`: its end, in seconds since the first request."""

    at_s: float
    length_s: float
    tiers: tuple[TierMoment, ...]


class Timeline:
    """The steps of a run so far."""

    def __init__(self, warmup: Sequence[TierTally], measured: Sequence[TierTally]) -> None:
        self.steps: list[Moment] = []
        self._pairs = list(zip(warmup, measured, strict=True))
        self._seen = [self._now(number) for number in range(len(self._pairs))]
        self._at_s = 0.0

    async def follow(self, load: Load) -> None:
        """Take a step each second until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            self.step(load.elapsed_s())

    def step(self, at_s: float) -> None:
        """What came back since the last step."""
        now = [self._now(number) for number in range(len(self._pairs))]
        tiers = tuple(_between(before, after) for before, after in zip(self._seen, now, strict=True))
        self.steps.append(Moment(round(at_s, 3), round(at_s - self._at_s, 3), tiers))
        self._seen, self._at_s = now, at_s

    def _now(self, tier: int) -> tuple[Histogram, int]:
        tallies = self._pairs[tier]
        return Histogram.merged(tally.latency for tally in tallies), sum(t.failures + t.missing for t in tallies)


def _between(before: tuple[Histogram, int], after: tuple[Histogram, int]) -> TierMoment:
    new = after[0].since(before[0])
    return TierMoment(new.count, after[1] - before[1], new.quantile(0.99))
