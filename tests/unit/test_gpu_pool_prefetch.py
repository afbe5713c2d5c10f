"""Prefetch: which claimed batch has the model, and when one more is claimed."""

import asyncio

from eventually import eventually
from gpu_pool.worker.prefetch import AHEAD_MS, Prefetch


async def test_model_is_passed_on_in_order() -> None:
    """The next batch is claimed near the expected end and not before; a slot that is released twice counts once."""
    slots, loop = Prefetch(lambda: None), asyncio.get_running_loop()
    began = loop.time()
    first = slots.slot(ahead=True)
    first.started(AHEAD_MS + 60)
    assert not slots.wants_next
    await eventually(lambda: slots.wants_next, "the end is near")
    assert loop.time() - began >= 0.059

    second = slots.slot(ahead=True)
    assert (first.granted.done(), second.granted.done(), slots.wants_next) == (True, False, False)
    first.release()
    first.release()

    assert await second.granted is True
    assert not slots.wants_next
    second.release()
    assert slots.wants_next


async def test_no_prefetch_without_backlog_or_prediction() -> None:
    """A batch that came after a wait, or whose duration is unknown, does not make the worker claim ahead."""
    for backlog, expected_ms in ((False, 1.0), (True, 0.0)):
        slots = Prefetch(lambda: None)
        slot = slots.slot(ahead=backlog)
        slot.started(expected_ms)

        assert slots._timer is None
        assert not slots.wants_next
        slot.release()
        assert slots.wants_next


async def test_stop_rejects_waiting_and_later_batches() -> None:
    """The running batch keeps the model; a waiting batch that ended by itself is not granted it."""
    slots = Prefetch(lambda: None)
    running, waiting = slots.slot(ahead=True), slots.slot(ahead=True)
    slots.stop()
    late = slots.slot(ahead=True)

    assert [await slot.granted for slot in (running, waiting, late)] == [True, False, False]

    slots = Prefetch(lambda: None)
    running, waiting = slots.slot(ahead=True), slots.slot(ahead=True)
    waiting.release()
    running.release()
    assert (slots.wants_next, waiting.granted.done()) == (True, False)
