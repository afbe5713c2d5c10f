"""Redis's breaker as the gateway keeps it: who feeds it, who is told, and what a standstill of our own is worth."""

import asyncio

import pytest

from gateway.circuit_breaker import MAX_TRIES, BreakerState, RedisWatch
from scheduler.errors import RedisUnavailable


class World:
    """A clock, a ping that does as told, and what the watch said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fault: Exception | None = None
        self.pings = 0
        self.changes: list[bool] = []
        self.watch = RedisWatch(self._ping, clock=lambda: self.now)
        self.watch.on_change = lambda: self.changes.append(self.watch.answers)

    async def _ping(self) -> None:
        self.pings += 1
        if self.fault is not None:
            raise self.fault

    def until(self, moment: float) -> None:
        """Look every 25 ms until then, as the gateway does."""
        while self.now < moment:
            self.now += 0.025
            self.watch.update(self.now)

    async def opened(self) -> None:
        for _ in range(3):
            self.watch.begun()
            self.watch.failed()


async def test_who_listens_hears_of_it_at_once() -> None:
    """Told when it opens and when it closes, not with the next look."""
    world = World()
    await world.opened()
    assert (world.changes, world.watch.answers) == ([False], False)
    world.watch.answered()
    assert (world.changes, world.watch.answers) == ([False, True], True)


async def test_admission_tries_again_until_it_is_open() -> None:
    """A lost call is sent again, because that costs nothing; not for ever, and not once Redis counts as away."""
    world = World()
    assert [world.watch.try_again(tries) for tries in (1, 2, 3, MAX_TRIES)] == [True, True, True, False]
    await world.opened()
    assert not world.watch.try_again(1)


async def test_half_a_second_of_silence_is_enough() -> None:
    """Two calls of a quarter second each that time out: away, and no third one."""
    world = World()
    world.watch.begun()
    world.until(0.25)
    world.watch.failed()
    assert world.watch.try_again(1)
    world.watch.begun()
    world.until(0.5)
    world.watch.failed()
    assert not world.watch.try_again(2)


@pytest.mark.parametrize("fault", [RedisUnavailable("away"), OSError("broken")])
async def test_it_knocks_until_somebody_answers(fault: Exception) -> None:
    """One probe after the other, each after its pause; the answer closes it."""
    world = World()
    world.fault = fault
    await world.opened()
    for _ in range(100):
        world.until(world.now + 0.05)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 5.0 / 0.5 <= world.pings <= 5.0 / 0.1
    world.fault = None
    for _ in range(10):
        world.until(world.now + 0.05)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert world.watch.answers


@pytest.mark.parametrize("first", ["look", "failure"])
async def test_a_process_that_stood_still_does_not_blame_redis(first: str) -> None:
    """Two seconds of SIGSTOP with a call under way: one failure, and the breaker stays closed."""
    world = World()
    world.until(1.0)
    world.watch.begun()
    world.now += 2.0
    if first == "look":
        world.watch.update(world.now)
    world.watch.failed()
    world.watch.update(world.now)
    assert world.watch.breaker.state is BreakerState.CLOSED
    world.watch.begun()
    world.until(world.now + 0.5)
    assert world.watch.breaker.state is not BreakerState.CLOSED
