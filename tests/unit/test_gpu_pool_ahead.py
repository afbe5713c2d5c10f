"""Whose batch has the model, and when one more is claimed."""

import asyncio

from eventually import eventually
from gpu_pool.worker.prefetch import AHEAD_MS, Prefetch


def ahead() -> Prefetch:
    return Prefetch(lambda: None)


async def test_a_free_model_is_granted_at_once_and_passed_on_in_order() -> None:
    """One has the model, one waits; what is over twice is over once."""
    places = ahead()
    first = places.place(ahead=True)
    first.begins(1.0)
    await eventually(lambda: places.wants_next, "its end is near")
    second = places.place(ahead=True)

    assert (first.granted.done(), second.granted.done(), places.wants_next) == (True, False, False)
    first.over()
    first.over()

    assert await second.granted is True
    assert not places.wants_next
    second.over()
    assert places.wants_next


async def test_the_next_batch_is_claimed_near_the_expected_end_and_not_before() -> None:
    """Late binding: until then what waits in the queue can still be overtaken."""
    places, loop = ahead(), asyncio.get_running_loop()
    began = loop.time()
    places.place(ahead=True).begins(AHEAD_MS + 60)

    assert not places.wants_next
    await eventually(lambda: places.wants_next, "its end is near")
    assert loop.time() - began >= 0.059


async def test_without_a_line_of_batches_nothing_is_claimed_ahead() -> None:
    """A batch that a waiting worker got says that others wait, too; nor is one that nobody can time a reason."""
    for pressed, expected_ms in ((False, 1.0), (True, 0.0)):
        places = ahead()
        place = places.place(ahead=pressed)
        place.begins(expected_ms)

        assert places._timer is None
        assert not places.wants_next
        place.over()
        assert places.wants_next


async def test_a_worker_that_stops_hands_back_what_was_claimed_ahead() -> None:
    """The running batch keeps the model; the waiting one and a late one are told no."""
    places = ahead()
    running = places.place(ahead=True)
    waiting = places.place(ahead=True)
    places.stop()
    late = places.place(ahead=True)

    assert [await place.granted for place in (running, waiting, late)] == [True, False, False]
    running.over()
    waiting.over()


async def test_a_batch_that_gives_up_waiting_leaves_its_place() -> None:
    """The model goes to the next one, not to who has gone."""
    places = ahead()
    running, waiting = places.place(ahead=True), places.place(ahead=True)
    waiting.over()
    running.over()

    assert places.wants_next
    assert not waiting.granted.done()
