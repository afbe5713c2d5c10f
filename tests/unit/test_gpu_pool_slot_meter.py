"""The cost of requests in slots, and the figures of a worker."""

import pytest

from gpu_pool.worker.slot_meter import RATE_WINDOW_S, SAMPLES, WINDOW_S, SlotMeter


def test_requests_that_run_together_share_the_time() -> None:
    """Each pays for its part of each moment, so that together they pay for the time in which any ran, once."""
    meter = SlotMeter()
    long = meter.began(10.0)
    short = meter.began(11.0)
    costs = [meter.ended(13.0, short, 2.0, is_answered=True), meter.ended(14.0, long, 4.0, is_answered=True)]

    assert costs == [pytest.approx(1.0), pytest.approx(1.0 + 1.0 + 1.0)]
    assert sum(costs) == pytest.approx(14.0 - 10.0)


def test_idle_time_costs_nothing() -> None:
    """A request pays from its own start."""
    meter = SlotMeter()
    meter.ended(2.0, meter.began(1.0), 1.0, is_answered=True)

    assert meter.ended(101.0, meter.began(100.0), 1.0, is_answered=True) == pytest.approx(1.0)


def test_a_clock_that_stands_still_costs_nothing() -> None:
    """Nor does one that goes back, as none should."""
    meter = SlotMeter()
    reading = meter.began(5.0)

    assert meter.ended(4.0, reading, 0.0, is_answered=True) == 0.0


def test_costs_of_many_sum_to_the_time() -> None:
    """Starts and ends in any order."""
    meter, costs, running = SlotMeter(), [], []
    now = 0.0
    for step in range(400):
        now += 0.01 * (1 + step % 3)
        if (len(running) < 8 and step % 3 != 2) or not running:
            running.append(meter.began(now))
        else:
            costs.append(meter.ended(now, running.pop((step * 7) % len(running)), 0.1, is_answered=True))
    costs += [meter.ended(now, reading, 0.1, is_answered=True) for reading in running]

    assert meter.running == 0
    assert sum(costs) == pytest.approx(now - 0.01)


def test_only_answered_requests_are_samples() -> None:
    """A run that its client left, or that was lost, says nothing about the length of an answer."""
    meter = SlotMeter()
    for life_s, is_answered in ((0.1, True), (9.0, False), (0.3, True)):
        meter.ended(10.0, meter.began(1.0), life_s, is_answered=is_answered)

    assert meter.mean_life_ms == pytest.approx(200.0)
    assert meter.p95_life_ms == pytest.approx(300.0)
    assert meter.started == 3


def test_a_new_meter_knows_nothing() -> None:
    """Zeros, until the first request has ended."""
    meter = SlotMeter()

    assert (meter.mean_life_ms, meter.p95_life_ms, meter.served_rps(1.0), meter.mean_running(1.0)) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )


@pytest.mark.parametrize("before", [0, SAMPLES, 4 * SAMPLES, 8 * SAMPLES])
def test_the_times_are_those_of_the_newest_requests(before: int) -> None:
    """However many have ended: the oldest are forgotten."""
    meter = SlotMeter()
    for at in range(before):
        meter.ended(at / 100, meter.began(at / 100), 0.1, is_answered=True)
        assert meter.p95_life_ms == pytest.approx(100.0)
    for at in range(SAMPLES):
        meter.ended(1000.0 + at, meter.began(1000.0 + at), 0.5, is_answered=True)

    assert (meter.mean_life_ms, meter.p95_life_ms) == (pytest.approx(500.0), pytest.approx(500.0))


def test_the_p95_is_above_most_times() -> None:
    """Of a hundred, five are longer."""
    meter = SlotMeter()
    for life in range(1, 101):
        meter.ended(1.0, meter.began(1.0), life / 1000, is_answered=True)

    assert meter.p95_life_ms == pytest.approx(95.0)


@pytest.mark.parametrize("per_s", [2, 20, 400])
def test_the_served_rate(per_s: int) -> None:
    """Also if more end in the window than are kept; it falls to zero afterwards."""
    meter = SlotMeter()
    for n in range(10 * per_s):
        meter.ended(n / per_s, meter.began(n / per_s), 0.01, is_answered=True)

    assert meter.served_rps(10.0) == pytest.approx(per_s, rel=0.1)
    assert meter.served_rps(10.0 + RATE_WINDOW_S) == 0.0


def test_the_mean_number_of_running_requests() -> None:
    """Of the last seconds."""
    meter = SlotMeter()
    readings = [meter.began(0.0) for _ in range(4)]
    assert meter.mean_running(0.0) == 0.0
    assert meter.mean_running(5 * WINDOW_S) == pytest.approx(4.0, rel=0.01)
    for reading in readings:
        meter.ended(10.0, reading, 10.0, is_answered=True)

    assert meter.mean_running(10.0 + 5 * WINDOW_S) == pytest.approx(0.0, abs=0.05)
