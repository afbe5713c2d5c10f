"""The demand meter: rates over a window, the demand under a reduced limit, and latency percentiles."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.demand import WINDOW_BEATS, DemandMeter, bucket_fill
from gateway.limits.latency_window import LatencyWindow
from scheduler.protocol.pool_view import TierStats


def test_percentiles_are_exact_to_their_bucket() -> None:
    """Rounded up by at most 12 %; latencies are dropped after ten seconds."""
    window = LatencyWindow()
    assert window.percentiles_ms((0.95,), 100.0) == [0.0]
    for latency in [10.0] * 50 + [100.0] * 48 + [900.0] * 2:
        window.add(latency, 100.0)
    assert window.percentiles_ms((0.5, 0.95, 0.99), 100.0) == [10.1, 101.6, 912.3]

    window.add(10.0, 105.0)
    p95_ms = [window.percentiles_ms((0.95,), now)[0] for now in (109.9, 110.1, 200.0)]
    assert p95_ms == [101.6, 10.1, 0.0]


def test_rates_are_averaged_over_two_seconds() -> None:
    """Every count becomes a rate; a removed tier is dropped."""
    meter = DemandMeter("g1", 0.0)
    for heartbeat in range(1, 9):
        for count, times in ((meter.retried, 4), (meter.shadowed, 3), (meter.shed, 1), (meter.failed, 2)):
            for _ in range(times):
                count("free")
        for _ in range(10):
            meter.arrived("free", "acme")
        for _ in range(2):
            meter.passed("free", 0.5, 0.0)
            meter.answered("free", 50.0, heartbeat * 0.25)
        stats = meter.heartbeat(["free"], heartbeat * 0.25)

    assert stats.requests_per_second == pytest.approx(40.0)
    assert stats.tiers["free"] == TierStats(
        demand_rps=8.0,
        shed_per_second=4.0,
        p50_ms=50.8,
        p95_ms=50.8,
        p99_ms=50.8,
        answered_rps=8.0,
        arrived_rps=40.0,
        retries_rps=16.0,
        shadowed_rps=12.0,
        failed_rps=8.0,
        unreduced_rps=16.0,
        recent_rps=8.0,
    )
    assert [(each.name, each.tier) for each in stats.busiest] == [("acme", "free")]
    idle = [meter.heartbeat(["free"], 2.0 + beat * 0.25).tiers["free"] for beat in range(1, WINDOW_BEATS + 1)]
    assert [each.recent_rps for each in idle[:2]] == [4.0, 0.0]
    assert (idle[0].arrived_rps, idle[-1]) == (35.0, TierStats(0.0, 0.0, 50.8, p50_ms=50.8, p99_ms=50.8))
    assert meter.heartbeat(["paid"], 5.0).tiers.keys() == {"paid"}


@pytest.mark.parametrize(
    ("factor", "filled", "unreduced"),
    [
        (1.0, 0.0, 1.0),
        (0.5, 0.0, 2.0),  # The bucket is empty: the base limit would have admitted two requests.
        (0.5, 0.74, 2.0),
        (0.5, 0.75, 1.0),  # The limit does not hold this customer back.
        (0.0, 0.0, 100.0),  # A factor of 0 must not turn one request into a flood.
    ],
)
def test_demand_under_a_reduced_limit(factor: float, filled: float, unreduced: float) -> None:
    """One request is a demand of one. Without the reduced limit it may be 1 / factor, if that holds its customer back."""
    meter = DemandMeter("g1", 0.0)
    meter.arrived("free", "acme")
    meter.passed("free", factor, filled)

    stats = meter.heartbeat(["free"], 1.0).tiers["free"]
    assert (stats.demand_rps, stats.unreduced_rps) == pytest.approx((1.0, unreduced))


_REQUEST = st.tuples(
    st.sampled_from(["free", "paid"]),
    st.integers(0, 1),  # The gateway.
    st.sampled_from(["passed", "held back", "no room", "rejected"]),
    st.floats(0.02, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 12),  # Heartbeats until its outcome.
)


@given(st.lists(st.lists(_REQUEST, max_size=30), min_size=1, max_size=12))
def test_demand_is_never_above_what_arrived(beats: list[list[tuple[str, int, str, float, float, int]]]) -> None:
    """In every heartbeat, of each gateway and of both together, for every factor and however late outcomes are known."""
    meters = [DemandMeter("g0", 0.0), DemandMeter("g1", 0.0)]
    due: dict[int, list[Callable[[], None]]] = {}
    for beat in range(len(beats) + WINDOW_BEATS):
        for tier, gateway, outcome, factor, filled, later in beats[beat] if beat < len(beats) else ():
            meter = meters[gateway]
            meter.arrived(tier, "acme")
            ended = {
                "passed": partial(meter.passed, tier, factor, filled),
                "held back": partial(meter.held_back, tier),
                "no room": partial(meter.passed, tier),
                "rejected": partial(meter.shed, tier),
            }[outcome]
            due.setdefault(beat + later, []).append(ended)
        for each in due.pop(beat, ()):
            each()
        stats = [meter.heartbeat(["free", "paid"], (beat + 1) * 0.25).tiers for meter in meters]
        for tier in ("free", "paid"):
            assert all(0 <= each[tier].demand_rps <= each[tier].arrived_rps for each in stats)
            assert sum(each[tier].demand_rps for each in stats) <= sum(each[tier].arrived_rps for each in stats)


@pytest.mark.parametrize(
    ("remaining", "burst", "filled"), [(9.0, 10.0, 1.0), (0.2, 10.0, 0.12), (-3.0, 10.0, 0.1), (0.0, 1.0, 0.0)]
)
def test_fill_level_before_the_request(remaining: float, burst: float, filled: float) -> None:
    """Including the token that the request took."""
    assert bucket_fill(remaining, burst) == pytest.approx(filled)
