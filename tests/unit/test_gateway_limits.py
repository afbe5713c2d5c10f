"""Live limits and the meter: observations and demand in, tier limits, factors and published rates out."""

import pytest

from gateway.limits import HOLD_S, WAITING_ROOM_S, LiveLimits
from gateway.meter import LatencyWindow, Meter
from ledger.snapshot import Model, Snapshot, Tier
from scheduler.observation import GatewayStats, Observation, TierStats, WorkerView

TINY = Model("tiny", "default", 32, None, 40, 3000, 100.0, 0.8, 0, True)


def tier(name: str, priority: int, share: float, shed_depth: int | None = None) -> Tier:
    return Tier(name, priority, share, 10.0, 20.0, 8, None, 500, 2000, shed_depth, None)


TIERS = (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25, 500), tier("free", 3, 0.10, 100))
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())


def worker(name: str, rps: float = 0.0, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.5, 1, 10.0, healthy, rps, 50.0, "simulated", "v1")


def observed(workers: list[WorkerView], **demand: float) -> Observation:
    stats = {name: TierStats(rate, 0.0, 0.0) for name, rate in demand.items()}
    return Observation(0, {}, workers, [GatewayStats("g1", 0.0, stats)], 0, 0, 0, 0)


def test_capacity_is_what_the_healthy_gpus_do() -> None:
    """Measured rates count, others as the measured mean or the model's row; sick ones not at all."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a"), worker("b")]), SNAPSHOT, 0.0)
    assert limits.capacity_rps == pytest.approx(160.0)
    limits.observe(observed([worker("a", 200.0), worker("b", healthy=False)]), SNAPSHOT, 0.25)
    assert limits.capacity_rps == pytest.approx(160.0)


def test_a_calm_pool_lets_every_tier_use_what_is_free() -> None:
    """Without contention no key is lowered, and each tier may take all that nobody asks for."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")], free=10.0), SNAPSHOT, 0.0)
    current = limits.current(SNAPSHOT)

    assert [limits.factor(name) for name in ("enterprise", "paid", "free")] == [1.0, 1.0, 1.0]
    assert [round(each.rate) for each in current.tiers] == [70, 70, 80]
    assert [each.ahead for each in current.tiers] == [
        ["enterprise"], ["enterprise", "paid"], ["enterprise", "paid", "free"],
    ]  # fmt: skip
    assert [each.shed_depth for each in current.tiers] == [-1, 500, 100]
    assert current.capacity_rps == pytest.approx(80.0)


def test_contention_lowers_free_first_and_relaxes_slowly() -> None:
    """Free falls at once when enterprise takes the capacity; a second later a quarter of the limit is back."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")], enterprise=60.0, free=80.0), SNAPSHOT, 0.0)
    assert (limits.factor("enterprise"), limits.factor("free")) == (1.0, 0.25)
    limits.observe(observed([worker("a")]), SNAPSHOT, 1.0)
    assert limits.factor("free") == pytest.approx(0.5)


def test_no_gpu_is_waited_for_then_said() -> None:
    """For two seconds requests may queue for a GPU that returns; then there is no capacity."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")]), SNAPSHOT, 0.0)
    limits.observe(observed([worker("a", healthy=False)]), SNAPSHOT, 1.0)
    assert limits.capacity_rps == pytest.approx(80.0)
    assert not limits.no_gpu(1.0 + WAITING_ROOM_S)
    assert limits.no_gpu(1.1 + WAITING_ROOM_S)
    limits.observe(observed([worker("a")]), SNAPSHOT, 4.0)
    assert not limits.no_gpu(4.0)


def test_a_stale_look_holds_then_falls_to_one_gpu() -> None:
    """The declared direction of a lost control input."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a"), worker("b")]), SNAPSHOT, 0.0)
    limits.lapse(SNAPSHOT, HOLD_S)
    assert limits.capacity_rps == pytest.approx(160.0)
    limits.lapse(SNAPSHOT, HOLD_S + 0.1)
    assert limits.capacity_rps == pytest.approx(80.0)


def test_a_changed_catalog_is_obeyed_before_the_next_look() -> None:
    """A tier that was just added can be admitted at once."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")]), SNAPSHOT, 0.0)
    wider = Snapshot(2, (*TIERS, tier("trial", 4, 0.0)), {}, {}, {"tiny": TINY}, ())

    assert [each.name for each in limits.current(wider).tiers] == ["enterprise", "paid", "free", "trial"]


@pytest.mark.parametrize(
    ("latencies", "expected"), [([], 0.0), ([50.0] * 100, 50.8), ([10.0] * 94 + [900.0] * 6, 912.3)]
)
def test_p95_is_known_to_its_bucket(latencies: list[float], expected: float) -> None:
    """Rounded up by at most 12 %."""
    window = LatencyWindow()
    for latency in latencies:
        window.add(latency, 100.0)

    assert window.p95_ms(100.0) == expected


def test_p95_forgets_after_ten_seconds() -> None:
    """Old answers turn out of the window second by second."""
    window = LatencyWindow()
    window.add(900.0, 100.0)
    window.add(10.0, 105.0)

    assert window.p95_ms(109.9) > 900.0
    assert 10.0 <= window.p95_ms(110.1) < 12.0
    assert window.p95_ms(200.0) == 0.0


def test_the_meter_publishes_rates_over_two_seconds() -> None:
    """Arrivals, demand as the base limits would let it through, shed; a tier that is gone is forgotten."""
    meter = Meter("g1", 0.0)
    for beat in range(1, 9):
        for _ in range(10):
            meter.arrived("free")
        for _ in range(2):
            meter.passed("free", 0.5)
        meter.shed("free")
        stats = meter.beat(["free"], beat * 0.25)

    assert stats.requests_per_second == pytest.approx(40.0)
    assert stats.tiers["free"].demand_rps == pytest.approx(16.0)
    assert stats.tiers["free"].shed_per_second == pytest.approx(4.0)
    assert meter.beat(["paid"], 2.25).tiers.keys() == {"paid"}


def test_demand_is_never_more_than_what_came() -> None:
    """Scaling up by a small factor cannot invent requests."""
    meter = Meter("g1", 0.0)
    for _ in range(4):
        meter.arrived("free")
        meter.passed("free", 0.0)

    assert meter.beat(["free"], 1.0).tiers["free"].demand_rps == pytest.approx(4.0)
