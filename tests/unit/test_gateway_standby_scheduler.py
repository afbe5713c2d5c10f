"""The standby scheduler: a gateway schedules after a second without any scheduler, if it is one of the first two."""

import asyncio
from typing import Any

import pytest

from eventually import eventually
from gateway import standby_scheduler
from gateway.config import GatewayConfig
from gateway.standby_scheduler import SchedulerSilence, StandbyScheduler, is_chosen
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import Observation


def look(at_ms: int, passed_ms: float | None, **ages_ms: float) -> Observation:
    """An observation at a time (of Redis), when the last pass of a scheduler was at another."""
    age_ms = None if passed_ms is None else at_ms - passed_ms
    return Observation(at_ms, {}, [], [], 0, 0, 0, 0, ages_ms or {"g1": 0.0}, age_ms)


@pytest.mark.parametrize(
    ("looks", "silent_s"),
    [
        ([(0.0, 0.0), (0.25, 200.0), (0.5, 450.0)], 0.0),
        ([(0.0, 0.0), (0.25, 0.0), (1.25, 0.0)], 1.25),
        ([(0.0, 0.0), (0.25, None), (1.0, None)], 1.0),
        ([(0.0, None), (1.0, None), (1.25, 1200.0)], 0.0),
        ([(0.0, 0.0), (1.0, "failed"), (1.25, 0.0), (1.5, 0.0)], 0.25),
    ],
)
def test_silence_is_the_time_without_a_new_pass(looks: list[tuple[float, Any]], silent_s: float) -> None:
    """It starts anew after a failed observation: a suspended Redis lets no scheduler pass."""
    silence, found = SchedulerSilence(), -1.0
    for now_s, passed_ms in looks:
        found = silence.after(None if passed_ms == "failed" else look(round(now_s * 1000), passed_ms), now_s)

    assert found == silent_s


@pytest.mark.parametrize(
    ("ages_ms", "chosen"),
    [
        ({"g1": 0.0, "g5": 0.0, "g6": 0.0}, True),
        ({"g1": 0.0, "g2": 0.0, "g5": 0.0}, False),
        ({"g1": 1000.0, "g2": 0.0, "g5": 0.0}, True),
        ({}, False),
    ],
)
def test_the_first_two_gateways_are_chosen(ages_ms: dict[str, float], chosen: bool) -> None:
    """By name, of those with a recent heartbeat."""
    assert is_chosen("g5", Observation(0, {}, [], [], 0, 0, 0, 0, ages_ms)) is chosen


class Setup:
    """A standby scheduler on a virtual clock; `allowed` may fail."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.running = self.started = self.checks = 0
        self.denied = False
        config = GatewayConfig(gateway_id="g1", redis_url="", service_token="", pool="large")
        self.standby = StandbyScheduler(config, self.schedule, self.allowed, lambda: self.now_s)

    async def schedule(self, pool: str, stop: asyncio.Event) -> None:
        assert pool == "large"
        self.started += 1
        self.running += 1
        try:
            await stop.wait()
        finally:
            self.running -= 1

    async def allowed(self) -> None:
        self.checks += 1
        if self.denied:
            raise RedisUnavailable("NOPERM")

    def observe(self, seconds: float, *, passes: bool = False) -> None:
        """Four observations a second, of which the last one shows a scheduler if `passes`."""
        for _ in range(round(seconds * 4)):
            self.now_s += 0.25
            self.standby.observed(look(round(self.now_s * 1000), self.now_s * 1000 - 50 if passes else None))


async def test_it_schedules_until_a_scheduler_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second of silence, and only with permission from Redis, for which it checks repeatedly."""
    monkeypatch.setattr(standby_scheduler, "RETRY_S", 0.01)
    setup = Setup()
    setup.denied = True
    running = asyncio.create_task(setup.standby.run())
    setup.observe(1.0)
    assert not setup.standby._wanted.is_set()
    setup.observe(0.25)
    await eventually(lambda: setup.checks >= 3, "the permission is checked")
    assert setup.started == 0
    setup.denied = False
    await eventually(lambda: setup.running == 1, "it schedules")
    setup.standby.observed(None)
    assert setup.standby._wanted.is_set()
    setup.observe(0.25, passes=True)
    await eventually(lambda: setup.running == 0, "it stopped")
    setup.observe(1.25)
    await eventually(lambda: setup.running == 1, "it schedules again")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (setup.started, setup.running) == (2, 0)
