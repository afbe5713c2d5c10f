"""The time of batches of each size: a first run that does not count, then some until a second is over."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tierlane.check.judgements import LONGER
from tierlane.check.model_probe import Probe
from tierlane.check.model_report import ModelFinding, Timed, fails, holds

FEWEST, MOST = 3, 20
ENOUGH_MS = 1000.0
SMALLER = "Leave --batch-sizes and max_batch_size under it, or give the device more memory."


class Timing(NamedTuple):
    """What was measured, and the finding about sizes that were asked for."""

    timed: list[Timed]
    finding: ModelFinding


async def measure(probe: Probe, sizes: Sequence[int], texts: Sequence[str]) -> Timing:
    """The median times of these sizes, smallest first, up to the first that does not run; texts are repeated to fill."""
    timed: list[Timed] = []
    for size in sorted(set(sizes)):
        batch = [texts[place % len(texts)] for place in range(size)]
        runs_ms: list[float] = []
        while len(runs_ms) <= FEWEST or (len(runs_ms) <= MOST and sum(runs_ms) < ENOUGH_MS):
            answer = await probe.ask(batch)
            runs_ms.append(answer.ms)
            if answer.too_long and timed:  # No fault of the model, as long as smaller batches end in time.
                return Timing(timed, holds("sizes", f"batches of {size} run for too long, smaller ones do not"))
            if answer.wrong:
                advice = LONGER if answer.too_long else SMALLER
                return Timing(timed, fails("sizes", f"a batch of {size}: {answer.wrong}", advice))
        timed.append(Timed(size, median(runs_ms[1:])))
    return Timing(timed, holds("sizes", f"batches of {timed[0].size} to {timed[-1].size} run"))
