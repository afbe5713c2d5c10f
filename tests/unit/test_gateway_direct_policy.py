"""Direct mode's pure parts: when it is entered and left, and who waits in which order."""

import pytest

from direct_parts import waiting
from gateway.direct.mode import LEAVE_AFTER_S, DirectMode, RequestPath
from gateway.direct.queue import MAX_BATCH, DirectEntry, DirectQueue


def looked(mode: DirectMode, now: float, redis: str, *, can_serve: bool = True, waiting: int = 0) -> RequestPath:
    """One look; `redis` is open, shaky (closed, but the last call failed) or well."""
    return mode.update(
        now, redis_open=redis == "open", redis_well=redis == "well", can_serve=can_serve, waiting=waiting
    )


def test_it_begins_with_the_open_breaker_and_ends_after_five_good_seconds() -> None:
    """At 4.9 s it is on, at 5 s it is off."""
    mode = DirectMode()
    assert looked(mode, 0.0, "well") is RequestPath.OFF
    assert looked(mode, 1.0, "open") is RequestPath.ON
    assert looked(mode, 3.0, "well") is RequestPath.ON
    assert looked(mode, 3.0 + LEAVE_AFTER_S - 0.1, "well") is RequestPath.ON
    assert looked(mode, 3.0 + LEAVE_AFTER_S, "well") is RequestPath.OFF


def test_a_shaky_redis_does_not_begin_it() -> None:
    """One failed call is no outage."""
    assert looked(DirectMode(), 0.0, "shaky") is RequestPath.OFF


@pytest.mark.parametrize("disturbed", ["shaky", "open"])
def test_one_failed_call_begins_the_five_seconds_anew(disturbed: str) -> None:
    """A Redis that comes and goes does not make requests change sides."""
    mode = DirectMode()
    for now, redis in ((0.0, "open"), (1.0, "well"), (5.9, disturbed), (6.0, "well"), (10.9, "well")):
        assert looked(mode, now, redis) is RequestPath.ON
    assert looked(mode, 11.0, "well") is RequestPath.OFF


def test_what_was_taken_is_served_to_its_end_first() -> None:
    """New requests go through Redis meanwhile; when Redis fails again, all stay on this side."""
    mode = DirectMode()
    looked(mode, 0.0, "open")
    looked(mode, 1.0, "well")
    assert looked(mode, 6.0, "well", waiting=2) is RequestPath.LEAVING
    assert looked(mode, 6.1, "shaky", waiting=1) is RequestPath.LEAVING
    assert looked(mode, 6.2, "open", waiting=1) is RequestPath.ON
    assert mode.since == 0.0
    looked(mode, 7.0, "well", waiting=1)
    assert looked(mode, 12.0, "well", waiting=0) is RequestPath.OFF


def test_where_nobody_can_be_called_it_ends_with_the_outage() -> None:
    """Staying would refuse requests that Redis can take."""
    mode = DirectMode()
    assert looked(mode, 0.0, "open", can_serve=False) is RequestPath.ON
    assert looked(mode, 1.0, "well", can_serve=False) is RequestPath.OFF


async def entry(name: str, priority: int = 1, attempts: int = 0) -> DirectEntry:
    made = DirectEntry(waiting(name), priority, 0.0)
    made.attempts = attempts
    return made


def names(entries: list[DirectEntry]) -> list[str]:
    return [each.id for each in entries]


async def test_batches_are_small_and_strictly_by_tier() -> None:
    """Whatever came first: enterprise, then paid, then free, eight at a time, and first come first served in a tier."""
    queue = DirectQueue()
    for number in range(6):
        for name, priority in (("f", 3), ("p", 2), ("e", 1)):
            assert queue.put(await entry(f"{name}{number}", priority)) is None

    picked = [names(queue.pick()) for _ in range(3)]
    whole = [f"{name}{number}" for name in "epf" for number in range(6)]
    assert picked == [whole[:8], whole[8:16], whole[16:]]
    assert (len(queue), queue.pick()) == (0, [])
    assert len(picked[0]) == MAX_BATCH


async def test_when_it_is_full_the_lowest_tier_makes_room() -> None:
    """The last of the lowest tier goes; who is lowest himself is not let in."""
    queue = DirectQueue(max_waiting=2)
    for name in ("f1", "f2"):
        queue.put(await entry(name, 3))

    late = await entry("f3", 3)
    assert (queue.has_room(3), queue.has_room(1)) == (False, True)
    assert queue.put(late) is late
    shed = queue.put(await entry("e1", 1))
    assert shed is not None
    assert shed.id == "f2"
    shed = queue.put(await entry("p1", 2))
    assert shed is not None
    assert shed.id == "f1"
    assert (queue.has_room(2), queue.has_room(1), len(queue)) == (False, True, 2)
    assert names(queue.pick()) == ["e1", "p1"]


async def test_what_a_worker_was_lost_with_goes_alone() -> None:
    """At the head of its tier, one by one, so that one bad input costs nobody else; the others go together again."""
    queue = DirectQueue()
    for name in ("a", "b"):
        queue.put(await entry(name))
    queue.put_back([await entry("x", attempts=1), await entry("y", attempts=1)])

    assert [names(queue.pick()) for _ in range(3)] == [["x"], ["y"], ["a", "b"]]


async def test_a_suspect_of_a_low_tier_neither_starves_nor_stops_its_tier() -> None:
    """While the highest tier always has somebody, it has every other turn, and those behind it go with the others."""
    queue = DirectQueue()
    queue.put(await entry("f1", 3))
    queue.put_back([await entry("s1", 3, attempts=1), await entry("s2", 3, attempts=1)])

    picked = []
    for turn in range(5):
        queue.put(await entry(f"e{turn}"))
        picked.append(names(queue.pick()))

    assert picked == [["e0", "f1"], ["s1"], ["e1", "e2"], ["s2"], ["e3", "e4"]]


async def test_a_busy_worker_s_batch_keeps_its_place() -> None:
    """It is put back at the head in its order, even where the room is full by now."""
    queue = DirectQueue(max_waiting=3)
    for name in ("a", "b", "c"):
        queue.put(await entry(name))
    picked = queue.pick(2)
    queue.put(await entry("d"))
    queue.put(await entry("e"))
    queue.put_back(picked)

    assert names(queue.pick()) == ["a", "b", "c", "d", "e"]


async def test_matching_entries_are_removed() -> None:
    """Clients that left, and those whose time is over."""
    queue = DirectQueue()
    for name, priority in (("a", 1), ("b", 2), ("c", 2)):
        queue.put(await entry(name, priority))

    assert names(queue.remove_if(lambda each: each.id in "ac")) == ["a", "c"]
    assert (len(queue), queue.ahead_of(1), queue.ahead_of(2)) == (1, 0, 1)
