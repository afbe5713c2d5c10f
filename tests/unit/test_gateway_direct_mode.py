"""Direct mode: when it starts and ends, the order of its queue, and the probe of the workers' direct endpoints."""

from typing import Any

import pytest

from direct_parts import FakeEndpoint, waiting
from gateway.direct.mode import DirectMode, RequestPath
from gateway.direct.probe import FAILED_INTERVAL_S, HEALTHY_INTERVAL_S, DirectProbe
from gateway.direct.queue import MAX_BATCH, DirectEntry, DirectQueue
from scheduler.protocol.direct import Hello
from scheduler.protocol.pool_view import WorkerView

OFF, ON, LEAVING = RequestPath.OFF, RequestPath.ON, RequestPath.LEAVING


@pytest.mark.parametrize(
    "steps",
    [
        # (time, Redis, waiting requests, path): Redis is open, shaky (closed, but the last call failed) or well.
        [(0.0, "shaky", 0, OFF)],
        [
            (0.0, "well", 0, OFF),
            (1.0, "open", 0, ON),
            (3.0, "well", 0, ON),
            (4.9, "well", 0, ON),
            (5.0, "well", 0, OFF),
        ],
        # One failed call starts the two seconds anew.
        [
            *((0.0, "open", 0, ON), (1.0, "well", 0, ON), (2.9, "shaky", 0, ON), (3.0, "well", 0, ON)),
            *((4.9, "well", 0, ON), (5.0, "well", 0, OFF)),
        ],
        # Requests that were taken are served first; a new outage keeps the mode.
        [
            *((0.0, "open", 0, ON), (1.0, "well", 0, ON), (3.0, "well", 2, LEAVING), (3.1, "shaky", 1, LEAVING)),
            *((3.2, "open", 1, ON), (4.0, "well", 1, ON), (6.0, "well", 0, OFF)),
        ],
    ],
)
def test_direct_mode_starts_with_the_outage_and_ends_two_seconds_after_it(
    steps: list[tuple[float, str, int, RequestPath]],
) -> None:
    """It starts when the circuit breaker opens, so that an unstable Redis does not make requests change paths."""
    mode = DirectMode()
    for now, redis, count, path in steps:
        state = {"redis_open": redis == "open", "redis_well": redis == "well"}
        assert mode.update(now, **state, can_serve=True, waiting=count) is path, now


def test_without_a_reachable_worker_it_ends_with_the_outage() -> None:
    """Staying would reject requests that Redis can take."""
    mode = DirectMode()
    assert mode.update(0.0, redis_open=True, redis_well=False, can_serve=False, waiting=0) is ON
    assert mode.update(1.0, redis_open=False, redis_well=True, can_serve=False, waiting=0) is OFF


def entry(name: str, priority: int = 1, attempts: int = 0, **changes: Any) -> DirectEntry:
    made = DirectEntry(waiting(name, **changes), priority, 0.0)
    made.attempts = attempts
    return made


def ids(entries: list[DirectEntry]) -> list[str]:
    return [each.id for each in entries]


async def test_batches_are_filled_by_tier() -> None:
    """Eight at a time, higher tiers first, in order of arrival within a tier."""
    queue = DirectQueue()
    for number in range(6):
        for name, priority in (("f", 3), ("p", 2), ("e", 1)):
            assert queue.put(entry(f"{name}{number}", priority)) is None

    picked = [ids(queue.pick()) for _ in range(3)]
    ordered = [f"{name}{number}" for name in "epf" for number in range(6)]
    assert picked == [ordered[:8], ordered[8:16], ordered[16:]]
    assert (len(queue), queue.pick(), len(picked[0])) == (0, [], MAX_BATCH)


async def test_a_batch_of_large_bodies_fits_into_a_message() -> None:
    """It gets no more once it has half of what a message may have, so that one of the largest size is no fault."""
    queue = DirectQueue()
    for number in range(8):
        queue.put(entry(str(number), body=bytes(7 << 20)))

    assert [len(queue.pick()) for _ in range(3)] == [3, 3, 2]


async def test_customers_of_a_tier_take_turns() -> None:
    """In proportion to their weights; one that comes later is first, without compensation for its idle time."""
    queue = DirectQueue()

    def put(customer: str, count: int, weight: float = 1.0) -> None:
        for number in range(count):
            queue.put(entry(f"{customer}{number}", customer_id=customer, weight=weight))

    put("a", 8)
    put("b", 8, 2.0)
    first = ids(queue.pick(6))
    put("c", 4)

    assert sorted(first) == ["a0", "a1", "b0", "b1", "b2", "b3"]
    assert sorted(ids(queue.pick(4))) == ["a2", "b4", "b5", "c0"]


async def test_a_full_queue_drops_the_lowest_tier() -> None:
    """The newest request of the lowest tier is shed; a request of that tier is not taken."""
    queue = DirectQueue(max_waiting=2)
    for name in ("f1", "f2"):
        queue.put(entry(name, 3))
    late = entry("f3", 3)

    assert (queue.has_room(3), queue.has_room(1)) == (False, True)
    assert queue.put(late) is late
    shed = [queue.put(entry("e1", 1)), queue.put(entry("p1", 2))]
    assert [each and each.id for each in shed] == ["f2", "f1"]
    assert (queue.has_room(2), queue.has_room(1), len(queue)) == (False, True, 2)
    assert ids(queue.pick()) == ["e1", "p1"]


async def test_requests_of_a_lost_worker_run_alone() -> None:
    """First in their tier and one by one, so that one bad input fails no other. They neither starve nor block their tier."""
    queue = DirectQueue()
    queue.put(entry("f1", 3))
    queue.put_back([entry("s1", 3, attempts=1), entry("s2", 3, attempts=1)])

    picked = []
    for turn in range(5):
        queue.put(entry(f"e{turn}"))
        picked.append(ids(queue.pick()))

    assert picked == [["e0", "f1"], ["s1"], ["e1", "e2"], ["s2"], ["e3", "e4"]]


async def test_the_batch_of_a_busy_worker_keeps_its_place() -> None:
    """It is returned to the head of the queue in order, even if the queue is full by now. Ended requests can be removed."""
    queue = DirectQueue(max_waiting=3)
    for name in ("a", "b", "c"):
        queue.put(entry(name))
    picked = queue.pick(2)
    queue.put(entry("d"))
    queue.put(entry("e", 2))
    queue.put_back(picked)

    assert ids(queue.remove_if(lambda each: each.id in "cd")) == ["c", "d"]
    assert (len(queue), queue.ahead_of(1), queue.ahead_of(2)) == (3, 2, 3)
    assert ids(queue.pick()) == ["a", "b", "e"]


UNREACHABLE = "no-such-host.invalid:81"


class Setup:
    """A probe on a virtual clock."""

    def __init__(self, **workers: str) -> None:
        self.workers = [worker(name, address) for name, address in workers.items()]
        self.now, self.enabled = 0.0, True
        self.probe = DirectProbe(lambda: self.workers, lambda: self.enabled, Hello("g1", "token"), lambda: self.now)

    async def probe_times(self, count: int, every_s: float = 1.0) -> list[str]:
        """The unreachable workers after so many probes."""
        for _ in range(count):
            await self.probe.probe_next()
            self.now += every_s
        return [each.worker_id for each in self.probe.unreachable]


def worker(name: str, address: str, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.0, 0, 0.0, 0.0, "simulated", "v1", age_ms=10.0, healthy=healthy, direct=address)


async def test_reachable_workers_are_probed_every_half_minute() -> None:
    """With one connection and the token; not at all while probes are disabled."""
    async with FakeEndpoint() as endpoint:
        setup = Setup(w1=endpoint.address)
        setup.enabled = False
        assert await setup.probe_times(3) == []
        assert endpoint.hellos == []

        setup.enabled = True
        assert await setup.probe_times(int(HEALTHY_INTERVAL_S) + 1) == []
        assert [hello.token for hello in endpoint.hellos] == ["token"] * 2


async def test_unreachable_workers_are_reported() -> None:
    """From the second failure on; not after they respond, or while they are unhealthy. A wrong token is named."""
    async with FakeEndpoint() as endpoint:
        setup = Setup(w1=UNREACHABLE, w2=endpoint.address)
        assert await setup.probe_times(2) == []
        assert await setup.probe_times(2, FAILED_INTERVAL_S) == ["w1"]
        (unreachable,) = setup.probe.unreachable
        assert (unreachable.address, UNREACHABLE in unreachable.why) == (UNREACHABLE, True)
        setup.workers = [worker("w1", endpoint.address), worker("w3", UNREACHABLE, healthy=False)]
        assert await setup.probe_times(4, FAILED_INTERVAL_S) == []

        endpoint.behaviour = "unfriendly"
        rejected = Setup(w1=endpoint.address)
        assert await rejected.probe_times(3, FAILED_INTERVAL_S) == ["w1"]
        assert "TIERLANE_DIRECT_TOKEN" in rejected.probe.unreachable[0].why
