"""The time of batches of each size: a first run that does not count, then some until a second is over."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tierlane.check.judgements import LONGER
from tierlane.check.model_probe import Probe, ProbeAnswer
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
        runs_ms, last = await _runs(probe, [texts[place % len(texts)] for place in range(size)])
        if last.too_long:
            return Timing(timed, _too_long(timed, size, last.wrong))
        if last.wrong:
            return Timing(timed, fails("sizes", f"a batch of {size}: {last.wrong}", SMALLER))
        timed.append(Timed(size, median(runs_ms[1:])))
    return Timing(timed, holds("sizes", f"batches of {timed[0].size} to {timed[-1].size} run"))


async def _runs(probe: Probe, batch: Sequence[str]) -> tuple[list[float], ProbeAnswer]:
    """Run a batch repeatedly until enough times are measured or a run fails; return the times and the last result."""
    runs_ms: list[float] = []
    while True:
        answer = await probe.ask(batch)
        runs_ms.append(answer.ms)
        enough = len(runs_ms) > MOST or (len(runs_ms) > FEWEST and sum(runs_ms) >= ENOUGH_MS)
        if answer.wrong or enough:
            return runs_ms, answer


def _too_long(timed: Sequence[Timed], size: int, said: str) -> ModelFinding:
    """No fault of the model, as long as smaller batches end in time."""
    if timed:
        return holds("sizes", f"batches of {size} run for too long, smaller ones do not")
    return fails("sizes", f"a batch of {size}: {said}", LONGER)
