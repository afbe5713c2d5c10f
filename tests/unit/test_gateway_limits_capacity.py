"""Live limits: observed workers and demand in, tier limits and factors out."""

import msgspec
import pytest

from gateway.limits.capacity import HOLD_S, WAITING_ROOM_S, LiveLimits, healthy_gpus, pool_load
from ledger.catalog.snapshot import Model, Price, Snapshot, Tier
from ratelimit.capacity import CapacityEvidence
from ratelimit.quotas import Meter
from scheduler.protocol.pool_view import (
    GatewayStats,
    Observation,
    TierDepth,
    TierStats,
    WorkerView,
    combined,
    with_moving,
)

TINY = Model("tiny", "default", 32, None, 40, 100.0, 0.8, 0, True, rps_per_gpu_fixed=True)
MEASURED = msgspec.structs.replace(TINY, rps_per_gpu_fixed=False)


def tier(name: str, priority: int, share: float, shed_depth: int | None = None, *, shadow: bool = False) -> Tier:
    return Tier(name, priority, share, (10.0, 20.0, 8, None), 500, 2000, shed_depth, None, shadow)


TIERS = (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25, 500), tier("free", 3, 0.10, 100))
NAMES = [each.name for each in TIERS]
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())
LEARNED = Snapshot(1, TIERS, {}, {}, {"tiny": MEASURED}, ())


def worker(name: str = "a", rps: float = 0.0, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.5, 1, rps, 50.0, "simulated", "v1", age_ms=10.0, healthy=healthy)


SICK = worker("b", healthy=False)


def look(*workers: WorkerView, **demand: float) -> Observation:
    stats = {name: TierStats(rate, 0.0, 0.0) for name, rate in demand.items()}
    return Observation(0, {}, list(workers), [GatewayStats("g1", 0.0, stats)], 0, 0, 0, 0)


def observed(*looks: Observation, snapshot: Snapshot = SNAPSHOT, every_s: float = 0.25) -> LiveLimits:
    """Limits after these observations."""
    limits = LiveLimits("default")
    for number, each in enumerate(looks):
        limits.observe(each, snapshot, number * every_s)
    return limits


def factors(limits: LiveLimits) -> list[float]:
    return [limits.factor(name) for name in NAMES]


def test_capacity_is_the_sum_over_healthy_gpus() -> None:
    """Measured rates; a GPU that was not measured counts as their median; times the target utilization."""
    limits = observed(look(worker("a", 200.0), worker("b")), snapshot=LEARNED)
    assert limits.capacity_rps == pytest.approx(320.0)
    limits.observe(look(worker("a", 200.0), SICK), LEARNED, 0.25)
    assert limits.capacity_rps == pytest.approx(160.0)


def test_metered_quotas_charge_the_measured_time_and_the_present_price() -> None:
    """The GPU time of a request that runs alone on the slowest worker, as last measured; without a row it is free."""
    priced = msgspec.structs.replace(SNAPSHOT.models["tiny"], prices=(Price(1e12, 9.0, 9.0), Price(0.0, 0.5, 0.25)))
    snapshot = msgspec.structs.replace(SNAPSHOT, models={"tiny": priced})
    new = msgspec.structs.replace(worker(), service_p95_ms=0.0)
    measured = [msgspec.structs.replace(new, base_ms=ms, item_ms=1.5, seen_batch=2.0) for ms in (10.0, 20.0)]
    limits = observed(look(*measured), look(new), snapshot=snapshot)

    assert limits.meter("tiny") == Meter(21_500, 0.5, 0.25)
    assert limits.meter("unknown") == Meter(21_500)
    assert observed(look(msgspec.structs.replace(new, model_ms=50.0))).meter("tiny") == Meter(50_000)
    assert LiveLimits("default").meter("tiny") == Meter()


def test_without_any_measurement_nothing_is_limited() -> None:
    """The prior is a guess: all tiers keep their base limits, and waits are predicted with ten times the guess."""
    limits = observed(look(worker(), worker("b"), enterprise=1e4, free=1e5), snapshot=LEARNED)
    current = limits.current(LEARNED)

    assert (limits.capacity_rps, limits.estimate.evidence) == (160.0, CapacityEvidence.PRIOR)
    assert factors(limits) == [1.0, 1.0, 1.0]
    assert min(each.rate for each in current.tiers) > 1e6
    assert current.capacity_rps == pytest.approx(1600.0)


def test_newly_measured_capacity_raises_limits_at_once() -> None:
    """Slow relaxation is for capacity that may be lost again, not for capacity that was there all the time."""
    small = msgspec.structs.replace(worker(), base_ms=10.0, item_ms=10.0, seen_batch=4.0, fresh_batch=4.0)
    full = msgspec.structs.replace(worker(), base_ms=20.0, item_ms=0.0, seen_batch=32.0, fresh_batch=32.0)
    limits = observed(look(small, free=800.0), snapshot=LEARNED)
    assert limits.factor("free") < 0.1
    limits.observe(look(full, free=800.0), LEARNED, 0.25)

    assert limits.factor("free") == pytest.approx(1.0)


@pytest.mark.parametrize(("oldest_ms", "leased", "backlogged"), [(99.0, 1, False), (101.0, 1, True), (101.0, 0, False)])
def test_a_backlog_is_a_wait_behind_busy_gpus(oldest_ms: float, leased: int, backlogged: bool) -> None:
    """A wait of more than two runs while every GPU has work."""
    seen = Observation(0, {"free": TierDepth("free", 5, oldest_ms)}, [worker("a", 640.0)], [], 0, leased, 0, 0)

    assert pool_load(seen, healthy_gpus(seen), LEARNED, {}) == (backlogged, False, 50.0)


def test_a_smaller_batch_size_reduces_capacity() -> None:
    """Capacity is that of the configured batch size, not of the size that was measured."""
    measured = msgspec.structs.replace(worker("a", 640.0), base_ms=50.0, seen_batch=32.0)
    limits = observed(look(measured), snapshot=LEARNED)
    assert limits.capacity_rps == pytest.approx(0.8 * 640)

    eight = msgspec.structs.replace(LEARNED, models={"tiny": msgspec.structs.replace(MEASURED, max_batch_size=8)})
    limits.observe(look(measured), eight, 0.25)

    assert limits.capacity_rps == pytest.approx(0.8 * 160)


def test_idle_capacity_is_available_to_every_tier() -> None:
    """Without contention no factor is below 1, and a tier may use all that the others do not."""
    limits = observed(look(worker(), free=10.0))
    current = limits.current(SNAPSHOT)

    assert factors(limits) == [1.0, 1.0, 1.0]
    assert [round(each.rate) for each in current.tiers] == [
        72,
        72,
        80,
    ]  # 8 of 80 are guaranteed to free, which uses them.
    assert [each.burst for each in current.tiers] == [each.rate for each in current.tiers]
    assert [each.ahead for each in current.tiers] == [NAMES[:1], NAMES[:2], NAMES]
    assert [each.shed_depth for each in current.tiers] == [-1, 500, 100]
    assert [(each.share, each.shadow) for each in current.tiers] == [(0.05, False), (0.25, False), (0.10, False)]
    assert current.capacity_rps == pytest.approx(80.0)


def test_an_idle_tier_keeps_its_rate_under_a_flood_below_it() -> None:
    """Its bucket refills at the rate that it could have."""
    limits = observed(look(worker(), free=1e6))
    rates = {each.name: each.rate for each in limits.current(SNAPSHOT).tiers}

    assert rates == pytest.approx({"enterprise": 72.0, "paid": 72.0, "free": 80.0})
    assert {name: limits.allocated(name) for name in NAMES} == {"enterprise": 0.0, "paid": 0.0, "free": 80.0}


def test_demand_and_drain_are_summed_over_gateways() -> None:
    """Allocation and factor follow from the sum, and are published beside the meter's own figures."""
    one = GatewayStats("g1", 0.0, {"free": TierStats(30.0, 0.0, 0.0, answered_rps=10.5)})
    other = GatewayStats("g2", 0.0, {"free": TierStats(90.0, 0.0, 0.0, answered_rps=4.5), "paid": TierStats(8.0, 0, 0)})
    limits = observed(Observation(0, {}, [worker(), SICK], [one, other], 0, 0, 0, 0))

    assert (limits.capacity_rps, limits.healthy_gpus) == (80.0, 1)
    assert (limits.demand("free"), limits.allocated("free"), limits.factor("free")) == (120.0, 72.0, 0.6)
    assert (limits.demand("paid"), limits.allocated("paid"), limits.factor("paid")) == (8.0, 8.0, 1.0)
    assert (limits.drain_rps("free"), limits.drain_rps("paid"), limits.drain_rps("nobody")) == (15.0, 0.0, 0.0)
    assert limits.published(one) == GatewayStats(
        "g1",
        0.0,
        {"free": TierStats(30.0, 0.0, 0.0, 0.6, 72.0, answered_rps=10.5)},
        80.0,
        capacity_evidence="fixed",
        capacity_confidence=1.0,
    )


def test_a_shadow_tier_keeps_its_base_limits() -> None:
    """Its allocation is computed, but reduces no limit; without the shadow the factor falls at once."""
    shadowed = Snapshot(2, (*TIERS[:2], tier("free", 3, 0.10, 100, shadow=True)), {}, {}, {"tiny": TINY}, ())
    limits = observed(look(worker(), enterprise=60.0, free=80.0), snapshot=shadowed)

    assert (limits.factor("free"), limits.allocated("free")) == (1.0, 20.0)
    assert [each.shadow for each in limits.current(shadowed).tiers] == [False, False, True]
    limits.current(SNAPSHOT)
    assert limits.factor("free") == 0.25


@pytest.mark.parametrize("pause_s", [1.0, 8.0])
def test_factors_fall_at_once_and_relax_slowly(pause_s: float) -> None:
    """The lowest tier falls first. It regains a quarter a second, but nothing for a time without observations."""
    limits = observed(look(worker(), enterprise=60.0, free=80.0))
    assert factors(limits) == [1.0, 1.0, 0.25]
    limits.observe(look(worker()), SNAPSHOT, pause_s)

    assert limits.factor("free") == pytest.approx(0.5)


def test_a_lost_gpu_reduces_the_lowest_tier_at_once() -> None:
    """With the observation that shows the loss; enterprise and paid keep their limits."""
    load = {"enterprise": 50.0, "paid": 20.0, "free": 80.0}
    limits = observed(look(worker(), worker("b"), **load))
    assert factors(limits) == [1.0, 1.0, 1.0]
    limits.observe(look(worker(), SICK, **load), SNAPSHOT, 0.25)

    assert factors(limits) == [1.0, 1.0, pytest.approx(0.125)]


def test_without_any_gpu_requests_wait_two_seconds() -> None:
    """Then there is no capacity, until a GPU is healthy again. Before the first observation one GPU is assumed."""
    limits = observed(look(worker()), look(SICK), every_s=1.0)
    assert limits.capacity_rps == pytest.approx(80.0)
    assert [limits.no_gpu(1.0 + WAITING_ROOM_S), limits.no_gpu(1.1 + WAITING_ROOM_S)] == [False, True]
    limits.observe(look(worker()), SNAPSHOT, 4.0)
    assert not limits.no_gpu(4.0)

    new = LiveLimits("default")
    new.lapse(SNAPSHOT, 0.0)
    assert [each.rate for each in new.current(SNAPSHOT).tiers] == [80.0, 80.0, 80.0]
    assert not new.no_gpu(100.0)


def test_a_lost_gpu_that_returns_to_a_backlog_has_its_rate() -> None:
    """The rate that it served spans its absence; the limits must not follow it."""
    back = msgspec.structs.replace(worker(), base_ms=50.0, seen_batch=32.0, served_rps=64.0)
    lost = msgspec.structs.replace(back, healthy=False)
    queues = {"free": TierDepth("free", 5, 4000.0)}
    looks = [Observation(0, queues, [each], [], 0, 1, 0, 0) for each in [back] * 4 + [lost] * 8 + [back] * 4]

    assert observed(*looks, snapshot=LEARNED).capacity_rps == pytest.approx(0.8 * 640)


SLOW = msgspec.structs.replace(SICK, status="slow")


@pytest.mark.parametrize(
    ("workers", "too_slow"),
    [
        ((SLOW, msgspec.structs.replace(SICK, status="failed")), True),
        ((SLOW, msgspec.structs.replace(SICK, status="down")), False),  # Its model process is being replaced.
        ((SLOW, worker()), False),
        ((SLOW, msgspec.structs.replace(SICK, status="paused", pausing=True)), False),
        ((msgspec.structs.replace(SLOW, age_ms=60_000.0),), False),  # It is lost.
        ((SICK,), False),
        ((), False),
    ],
)
def test_the_model_is_too_slow_only_while_no_worker_can_serve(workers: tuple[WorkerView, ...], too_slow: bool) -> None:
    """Requests of a slow worker go to the others; while Redis has only some of the workers, the state is kept."""
    limits = observed(look(*workers))
    assert limits.model_too_slow is too_slow

    down = look(SLOW, msgspec.structs.replace(SICK, status="down"))
    assert observed(down, down, every_s=2 * WAITING_ROOM_S).model_too_slow

    serving = observed(look(worker()))
    serving.emptied(2.0)
    serving.observe(look(SLOW), SNAPSHOT, 1.1)
    assert not serving.model_too_slow


def test_a_new_gateway_adopts_the_factors_of_the_others() -> None:
    """A restart does not skip the slow relaxation, and customers get the same limit everywhere."""
    old = GatewayStats("old", 0.0, {"free": TierStats(10.0, 0.0, 0.0, factor=0.3)})
    new = GatewayStats("new", 0.0, {"free": TierStats(0.0, 0.0, 0.0)})
    seen = Observation(0, {}, [worker()], [old, new], 0, 0, 0, 0)
    limits = observed(seen)
    assert limits.factor("free") == 0.3
    limits.observe(seen, SNAPSHOT, 0.4)
    assert limits.factor("free") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("seconds", "capacity", "gpus", "free", "drain"),
    [
        (HOLD_S, 160.0, 2, 1.0, 9.0),
        (HOLD_S + 0.1, 80.0, 1, 0.375, 0.0),  # Enterprise has 50 of 80, free demands 80.
        (60.0, 80.0, 1, 0.375, 0.0),
    ],
)
def test_a_stale_observation_holds_then_counts_one_gpu(
    seconds: float, capacity: float, gpus: int, free: float, drain: float
) -> None:
    """The safe direction for a lost input; the last demand is assumed to continue."""
    stats = {"enterprise": TierStats(50.0, 0.0, 0.0), "free": TierStats(80.0, 0.0, 0.0, answered_rps=9.0)}
    limits = observed(Observation(0, {}, [worker(), worker("b")], [GatewayStats("g1", 0.0, stats)], 0, 0, 0, 0))
    limits.lapse(SNAPSHOT, seconds)

    assert (limits.capacity_rps, limits.healthy_gpus, limits.drain_rps("free")) == (capacity, gpus, drain)
    assert (limits.factor("enterprise"), limits.factor("free")) == (1.0, pytest.approx(free))
    assert limits.current(SNAPSHOT).capacity_rps == capacity


def test_in_an_outage_the_directly_reached_gpus_count() -> None:
    """Of the GPUs that were healthy last, as many as direct mode reaches, at least one."""
    limits, counted = observed(look(worker(), worker("b"))), []
    for reached in (2, 1, 5, 0):
        limits.reached(reached)
        limits.lapse(SNAPSHOT, HOLD_S + 0.1)
        counted.append((limits.healthy_gpus, limits.capacity_rps))

    assert counted == [(2, 160.0), (1, 80.0), (2, 160.0), (1, 80.0)]


def test_cells_have_the_limits_of_a_single_queue() -> None:
    """Workers move between cells: the capacity and the demand of all of them count. A predicted wait uses the cell's part of the need, or of the workers."""
    here, there = look(free=100.0), look(worker("a"), worker("b"), worker("c"), SICK, free=200.0)
    waiting = msgspec.structs.replace(here, tiers={"free": TierDepth("free", 25, 10.0)})
    single = observed(look(worker("a"), worker("b"), worker("c"), free=300.0))
    one, other = LiveLimits("default"), LiveLimits("default")

    one.observe(waiting, SNAPSHOT, 0.0, combined([waiting, there]))
    other.observe(there, SNAPSHOT, 0.0, combined([there, waiting]))

    assert factors(one) == factors(other) == factors(single)
    assert not one.no_gpu(100.0)
    assert (one.capacity_rps, one.cell_capacity_rps, other.cell_capacity_rps) == (240.0, 0.0, 240.0)
    # 100/s and 25 waiting for half a second, against 200/s, where all workers are.
    waits = [limits.current(SNAPSHOT).capacity_rps for limits in (one, other, single)]
    assert waits == [pytest.approx(part * 240.0) for part in (150 / 350, 1.0, 1.0)]


@pytest.mark.parametrize("here", [1, 0])
def test_a_quiet_cell_predicts_waits_by_the_workers_that_it_has(here: int) -> None:
    """At least one, which comes for the first request.

    Regression: by its part of the need, one waiting request of enterprise was a wait of seconds, and the next one got queue_full.
    """
    quiet, flooded = look(*[worker("a")] * here, enterprise=3.0), look(*map(worker, ("b", "c")[here:]), free=600.0)
    limits = LiveLimits("default")

    limits.observe(quiet, SNAPSHOT, 0.0, combined([quiet, flooded]))

    assert limits.current(SNAPSHOT).capacity_rps == pytest.approx(80.0)


def test_a_cell_has_its_part_of_the_capacity() -> None:
    """All of free is here, and half of enterprise, so 88 of 160/s: the tenth of free, and half of what is left for enterprise.

    Regression: each cell had the rate of the whole pool, and accepted requests that then waited until their deadline.
    """
    here, there = look(worker("a"), enterprise=100.0, free=100.0), look(worker("b"), enterprise=100.0)
    limits, single = LiveLimits("default"), observed(combined([here, there]))

    limits.observe(here, SNAPSHOT, 0.0, combined([here, there]))

    enterprise, paid, free = limits.current(SNAPSHOT).tiers
    assert limits.current(SNAPSHOT).capacity_rps == pytest.approx(88.0)
    assert (free.share, free.rate) == (pytest.approx(16 / 88), pytest.approx(16.0))
    assert (enterprise.share, enterprise.rate) == (pytest.approx(4 / 88), pytest.approx(72.0))
    assert paid.share == 0.25  # No request of it is known.
    assert [each.burst for each in (enterprise, paid, free)] == [each.burst for each in single.current(SNAPSHOT).tiers]


def test_a_worker_that_has_moved_counts_in_the_cell_of_its_latest_heartbeat() -> None:
    """For a moment both cells know it."""
    old = msgspec.structs.replace(worker("a", healthy=False), age_ms=900.0)

    assert combined([look(old), look(worker("a"))]).healthy_gpus == 1
    assert combined([look(worker("a")), look(old)]).healthy_gpus == 1


@pytest.mark.parametrize(
    ("now", "count"),
    [
        ([], 2),  # deregistered
        ([msgspec.structs.replace(worker("a", healthy=False), status="draining"), worker("b")], 2),
        ([msgspec.structs.replace(worker("a", healthy=False), status="failed"), worker("b")], 1),
        ([worker("a"), worker("b")], 2),
    ],
)
def test_a_worker_that_has_left_a_cell_counts_until_its_next_heartbeat(now: list[WorkerView], count: int) -> None:
    """The last observation of the cell that it serves then may be older, and limits would fall for a quarter of a second."""
    before, seen = look(worker("a"), worker("b")), look(*now)

    assert with_moving(seen, before).healthy_gpus == count
    assert combined([with_moving(seen, before), look(worker("c"))]).healthy_gpus == count + 1
    assert with_moving(seen, None) is seen
