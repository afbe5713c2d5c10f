"""The circuit breaker: when it opens, how it probes, and that it always closes; and its use for Redis."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.circuit_breaker import (
    MAX_FAILURES,
    MAX_TRIES,
    PROBE_AFTER_S,
    PROBE_TIMEOUT_S,
    SILENCE_S,
    Breaker,
    BreakerState,
    RedisWatch,
)
from scheduler.errors import RedisUnavailable

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
STEP_S = 0.025


def opened(draw: Callable[[float, float], float] = min) -> Breaker:
    """A breaker that opened at 0 s."""
    breaker = Breaker(draw=draw)
    for _ in range(MAX_FAILURES):
        breaker.failed(0.0)
    return breaker


@pytest.mark.parametrize(
    ("calls", "state"), [("", CLOSED), ("ff", CLOSED), ("fff", OPEN), ("ffsff", CLOSED), ("ffsfff", OPEN)]
)
def test_three_consecutive_failures_open_it(calls: str, state: BreakerState) -> None:
    """A success resets the count."""
    breaker = Breaker()
    for call in calls:
        breaker.begun(0.0)
        if call == "f":
            breaker.failed(0.0)
        else:
            breaker.succeeded()

    assert breaker.state is state
    assert breaker.well is (not calls or calls[-1] == "s")


@pytest.mark.parametrize(
    ("begun_at", "responded", "now", "state"),
    [
        ([0.0], False, SILENCE_S - 0.01, CLOSED),
        ([0.0, 0.4], False, SILENCE_S, OPEN),  # The first call without a response counts.
        ([0.0], True, 10.0, CLOSED),  # Without calls nothing is known.
        ([], False, 10.0, CLOSED),
    ],
)
def test_half_a_second_without_a_response_opens_it(
    begun_at: list[float], responded: bool, now: float, state: BreakerState
) -> None:
    """Before any failure is reported. A worker's breaker counts failures only, because a model may take seconds."""
    breaker, workers = Breaker(), Breaker(max_failures=1, silence_s=None)
    for moment in begun_at:
        breaker.begun(moment)
        workers.begun(moment)
    if responded:
        breaker.succeeded()

    assert breaker.update(now) is state
    assert workers.update(now) is CLOSED
    workers.failed(now)
    assert workers.state is OPEN


def test_one_probe_is_sent_after_the_pause() -> None:
    """Not earlier, and no second one at the same time. Late failures of earlier calls do not postpone it."""
    breaker = opened(max)
    breaker.failed(PROBE_AFTER_S[1] - 0.01)

    assert not breaker.may_call(PROBE_AFTER_S[1] - 0.001)
    assert breaker.may_call(PROBE_AFTER_S[1])
    assert breaker.state is HALF_OPEN
    assert not breaker.may_call(PROBE_AFTER_S[1] + 0.001)


def test_the_probe_decides() -> None:
    """A success closes the breaker, as any other success does; a failed or lost probe is followed by another one."""
    failed, lost, passed, late = (opened() for _ in range(4))
    for breaker in (failed, lost, passed):
        assert breaker.may_probe(0.1)
    failed.failed(0.2)
    passed.succeeded()
    late.succeeded()

    assert (failed.state, passed.state, late.state) == (OPEN, CLOSED, CLOSED)
    assert [failed.may_call(0.25), failed.may_call(0.2 + PROBE_AFTER_S[0])] == [False, True]
    assert lost.update(0.1 + PROBE_TIMEOUT_S) is OPEN
    assert lost.may_probe(0.1 + PROBE_TIMEOUT_S + PROBE_AFTER_S[0])


@given(
    draws=st.lists(st.floats(*PROBE_AFTER_S), min_size=1, max_size=20),
    outcomes=st.lists(st.sampled_from(["failed", "lost", "late"]), max_size=8),
    recovered_at=st.floats(0.0, 5.0),
    other_failures=st.lists(st.floats(0.0, 5.25), max_size=20),
)
def test_it_closes_within_two_seconds_of_the_recovery(
    draws: list[float], outcomes: list[str], recovered_at: float, other_failures: list[float]
) -> None:
    """Whatever the outcomes of earlier probes, and whichever other calls failed until shortly after the recovery."""
    drawn, ending = iter(draws * 200), iter(outcomes * 200)
    breaker = Breaker(draw=lambda low, high: next(drawn))
    reports: list[tuple[float, bool]] = [(at, False) for at in other_failures if at <= recovered_at + 0.25]
    now = 0.0
    for _ in range(MAX_FAILURES):
        breaker.failed(now)
    while now <= recovered_at or breaker.state is not CLOSED:
        now += STEP_S
        assert now <= recovered_at + 2.0
        if breaker.may_probe(now):
            if now >= recovered_at:
                reports.append((now + 0.05, True))
            elif (outcome := next(ending, "failed")) != "lost":
                reports.append((now + (0.25 if outcome == "failed" else 0.45), False))
        for report in [each for each in reports if each[0] <= now]:
            reports.remove(report)
            if report[1]:
                breaker.succeeded()
            else:
                breaker.failed(now)


class Setup:
    """Redis's breaker on a virtual clock, with a ping that may fail."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fault: Exception | None = None
        self.pings = 0
        self.changes: list[bool] = []
        self.watch = RedisWatch(
            self._ping, clock=lambda: self.now, on_change=lambda: self.changes.append(self.watch.answers)
        )

    async def _ping(self) -> None:
        self.pings += 1
        if self.fault is not None:
            raise self.fault

    def until(self, moment: float) -> None:
        """Update every 25 ms until then, as the gateway does."""
        while self.now < moment:
            self.now += STEP_S
            self.watch.update(self.now)

    def open(self) -> None:
        for _ in range(3):
            self.watch.begun()
            self.watch.failed()


async def test_changes_are_reported_at_once() -> None:
    """Calls are repeated a limited number of times, and not while the breaker is open."""
    setup = Setup()
    assert [setup.watch.try_again(tries) for tries in (1, 3, MAX_TRIES)] == [True, True, False]
    setup.open()
    assert (setup.changes, setup.watch.answers, setup.watch.try_again(1)) == ([False], False, False)
    setup.watch.answered()
    assert (setup.changes, setup.watch.answers) == ([False, True], True)


@pytest.mark.parametrize("fault", [RedisUnavailable("away"), OSError("broken")])
async def test_it_pings_until_redis_responds(fault: Exception) -> None:
    """One probe after the other, each after its pause; a response closes the breaker."""
    setup = Setup()
    setup.fault = fault
    setup.open()
    for step in range(110):
        if step == 100:
            assert 5.0 / 0.5 <= setup.pings <= 5.0 / 0.1
            setup.fault = None
        setup.until(setup.now + 0.05)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert setup.watch.answers


@pytest.mark.parametrize("update_first", [True, False])
async def test_a_suspended_gateway_does_not_open_it(update_first: bool) -> None:
    """Two seconds of SIGSTOP with a call in flight are one failure; later silence counts again."""
    setup = Setup()
    setup.until(1.0)
    setup.watch.begun()
    setup.now += 2.0
    if update_first:
        setup.watch.update(setup.now)
    setup.watch.failed()
    setup.watch.update(setup.now)
    assert setup.watch.breaker.state is CLOSED
    setup.watch.begun()
    setup.until(setup.now + 0.5)
    assert setup.watch.breaker.state is not CLOSED
