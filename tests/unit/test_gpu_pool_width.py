"""How many batches at a time: rounds of batches with their times, and what becomes of the width."""

import asyncio

import pytest

from eventually import eventually
from gpu_pool.worker.concurrency import AimdWidth, ConcurrencyLimit
from gpu_pool.worker.prefetch import Prefetch

FAST, SLOW = 100.0, 250.0


def width_after(*rounds: float, most: int = 8, at_once: int | None = None) -> list[int]:
    """The width after each round, whose batches took so many milliseconds and used all of it (or `at_once`)."""
    width, found = AimdWidth(most), []
    for ms in rounds:
        for _ in range(width.now):
            width.ended(4, 10, ms, width.now if at_once is None else at_once)
        found.append(width.now)
    return found


@pytest.mark.parametrize(
    ("rounds", "widths"),
    [
        ([FAST] * 4, [2, 3, 4, 5]),
        ([FAST] * 4 + [SLOW], [2, 3, 4, 5, 3]),
        ([FAST] * 7 + [SLOW, FAST], [2, 3, 4, 5, 6, 7, 8, 6, 7]),
        ([FAST] * 9, [2, 3, 4, 5, 6, 7, 8, 8, 8]),
        ([FAST, SLOW, SLOW, FAST], [2, 1, 1, 2]),
        ([FAST, 190.0, 190.0], [2, 3, 4]),
        ([SLOW, FAST, SLOW], [2, 3, 2]),
    ],
)
def test_one_more_while_it_costs_no_time_and_a_quarter_less_when_it_does(
    rounds: list[float], widths: list[int]
) -> None:
    """From one on; slow is over twice the best of its like."""
    assert width_after(*rounds) == widths


def test_a_width_that_is_not_used_is_not_raised() -> None:
    """One batch at a time says nothing about two."""
    assert width_after(FAST, FAST, FAST, at_once=1) == [2, 2, 2]


def test_some_slow_batches_in_a_round_change_nothing() -> None:
    """A cut needs more than half of them, a raise none."""
    width = AimdWidth(8)
    for _ in range(1 + 2 + 3):
        width.ended(4, 10, FAST, 8)
    before = width.now
    for ms in (FAST, SLOW, SLOW, FAST):
        width.ended(4, 10, ms, 8)

    assert (before, width.now) == (4, 4)


def test_batches_are_compared_with_their_like() -> None:
    """More items and longer answers may take longer; what counts is the time for a step."""
    width = AimdWidth(8)
    width.ended(4, 10, FAST, 1)
    width.ended(4, 100, 10 * FAST, 2)
    width.ended(32, 10, 5 * FAST, 2)

    assert width.now == 3


def test_a_refusal_halves() -> None:
    """As does a loss in TCP; several in a row are one."""
    width = AimdWidth(8)
    for _ in range(1 + 2 + 3 + 4):
        width.ended(4, 10, FAST, 8)
    before = width.now
    width.refused()
    once = width.now
    width.refused()
    twice = width.now
    width.ended(4, 10, FAST, 2)
    width.refused()

    assert (before, once, twice, width.now) == (5, 2, 2, 1)


def test_a_server_that_became_slower_is_not_held_to_its_youth() -> None:
    """After some hundred batches the new time is the good one, and the width rises again."""
    width = AimdWidth(4)
    width.ended(4, 10, FAST, 1)
    for _ in range(300):
        width.ended(4, 10, 3 * FAST, 4)

    assert width.now == 4


async def test_turns_are_given_in_order_and_as_many_as_there_are() -> None:
    """More at once when it is widened; when it is narrowed nobody is cut short, and the next wait longer."""
    turns, inside, left = ConcurrencyLimit(), [], asyncio.Event()

    async def take(name: int) -> None:
        async with turns:
            inside.append(name)
            await left.wait()
            inside.remove(name)

    tasks = [asyncio.create_task(take(name)) for name in range(4)]
    await eventually(lambda: inside == [0], "the first has its turn")
    turns.resize(3)
    await eventually(lambda: inside == [0, 1, 2], "two more have theirs")
    turns.resize(1)
    left.set()
    await asyncio.gather(*tasks)

    assert turns._value == 1


async def test_where_several_have_the_model_none_waits_for_it() -> None:
    """The next batch is claimed when a place is free, not before; narrowed, who has one keeps it."""
    changes: list[bool] = []
    places = Prefetch(lambda: changes.append(True))
    places.resize(2)
    first = places.place(ahead=True)
    first.begins(1.0)

    assert places.wants_next
    second = places.place(ahead=True)
    assert second.granted.done()
    assert not places.wants_next
    places.resize(1)
    first.over()
    assert not places.wants_next
    second.over()
    assert places.wants_next
    assert changes
