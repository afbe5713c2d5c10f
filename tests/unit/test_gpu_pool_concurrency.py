"""Batch concurrency: AIMD width, concurrency limit, busy share, served rate."""

import asyncio

import pytest

from eventually import eventually
from gpu_pool.worker.concurrency import AimdWidth, BusyShare, ConcurrencyLimit, ServedRate

FAST, SLOW = 100.0, 250.0


@pytest.mark.parametrize(
    ("rounds", "widths"),
    [
        ([FAST] * 9, [2, 3, 4, 5, 6, 7, 8, 8, 8]),
        ([FAST] * 4 + [SLOW], [2, 3, 4, 5, 3]),
        ([FAST, SLOW, SLOW, FAST], [2, 1, 1, 2]),
        ([FAST, 190.0, 190.0], [2, 3, 4]),  # Slow is over twice the best.
        ([SLOW, FAST, SLOW], [2, 3, 2]),
    ],
)
def test_width_rises_by_one_and_falls_by_a_quarter(rounds: list[float], widths: list[int]) -> None:
    """Each round has as many batches as may run at a time, all of one duration."""
    width, found = AimdWidth(8), []
    for ms in rounds:
        for _ in range(width.now):
            width.ended(4, 10, ms, width.now)
        found.append(width.now)

    assert found == widths


@pytest.mark.parametrize(
    ("batches", "now"),
    [
        ([(4, 10, FAST, 1)] * 6, 2),  # A width that is not used is not raised.
        ([(4, 10, ms, 8) for ms in [FAST] * 6 + [FAST, SLOW, SLOW, FAST]], 4),  # Half slow: no change.
        ([(4, 10, FAST, 1), (4, 100, 10 * FAST, 2), (32, 10, 5 * FAST, 2)], 3),  # Longer answers, more items: not slow.
        ([(4, 10, FAST, 1), *[(4, 10, 3 * FAST, 8)] * 600], 8),  # A permanently slower server.
    ],
)
def test_width_after_batches(batches: list[tuple[int, int, float, int]], now: int) -> None:
    """Of (size, steps, ms, batches at a time)."""
    width = AimdWidth(8)
    for batch in batches:
        width.ended(*batch)

    assert width.now == now


def test_refusal_halves_the_width_once_until_a_batch_ends() -> None:
    """Several refusals in a row count as one."""
    width, found = AimdWidth(8), []
    for _ in range(10):
        width.ended(4, 10, FAST, 8)
    found.append(width.now)
    for _ in range(2):
        width.refused()
        found.append(width.now)
    width.ended(4, 10, FAST, 2)
    width.refused()

    assert [*found, width.now] == [5, 2, 2, 1]


async def test_concurrency_limit_can_be_resized() -> None:
    """Waiting batches start in order when it grows; when it shrinks, running ones go on and no permit is lost."""
    limit, running, release = ConcurrencyLimit(), [], asyncio.Event()

    async def hold(name: int) -> None:
        async with limit:
            running.append(name)
            await release.wait()

    tasks = [asyncio.create_task(hold(name)) for name in range(4)]
    await eventually(lambda: running == [0], "the first runs")
    limit.resize(3)
    await eventually(lambda: running == [0, 1, 2], "two more run")
    limit.resize(1)
    release.set()
    await asyncio.gather(*tasks)

    assert limit._value == 1


@pytest.mark.parametrize(
    ("runs", "share"),
    [
        ([(9.0, 9.5)], 0.25),
        ([(7.5, 8.5)], 0.25),
        ([(5.0, 8.0)], 0.0),
        ([(8.0, 9.0), (9.0, 10.0)], 1.0),
        ([(9.0, None)], 0.5),
        ([(1.0, None)], 1.0),
    ],
)
def test_busy_share(runs: list[tuple[float, float | None]], share: float) -> None:
    """Busy seconds of the last two, at second 10; None is a run that has not ended."""
    busy = BusyShare(window_s=2.0)
    for start, end in runs:
        busy.start(start)
        if end is not None:
            busy.stop(end)

    assert busy.share(10.0) == pytest.approx(share)


@pytest.mark.parametrize(
    ("ended", "rps"),
    [
        ([(1.0, 32)], 0.0),
        ([(1.0, 8), (1.05, 32), (1.1, 32), (1.15, 16)], 80 / 0.15),
        ([(1.0, 32), (3.0, 32), (5.0, 32), (7.0, 32), (9.0, 32)], 16.0),  # The last three of long runs.
        ([(1.0, 99), (2.0, 99), *((3 + i / 20, 32) for i in range(40))], 640.0),  # The last 1.25 s of short runs.
    ],
)
def test_served_rate(ended: list[tuple[float, int]], rps: float) -> None:
    """Requests/s from the end of the first kept run to the end of the last."""
    served = ServedRate(window_s=1.25)
    for now, size in ended:
        served.ended(now, size)

    assert served.rps == pytest.approx(rps)
