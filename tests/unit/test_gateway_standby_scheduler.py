"""The standby scheduler: a gateway schedules after half a second without any scheduler, or at once where none is deployed."""

import asyncio
from math import inf
from typing import Any

import pytest

from configs import gateway_config
from eventually import eventually
from gateway import standby_scheduler
from gateway.standby_scheduler import SchedulerSilence, StandbyScheduler, is_chosen
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import Observation


def look(at_ms: int, passed_ms: float | None, **ages_ms: float) -> Observation:
    """An observation at a time (of Redis), when the last pass of a scheduler was at another."""
    age_ms = None if passed_ms is None else max(0.0, at_ms - passed_ms)
    return Observation(at_ms, {}, [], [], 0, 0, 0, 0, ages_ms or {"g1": 0.0}, age_ms)


@pytest.mark.parametrize(
    ("looks", "silent_ms"),
    [
        ([(0, 0.0), (250, 200.0), (500, 450.0)], 0.0),  # It passes between the observations.
        ([(10, 0.0), (250, 0.0), (500, 0.0)], 500.0),
        ([(250, 200.0), (500, 200.0)], 300.0),
        ([(0, None), (250, None), (1000, None)], 1000.0),
        ([(0, None), (1000, None), (1250, 1200.0)], 0.0),
        ([(0, 0.0), (1000, "failed"), (1250, 0.0)], 0.0),
        ([(0, 0.0), (1000, "failed"), (1250, 0.0), (1500, 0.0)], 1500.0),
        ([(0, 0.0), (8250, 200.0)], 0.0),  # TIME stepped forwards after this pass.
        ([(9000, 8950.0), (1250, 8950.0)], 0.0),  # TIME stepped back.
        ([(9000, None), (1250, None), (1500, None)], 250.0),
    ],
)
def test_silence_is_the_age_of_a_pass_that_was_seen_twice(looks: list[tuple[int, Any]], silent_ms: float) -> None:
    """By the clock of Redis. It starts anew after a failed observation: a suspended Redis lets no scheduler pass."""
    silence, found = SchedulerSilence(), -1.0
    for now_ms, passed_ms in looks:
        found = silence.after(None if passed_ms == "failed" else look(now_ms, passed_ms))

    assert found == silent_ms


@pytest.mark.parametrize(
    ("looks", "silent_ms"),
    [
        ([(0, None)], inf),
        ([(9000, 0.0)], 9000.0),  # A scheduler of an earlier run.
        ([(0, "failed"), (250, None)], inf),
        ([(0, None), (250, 200.0)], 50.0),
    ],
)
def test_where_no_schedulers_are_deployed_silence_needs_no_time(looks: list[tuple[int, Any]], silent_ms: float) -> None:
    """A pool without a pass is silent in the first observation; a scheduler that passes all the same is respected."""
    silence, found = SchedulerSilence(expected=False), -1.0
    for now_ms, passed_ms in looks:
        found = silence.after(None if passed_ms == "failed" else look(now_ms, passed_ms))

    assert found == silent_ms


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
    """A standby scheduler on a virtual clock of Redis; `allowed` may fail, and `written` be unset, then a stint does not end."""

    def __init__(self, *, schedulers_expected: bool = True) -> None:
        self.now_ms = 0
        self.passed_ms: float | None = None
        self.running = self.started = self.ended = self.checks = 0
        self.denied = False
        self.written = asyncio.Event()
        self.written.set()
        config = gateway_config(pool="large", schedulers_expected=schedulers_expected)
        self.standby = StandbyScheduler(config, self.schedule, self.allowed)

    async def schedule(self, _redis_url: str, pool: str, stop: asyncio.Event) -> None:
        assert pool == "large"
        self.started += 1
        self.running += 1
        try:
            await stop.wait()
        finally:
            self.running -= 1
        await self.written.wait()
        self.ended += 1

    async def allowed(self) -> None:
        self.checks += 1
        if self.denied:
            raise RedisUnavailable("NOPERM")

    def observe(self, ms: int, *, passes: bool = False) -> None:
        """Four observations a second, which show passes of a scheduler 50 ms before them if `passes`, else the last of these."""
        for _ in range(ms // 250):
            self.now_ms += 250
            if passes:
                self.passed_ms = self.now_ms - 50
            self.standby.observed(look(self.now_ms, self.passed_ms))


async def test_it_schedules_until_a_scheduler_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After half a second of silence, and only with permission from Redis, for which it checks repeatedly."""
    monkeypatch.setattr(standby_scheduler, "RETRY_S", 0.01)
    setup = Setup()
    setup.denied = True
    running = asyncio.create_task(setup.standby.run())
    setup.observe(500)
    assert not setup.standby._wanted.is_set()
    setup.observe(250)
    await eventually(lambda: setup.checks >= 3, "the permission is checked")
    assert setup.started == 0
    setup.denied = False
    await eventually(lambda: setup.running == 1, "it schedules")
    setup.standby.observed(None)
    assert setup.standby._wanted.is_set()
    setup.observe(250, passes=True)
    await eventually(lambda: setup.running == 0, "it stopped")
    setup.observe(500)
    await eventually(lambda: setup.running == 1, "it schedules again")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await setup.standby.close()

    assert (setup.started, setup.ended) == (2, 2)


async def two_stints(setup: Setup) -> None:
    """It schedules, stops while a scheduler passes, schedules again, and is closed."""
    running = asyncio.create_task(setup.standby.run())
    setup.observe(250)
    await eventually(lambda: setup.running == 1, "it schedules")
    setup.observe(250, passes=True)
    await eventually(lambda: setup.running == 0, "it stopped")
    setup.observe(500)
    await eventually(lambda: setup.running == 1, "it schedules again")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await setup.standby.close()


async def test_a_gateway_without_schedulers_begins_with_its_first_observation() -> None:
    """And stops while a scheduler passes."""
    setup = Setup(schedulers_expected=False)
    await two_stints(setup)

    assert setup.ended == 2


async def test_an_audit_that_is_still_written_delays_neither_the_next_stint_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a hanging PostgreSQL, the end of a stint takes seconds."""
    monkeypatch.setattr(standby_scheduler, "CLOSE_S", 0.05)
    setup = Setup(schedulers_expected=False)
    setup.written.clear()
    await two_stints(setup)

    assert (setup.started, setup.running, setup.ended) == (2, 0, 0)
