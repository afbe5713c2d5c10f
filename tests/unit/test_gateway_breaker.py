"""The circuit breaker: when it opens, how it asks, that it closes, and that nothing keeps it open."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.circuit_breaker import MAX_FAILURES, PROBE_AFTER_S, PROBE_TIMEOUT_S, SILENCE_S, Breaker, BreakerState

STEP_S = 0.025


def earliest(low: float, high: float) -> float:
    return low


def latest(low: float, high: float) -> float:
    return high


def opened(at: float = 0.0, draw: Callable[[float, float], float] = earliest) -> Breaker:
    breaker = Breaker(draw=draw)
    for _ in range(MAX_FAILURES):
        breaker.failed(at)
    return breaker


@pytest.mark.parametrize(
    ("calls", "state"),
    [
        ("", BreakerState.CLOSED),
        ("ff", BreakerState.CLOSED),
        ("fff", BreakerState.OPEN),
        ("ffsff", BreakerState.CLOSED),
        ("ffsfff", BreakerState.OPEN),
        ("sssf", BreakerState.CLOSED),
    ],
)
def test_three_failures_in_a_row_open_it(calls: str, state: BreakerState) -> None:
    """A success between them begins the count anew."""
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
    ("begun_at", "answered_at", "looked_at", "state"),
    [
        ([0.0], None, SILENCE_S - 0.01, BreakerState.CLOSED),
        ([0.0], None, SILENCE_S, BreakerState.OPEN),
        ([0.0, 0.4], None, SILENCE_S, BreakerState.OPEN),  # The first unanswered call counts.
        ([0.0], 0.1, 10.0, BreakerState.CLOSED),  # Nobody tries, so nothing is known.
        ([], None, 10.0, BreakerState.CLOSED),
    ],
)
def test_half_a_second_of_trying_without_a_success_opens_it(
    begun_at: list[float], answered_at: float | None, looked_at: float, state: BreakerState
) -> None:
    """No failure need have been told yet: time alone opens it, where calls are made."""
    breaker = Breaker()
    for moment in begun_at:
        breaker.begun(moment)
    if answered_at is not None:
        breaker.succeeded()

    assert breaker.update(looked_at) is state


def test_a_worker_s_breaker_counts_failures_only() -> None:
    """A model may take seconds, so silence says nothing there."""
    breaker = Breaker(max_failures=1, silence_s=None)
    breaker.begun(0.0)
    assert breaker.update(60.0) is BreakerState.CLOSED
    breaker.failed(60.0)
    assert breaker.state is BreakerState.OPEN


def test_one_probe_goes_at_its_jittered_moment() -> None:
    """Not before it, and no second one beside it."""
    breaker = opened(draw=latest)

    assert not breaker.may_call(PROBE_AFTER_S[1] - 0.001)
    assert breaker.may_call(PROBE_AFTER_S[1])
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.may_call(PROBE_AFTER_S[1] + 0.001)


@pytest.mark.parametrize(("good", "state"), [(True, BreakerState.CLOSED), (False, BreakerState.OPEN)])
def test_the_probe_decides(good: bool, state: BreakerState) -> None:
    """A success closes it, a failure opens it again, with another moment for another probe."""
    breaker = opened()
    assert breaker.may_probe(0.1)
    if good:
        breaker.succeeded()
    else:
        breaker.failed(0.2)

    assert breaker.state is state
    assert breaker.may_call(0.25) is good
    assert breaker.may_call(0.2 + PROBE_AFTER_S[0]) is True


def test_a_probe_that_nobody_reports_on_is_a_failure() -> None:
    """The task that made it was lost: half open is not for ever."""
    breaker = opened()
    assert breaker.may_probe(0.1)

    assert breaker.update(0.1 + PROBE_TIMEOUT_S) is BreakerState.OPEN
    assert breaker.may_probe(0.1 + PROBE_TIMEOUT_S + PROBE_AFTER_S[0])


def test_a_late_failure_does_not_put_the_probe_off() -> None:
    """Calls that were begun before it opened still fail one after the other."""
    breaker = opened()
    breaker.failed(0.09)
    assert breaker.may_probe(0.1)


def test_any_success_closes_it() -> None:
    """A call that was begun long before is as good a proof as the probe."""
    breaker = opened()
    breaker.succeeded()
    assert breaker.well
    assert breaker.opened == 1


@given(
    draws=st.lists(st.floats(*PROBE_AFTER_S), min_size=1, max_size=20),
    ends=st.lists(st.sampled_from(["failed", "lost", "late"]), max_size=8),
    heal_at=st.floats(0.0, 5.0),
    strays=st.lists(st.floats(0.0, 5.25), max_size=20),
)
def test_it_always_closes_within_two_seconds_of_the_healing(
    draws: list[float], ends: list[str], heal_at: float, strays: list[float]
) -> None:
    """Whatever its probes met before, and whatever other calls failed until a moment after the healing."""
    drawn, ending = iter(draws * 200), iter(ends * 200)
    breaker = Breaker(draw=lambda low, high: next(drawn))
    reports: list[tuple[float, bool]] = [(at, False) for at in strays if at <= heal_at + 0.25]
    now = 0.0
    for _ in range(MAX_FAILURES):
        breaker.failed(now)
    while now <= heal_at or breaker.state is not BreakerState.CLOSED:
        now += STEP_S
        assert now <= heal_at + 2.0
        if breaker.may_probe(now):
            if now >= heal_at:
                reports.append((now + 0.05, True))
            elif (end := next(ending, "failed")) != "lost":
                reports.append((now + (0.25 if end == "failed" else 0.45), False))
        for report in [each for each in reports if each[0] <= now]:
            reports.remove(report)
            if report[1]:
                breaker.succeeded()
            else:
                breaker.failed(now)
