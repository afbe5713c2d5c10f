"""The chaos checker with a clock of Redis that steps, and with gateways that were stopped."""

import pytest

from chaos_history import RecordedRun
from tierlane_tools.chaos.faults.server_clock import BACKWARD, FORWARD, ClockStep, SteppedClock, step_text


@pytest.fixture
def run() -> RecordedRun:
    """A run with two correct requests."""
    return RecordedRun()


@pytest.mark.parametrize(
    ("shown", "times"),
    [
        (5.0, [5.0]),
        (10.1, [10.1]),  # About the time of the step, which may not have been done yet.
        (12.0, []),  # Skipped by the step.
        (15.0, [12.0]),
        (22.0, [19.0, 22.0]),  # Shown twice: the clock went back at 20.
        (25.0, [25.0]),
    ],
)
def test_true_times_of_a_stepped_clock(shown: float, times: list[float]) -> None:
    """The clock goes 3 s forwards at 10, and back at 20."""
    assert SteppedClock([ClockStep(20.0, -3.0), ClockStep(10.0, 3.0)], 0.25).true_times(shown) == times


@pytest.mark.parametrize(
    ("name", "step", "sent", "ended", "code", "excused"),
    [
        (FORWARD, 3.0, 9.0, 10.1, "deadline_exceeded", True),
        (FORWARD, 3.9, 10.8, 10.9, "deadline_exceeded", False),  # The gateway knew the step by then.
        (FORWARD, 2.0, 9.0, 10.1, "deadline_exceeded", False),  # A second was left.
        (FORWARD, 5.0, 9.9, 11.0, "worker_lost", False),
        (BACKWARD, -3.0, 39.0, 40.1, "deadline_exceeded", True),  # Its end is a step forwards.
        (BACKWARD, -5.0, 9.9, 11.0, "gateway_lost", False),
    ],
)
def test_a_failure_after_a_clock_step(
    run: RecordedRun, name: str, step: float, sent: float, ended: float, code: str, *, excused: bool
) -> None:
    """A step forwards excuses a deadline that it used up, and nothing else."""
    run.fault(name, "redis", 10.0, 40.0, details=step_text(step))
    run.send(1, sent)
    run.answer(1, ended, 504 if code == "deadline_exceeded" else 503, code)
    run.row(1, "failed", code)
    assert ("needless failures" not in run.violations()) is excused


@pytest.mark.parametrize(
    ("step", "ended", "attempts", "ran_at", "excused"),
    [
        (6.0, 42.0, 0, None, True),
        (6.0, 42.0, 1, 41.9, True),
        (6.0, 42.0, 1, 39.5, False),  # It did not wait for long: the run took the time.
        (6.0, 42.0, 1, None, True),  # It was claimed too late, or the loss of its worker was noticed too late.
        (1.5, 42.0, 0, None, False),  # Its queue time ended within its deadline nevertheless.
        (6.0, 39.7, 0, None, False),  # It did not wait as long as that.
        (6.0, 39.0, 0, None, False),  # It ended before the step.
    ],
)
def test_a_wait_that_a_step_backwards_extends(
    run: RecordedRun, step: float, ended: float, attempts: int, ran_at: float | None, *, excused: bool
) -> None:
    """After a step backwards a request waits until its deadline, where it would have had queue_timeout after 2 s."""
    run.fault(FORWARD, "redis", 10.0, 40.0, details=step_text(step))  # Its end is a step backwards.
    run.send(1, 38.0)
    if ran_at is not None:
        run.run(1, ran_at)
    run.answer(1, ended, 504, "deadline_exceeded")
    run.row(1, "failed", "deadline_exceeded", attempts=attempts)
    assert ("needless failures" not in run.violations()) is excused


@pytest.mark.parametrize(
    ("stopped", "target", "late"),
    [((39.0, 43.0), "gateway-1", False), ((39.0, 43.0), "gateway-2", True), ((30.0, 31.0), "gateway-1", True)],
)
def test_a_run_after_a_step_backwards(
    run: RecordedRun, stopped: tuple[float, float], target: str, *, late: bool
) -> None:
    """Only the clock of Redis ends the request of a stopped gateway, so its run may begin later by the step."""
    run.fault(FORWARD, "redis", 10.0, 40.0, details=step_text(3.0))
    run.fault("stop-gateway", target, *stopped)
    run.send(1, 38.0)
    run.run(1, 42.2)
    run.answer(1, 43.1)
    run.row(1)
    assert ("late execution" in run.violations()) is late


@pytest.mark.parametrize(
    ("created", "answered", "late"), [(3.6, 7.6, False), (3.6, 7.8, True), (4.5, 7.6, True), (3.6, None, False)]
)
def test_a_gateway_that_goes_on_has_its_time_from_when_it_read_the_request(
    run: RecordedRun, created: float, answered: float | None, *, late: bool
) -> None:
    """At most a second after its resume, also where the client did not wait so long."""
    run.fault("stop-gateway", "gateway-1", 0.5, 3.0)
    run.send(1, 1.0)
    if answered is None:
        run.no_answer(1, 7.2, "timeout")
    else:
        run.answer(1, answered, 504, "deadline_exceeded")
    run.row(1, "failed", "deadline_exceeded", created_ms=created * 1000)
    assert bool({"late answers", "unanswered"} & set(run.violations())) is late
