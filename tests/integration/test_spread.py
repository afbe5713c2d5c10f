"""A customer of four cells is never above its limits, with allotters that are killed, suspended and partitioned.

The long form, with every fault, is tests/chaos/test_spread.py.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from scheduler.cells.shares import WHOLE
from spread_faults import all_partitioned, suspended
from spread_load import run_fault, world


async def test_a_customer_of_four_cells_stays_within_its_limits() -> None:
    """At three times its limits with uneven load: rate, concurrency and quota are not exceeded, and 90 % are usable."""
    with TemporaryDirectory() as directory:  # Paths of sockets are short.
        async with world(Path(directory)) as found:
            for fault in (suspended, all_partitioned):
                figures = await run_fault(found, fault.__name__, fault, (0.7, 0.2, 0.05, 0.05), 0.0)

                assert figures.over == (0, 0, 0)
                assert figures.parts <= WHOLE
                assert figures.usable >= 0.9
