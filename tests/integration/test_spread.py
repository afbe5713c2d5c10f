"""A customer of four cells is never above its limits, with allotters that are killed, suspended and partitioned.

The long form, with every fault, is tests/chaos/test_spread.py.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from scheduler.cells.shares import WHOLE
from spread_load import World, all_partitioned, run_fault, suspended, world


@pytest.mark.parametrize("fault", [suspended, all_partitioned])
async def test_a_customer_of_four_cells_stays_within_its_limits(fault: Callable[[World], Awaitable[None]]) -> None:
    """At three times its limits with uneven load: rate, concurrency and quota are not exceeded, and 90 % are usable."""
    with TemporaryDirectory() as directory:  # Paths of sockets are short.
        async with world(Path(directory)) as found:
            figures = await run_fault(found, "run", fault, (0.7, 0.2, 0.05, 0.05), 1.0)

    assert figures.over == (0, 0, 0)
    assert figures.parts <= WHOLE
    assert figures.usable >= 0.9
