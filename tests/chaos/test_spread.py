"""Twenty runs of customers of four cells at three times their limits, with every fault of the allotters and of a cell."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from scheduler.cells.shares import WHOLE
from spread_faults import FAULTS
from spread_load import run_fault, world

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

RUNS = 20


async def test_twenty_runs_stay_within_the_limits() -> None:
    """Rate and burst, concurrency and quota, in every interval; quiet and uneven, 90 % of the rate are usable."""
    draw = random.Random(25)
    with TemporaryDirectory() as directory:
        async with world(Path(directory)) as found:
            for run in range(RUNS):
                fault, raw = FAULTS[run % len(FAULTS)], [draw.expovariate(1) for _ in range(4)]
                figures = await run_fault(found, f"run-{run}", fault, [part / sum(raw) for part in raw], 3.0)
                print(figures.told(f"{run} {fault.__name__}"))
                assert figures.over == (0, 0, 0)
                assert figures.parts <= WHOLE
                assert figures.usable >= 0.9
