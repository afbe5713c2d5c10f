"""When a gateway does the work of schedulers: after a second in which it saw none pass, if it is one of the first two."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from eventually import eventually
from gateway import standby_scheduler
from gateway.config import GatewayConfig
from gateway.standby_scheduler import SchedulerSilence, StandbyScheduler, is_chosen
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import Observation


def look(at_ms: int, passed_ms: float | None, **ages_ms: float) -> Observation:
    """What is seen at a time (Redis' clock) when schedulers passed last at another one."""
    age_ms = None if passed_ms is None else at_ms - passed_ms
    return Observation(at_ms, {}, [], [], 0, 0, 0, 0, ages_ms or {"g1": 0.0}, age_ms)


@pytest.mark.parametrize(
    ("looks", "silent_s"),
    [
        ([(0.0, 0.0), (0.25, 200.0), (0.5, 450.0)], 0.0),
        ([(0.0, 0.0), (0.25, 0.0), (1.25, 0.0)], 1.25),
        ([(0.0, None), (0.25, None), (1.0, None)], 1.0),
        ([(0.0, 0.0), (0.25, None), (1.0, None)], 1.0),
        ([(0.0, None), (1.0, None), (1.25, 1200.0)], 0.0),
        ([(0.0, 0.0), (1.0, "missed"), (1.25, 0.0)], 0.0),
        ([(0.0, 0.0), (1.0, "missed"), (1.25, 0.0), (1.5, 0.0)], 0.25),
    ],
)
def test_silence_is_time_in_which_looks_saw_no_new_pass(looks: list[tuple[float, Any]], silent_s: float) -> None:
    """An unknown pass is none. After a failed look it begins anew: a Redis that stood still let nobody pass."""
    silence, found = SchedulerSilence(), -1.0
    for now_s, passed_ms in looks:
        found = silence.after(None if passed_ms == "missed" else look(round(now_s * 1000), passed_ms), now_s)

    assert found == silent_s


@pytest.mark.parametrize(
    ("ages_ms", "chosen"),
    [
        ({"g5": 0.0}, True),
        ({"g1": 0.0, "g5": 0.0, "g6": 0.0}, True),
        ({"g1": 0.0, "g2": 0.0, "g5": 0.0}, False),
        ({"g1": 1000.0, "g2": 0.0, "g5": 0.0}, True),
        ({}, False),
    ],
)
def test_two_gateways_are_enough(ages_ms: dict[str, float], chosen: bool) -> None:
    """The first two by name of those that beat; who fell silent makes room."""
    assert is_chosen("g5", Observation(0, {}, [], [], 0, 0, 0, 0, ages_ms)) is chosen


class Scene:
    """A stand-in with a clock in the test's hands, and what it did."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.running = self.begun = self.asked = 0
        self.refuses = False
        config = GatewayConfig(gateway_id="g1", redis_url="", service_token="", pool="large")
        self.stand_in = StandbyScheduler(config, self.schedule, self.allowed, lambda: self.now_s)

    async def schedule(self, pool: str, stop: asyncio.Event) -> None:
        assert pool == "large"
        self.begun += 1
        self.running += 1
        try:
            await stop.wait()
        finally:
            self.running -= 1

    async def allowed(self) -> None:
        self.asked += 1
        if self.refuses:
            raise RedisUnavailable("NOPERM")

    def silent_for(self, seconds: float) -> None:
        """Looks four times a second, which see no scheduler."""
        for _ in range(round(seconds * 4)):
            self.now_s += 0.25
            self.stand_in.observed(look(round(self.now_s * 1000), None))

    def passes(self) -> None:
        """A look that sees one."""
        self.now_s += 0.25
        self.stand_in.observed(look(round(self.now_s * 1000), self.now_s * 1000 - 50))


async def within(scene: Scene, what: Callable[[], bool], told: str) -> None:
    """Run until something is so; the loop goes on meanwhile, and ends with the test."""
    running = asyncio.create_task(scene.stand_in.run())
    try:
        await eventually(what, told)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_it_begins_after_a_second_and_ends_when_a_scheduler_passes() -> None:
    """And begins again when that one is gone, too; a look that fails changes nothing."""
    scene = Scene()
    running = asyncio.create_task(scene.stand_in.run())
    scene.silent_for(1.0)
    assert not scene.stand_in._wanted.is_set()
    scene.silent_for(0.25)
    await eventually(lambda: scene.running == 1, "it stands in")
    scene.stand_in.observed(None)
    assert scene.stand_in._wanted.is_set()
    scene.passes()
    await eventually(lambda: scene.running == 0, "it stopped")
    scene.silent_for(1.25)
    await eventually(lambda: scene.running == 1, "it stands in again")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (scene.begun, scene.running) == (2, 0)


async def test_what_redis_does_not_allow_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again now and then: rights may be given later."""
    monkeypatch.setattr(standby_scheduler, "RETRY_S", 0.01)
    scene = Scene()
    scene.refuses = True
    scene.silent_for(1.5)
    await within(scene, lambda: scene.asked >= 3, "it is tried again")
    assert scene.begun == 0
    scene.refuses = False

    await within(scene, lambda: scene.begun == 1, "it stands in")
