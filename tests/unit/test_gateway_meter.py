"""The meter: what is counted, what rates come of it, what stands for demand under a lowered limit, and p95."""

import pytest

from gateway.limits.demand import WINDOW_BEATS, DemandMeter, LatencyWindow, fill
from scheduler.protocol.pool_view import TierStats


@pytest.mark.parametrize(
    ("latencies", "expected"), [([], 0.0), ([50.0] * 100, 50.8), ([10.0] * 94 + [900.0] * 6, 912.3)]
)
def test_p95_is_known_to_its_bucket(latencies: list[float], expected: float) -> None:
    """Rounded up by at most 12 %."""
    window = LatencyWindow()
    for latency in latencies:
        window.add(latency, 100.0)

    assert window.p95_ms(100.0) == expected


def test_several_percentiles_come_of_one_count() -> None:
    """As each would by itself."""
    window = LatencyWindow()
    for latency in [10.0] * 50 + [100.0] * 48 + [900.0] * 2:
        window.add(latency, 100.0)

    assert window.percentiles_ms((0.5, 0.95, 0.99), 100.0) == [10.1, 101.6, 912.3]
    assert window.percentiles_ms((0.5, 0.95, 0.99), 200.0) == [0.0, 0.0, 0.0]


def test_p95_forgets_after_ten_seconds() -> None:
    """Old answers turn out of the window second by second."""
    window = LatencyWindow()
    window.add(900.0, 100.0)
    window.add(10.0, 105.0)

    assert window.p95_ms(109.9) > 900.0
    assert 10.0 <= window.p95_ms(110.1) < 12.0
    assert window.p95_ms(200.0) == 0.0


def test_the_meter_publishes_rates_over_two_seconds() -> None:
    """Every count becomes a rate; a tier that is gone is forgotten."""
    demand_meter = DemandMeter("g1", 0.0)
    for heartbeat in range(1, 9):
        for _ in range(10):
            demand_meter.arrived("free", "acme")
        for _ in range(4):
            demand_meter.retried("free")
        for _ in range(2):
            demand_meter.passed("free", 0.5, 0.0)
            demand_meter.answered("free", 50.0, heartbeat * 0.25)
        for _ in range(3):
            demand_meter.shadowed("free")
        demand_meter.shed("free")
        demand_meter.failed("free")
        demand_meter.failed("free")
        stats = demand_meter.heartbeat(["free"], heartbeat * 0.25)

    assert stats.requests_per_second == pytest.approx(40.0)
    assert stats.tiers["free"] == TierStats(
        demand_rps=16.0,
        shed_per_second=4.0,
        p50_ms=50.8,
        p95_ms=50.8,
        p99_ms=50.8,
        answered_rps=8.0,
        arrived_rps=40.0,
        retries_rps=16.0,
        shadowed_rps=12.0,
        failed_rps=8.0,
    )
    assert [(each.name, each.tier) for each in stats.busiest] == [("acme", "free")]
    assert demand_meter.heartbeat(["paid"], 2.25).tiers.keys() == {"paid"}


def test_what_was_counted_is_forgotten_after_the_window() -> None:
    """Two seconds without a request, and every rate is 0 again."""
    demand_meter = DemandMeter("g1", 0.0)
    for count in (demand_meter.retried, demand_meter.shed, demand_meter.shadowed, demand_meter.failed):
        count("free")
    demand_meter.arrived("free", "acme")
    demand_meter.passed("free", 1.0)
    demand_meter.answered("free", 50.0, 0.0)
    published = [
        demand_meter.heartbeat(["free"], heartbeat * 0.25).tiers["free"] for heartbeat in range(1, WINDOW_BEATS + 2)
    ]

    assert published[-2].arrived_rps == published[-2].demand_rps == 0.5
    assert published[-1] == TierStats(0.0, 0.0, 50.8, p50_ms=50.8, p99_ms=50.8)


@pytest.mark.parametrize(
    ("factor", "filled", "demand"),
    [
        (1.0, 0.0, 1.0),
        (0.5, 0.0, 2.0),  # its bucket is being emptied: at the base limit, two would have come through
        (0.5, 0.74, 2.0),
        (0.5, 0.75, 1.0),  # the limit does not hold this customer back
        (0.5, 1.0, 1.0),
        (0.0, 0.0, 100.0),  # a factor of nothing must not make one request a flood
        (0.5, None, 1.0),  # not known: no more than what came
        (1.0, None, 1.0),
    ],
)
def test_one_request_stands_for_what_its_base_limit_would_let_through(
    factor: float, filled: float | None, demand: float
) -> None:
    """1 / factor where the lowered limit holds its customer back, else one."""
    demand_meter = DemandMeter("g1", 0.0)
    demand_meter.arrived("free", "acme")
    demand_meter.passed("free", factor, filled)

    assert demand_meter.heartbeat(["free"], 1.0).tiers["free"].demand_rps == pytest.approx(demand)


@pytest.mark.parametrize(
    ("remaining", "burst", "filled"),
    [(9.0, 10.0, 1.0), (4.0, 10.0, 0.5), (0.2, 10.0, 0.12), (-3.0, 10.0, 0.1), (1.0, 2.0, 1.0), (0.0, 1.0, 0.0)],
)
def test_how_full_a_bucket_was(remaining: float, burst: float, filled: float) -> None:
    """Before the request took its token; a bucket of one tells nothing, since each request empties it."""
    assert fill(remaining, burst) == pytest.approx(filled)
