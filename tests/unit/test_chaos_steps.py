"""Steps of the clock of Redis: when it showed what, and what a step excuses, each beside its nearest neighbours."""

import pytest

from chaos_story import RequestTimeline
from tierlane.chaos.faults.server_clock import BACKWARD, FORWARD, ClockStep, SteppedClock, read_step, told_step

STAMP_S = 0.25


def test_a_step_is_read_as_it_was_told() -> None:
    """The history tells it in the details of its event."""
    assert [read_step(told_step(seconds)) for seconds in (3.25, -0.5)] == [3.25, -0.5]


@pytest.mark.parametrize(
    ("shown", "times"),
    [
        (5.0, [5.0]),  # Before the step.
        (10.1, [10.1]),  # About when it came: it may not have come yet.
        (12.0, []),  # Passed over.
        (13.1, [10.1]),
        (15.0, [12.0]),
        (22.0, [19.0, 22.0]),  # Shown twice, since it went back at 20.
        (25.0, [25.0]),
    ],
)
def test_when_the_clock_showed_a_time(shown: float, times: list[float]) -> None:
    """It went 3 s forwards at 10, and back at 20."""
    clock = SteppedClock([ClockStep(20.0, -3.0), ClockStep(10.0, 3.0)], STAMP_S)
    assert clock.true_times(shown) == times


def test_steps_are_counted_by_direction() -> None:
    """One does not make up for the other: what was ended by the first does not come back."""
    clock = SteppedClock([ClockStep(10.0, 3.0), ClockStep(12.0, -2.0), ClockStep(14.0, 1.0)], STAMP_S)
    assert (clock.forward(9.0, 15.0), clock.backward(9.0, 15.0)) == (4.0, 2.0)
    assert (clock.forward(10.5, 13.0), clock.backward(10.5, 13.0)) == (0.0, 2.0)


def failed(story: RequestTimeline, sent: float, ended: float, code: str = "deadline_exceeded") -> None:
    """A request that was accepted and ended with this code."""
    story.sent(1, sent)
    story.answered(1, ended, 504 if code == "deadline_exceeded" else 503, code)
    story.row(1, "failed", code)


@pytest.mark.parametrize(
    ("step", "sent", "ended", "holds"),
    [
        (3.0, 9.0, 10.1, True),
        (3.9, 10.2, 10.3, True),  # Its gateway did not know of the step yet.
        (3.9, 10.8, 10.9, False),
        (2.0, 9.0, 10.1, False),  # It left the request a second.
        (3.9, 5.0, 9.5, False),  # It had ended by then.
    ],
)
def test_a_step_forwards_ends_what_has_less_time_left(step: float, sent: float, ended: float, *, holds: bool) -> None:
    """By as much as it went; the client is told of it, and so says the row."""
    story = RequestTimeline()
    story.fault(FORWARD, "redis", 10.0, 40.0, details=told_step(step))
    failed(story, sent, ended)
    assert story.broken().keys() <= {"late answers", "needless failures"}
    assert ("needless failures" not in story.broken()) is holds


def test_a_step_makes_nobody_too_late_to_enter() -> None:
    """A request that has just come is not refused as overdue, whatever the clock says."""
    story = RequestTimeline()
    story.fault(FORWARD, "redis", 10.0, 15.0, details=told_step(5.0))
    story.sent(1, 10.1)
    story.answered(1, 10.15, 504, "deadline_exceeded")
    assert story.broken() == {"needless failures": 1}


def test_the_way_back_of_a_step_backwards_is_one_forwards() -> None:
    """What was sent meanwhile is ended by it."""
    story = RequestTimeline()
    story.fault(BACKWARD, "redis", 10.0, 15.0, details=told_step(-3.0))
    failed(story, 14.0, 15.1)
    assert story.broken() == {}
    assert story.excused() == {"the clock of Redis went forwards": 1}


@pytest.mark.parametrize("code", ["worker_lost", "gateway_lost"])
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_a_step_loses_nobody(name: str, code: str) -> None:
    """Neither leases nor the heartbeats of those who live may seem to have run out."""
    story = RequestTimeline()
    story.fault(name, "redis", 10.0, 15.0, details=told_step(5.0 if name == FORWARD else -5.0))
    failed(story, 9.9, 11.0, code)
    assert story.broken()["needless failures"] == 1


@pytest.mark.parametrize(("ended", "holds"), [(12.2, True), (12.1, False)])
def test_an_end_is_timed_by_a_clock_that_was_set_back(ended: float, *, holds: bool) -> None:
    """The row says when it ended by the clock of Redis, 5 s behind; a run from 12.1 to 12.15 was not over before."""
    story = RequestTimeline()
    story.fault(BACKWARD, "redis", 10.0, 20.0, details=told_step(-5.0))
    story.sent(1, 12.0)
    story.ran(1, 12.1)
    story.answered(1, 12.25)
    story.row(1, ended_ms=(ended - 5.0) * 1000)
    assert story.broken().get("fencing", 0) == (0 if holds else 1)


@pytest.mark.parametrize(("killed", "holds"), [(True, True), (False, False)])
def test_a_run_is_late_after_a_step_backwards_only_without_its_gateway(*, killed: bool, holds: bool) -> None:
    """A gateway ends what is overdue by its own clock; for a dead one only that of Redis does."""
    story = RequestTimeline()
    story.fault(BACKWARD, "redis", 10.0, 20.0, details=told_step(-3.0))
    if killed:
        story.fault("kill-gateway", "gateway-1", 10.5, 10.5)
    story.sent(1, 9.5)
    story.ran(1, 15.0)
    story.silent(1, 10.5, "reset")
    story.row(1, ended_ms=None)
    assert ("late execution" not in story.broken()) is holds
