"""Live limits: observations and demand in, tier limits, factors and what is published out."""

import msgspec
import pytest

from gateway.limits.capacity import HOLD_S, WAITING_ROOM_S, LiveLimits, healthy_gpus, pool_load
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ratelimit.capacity import CapacityEvidence
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, TierStats, WorkerView

TINY = Model("tiny", "default", 32, None, 40, 3000, 100.0, 0.8, 0, True, rps_per_gpu_fixed=True)
MEASURED = msgspec.structs.replace(TINY, rps_per_gpu_fixed=False)


def tier(name: str, priority: int, share: float, shed_depth: int | None = None, *, shadow: bool = False) -> Tier:
    return Tier(name, priority, share, (10.0, 20.0, 8, None), 500, 2000, shed_depth, None, shadow)


TIERS = (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25, 500), tier("free", 3, 0.10, 100))
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())
LEARNT = Snapshot(1, TIERS, {}, {}, {"tiny": MEASURED}, ())


def worker(name: str, rps: float = 0.0, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.5, 1, 10.0, healthy, rps, 50.0, "simulated", "v1")


def observed(workers: list[WorkerView], **demand: float) -> Observation:
    stats = {name: TierStats(rate, 0.0, 0.0) for name, rate in demand.items()}
    return Observation(0, {}, workers, [GatewayStats("g1", 0.0, stats)], 0, 0, 0, 0)


def test_capacity_is_what_the_healthy_gpus_do() -> None:
    """Measured rates count; of GPUs that were not measured, as their median; sick ones not at all."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a", 200.0), worker("b")]), LEARNT, 0.0)
    assert limits.capacity_rps == pytest.approx(320.0)
    limits.observe(observed([worker("a", 200.0), worker("b", healthy=False)]), LEARNT, 0.25)
    assert limits.capacity_rps == pytest.approx(160.0)


def test_before_anything_was_measured_no_limit_is_built_on_the_guess() -> None:
    """Every tier has its base limits, whatever is asked for; waits are predicted by ten times the guess."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a"), worker("b")], enterprise=1e4, free=1e5), LEARNT, 0.0)
    current = limits.current(LEARNT)

    assert (limits.capacity_rps, limits.estimate.evidence) == (160.0, CapacityEvidence.PRIOR)
    assert [limits.factor(name) for name in ("enterprise", "paid", "free")] == [1.0, 1.0, 1.0]
    assert min(each.rate for each in current.tiers) > 1e6
    assert current.capacity_rps == pytest.approx(1600.0)


def test_capacity_that_is_learnt_lifts_the_limits_at_once() -> None:
    """They relax slowly only where capacity may go again: what turns out to have been there all the time is given out."""
    small = msgspec.structs.replace(worker("a"), base_ms=10.0, item_ms=10.0, seen_batch=4.0, fresh_batch=4.0)
    full = msgspec.structs.replace(worker("a"), base_ms=20.0, item_ms=0.0, seen_batch=32.0, fresh_batch=32.0)
    limits = LiveLimits("default")
    limits.observe(observed([small], free=800.0), LEARNT, 0.0)
    assert limits.factor("free") < 0.1
    limits.observe(observed([full], free=800.0), LEARNT, 0.25)

    assert limits.factor("free") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("oldest_ms", "leased", "backlogged"),
    [(99.0, 1, False), (101.0, 1, True), (101.0, 0, False)],
    ids=["a run explains the wait", "two runs do not", "the GPU has nothing to do"],
)
def test_a_backlog_is_a_wait_behind_busy_gpus(oldest_ms: float, leased: int, backlogged: bool) -> None:
    """Longer than two runs, while every GPU has work."""
    gpu = worker("a", 640.0)
    seen = Observation(0, {"free": TierDepth("free", 5, oldest_ms)}, [gpu], [], 0, leased, 0, 0)

    assert pool_load(seen, healthy_gpus(seen), LEARNT, {}) == (backlogged, False, 50.0)


def test_smaller_batches_in_sql_mean_less_capacity() -> None:
    """What was measured counts at the size that batches are formed of now, not at the one that a worker could take."""
    measured = msgspec.structs.replace(worker("a", 640.0), base_ms=50.0, seen_batch=32.0)
    limits = LiveLimits("default")
    limits.observe(observed([measured]), LEARNT, 0.0)
    assert limits.capacity_rps == pytest.approx(0.8 * 640)

    eight = msgspec.structs.replace(LEARNT, models={"tiny": msgspec.structs.replace(MEASURED, max_batch_size=8)})
    limits.observe(observed([measured]), eight, 0.25)

    assert limits.capacity_rps == pytest.approx(0.8 * 160)


def test_a_calm_pool_lets_every_tier_use_what_is_free() -> None:
    """Without contention no customer is lowered, and each tier may take all that the others do not ask for."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")], free=10.0), SNAPSHOT, 0.0)
    current = limits.current(SNAPSHOT)

    assert [limits.factor(name) for name in ("enterprise", "paid", "free")] == [1.0, 1.0, 1.0]
    assert [round(each.rate) for each in current.tiers] == [
        72,
        72,
        80,
    ]  # 8 of 80 are guaranteed to free, who uses them.
    assert [each.burst for each in current.tiers] == [each.rate for each in current.tiers]
    assert [each.ahead for each in current.tiers] == [
        ["enterprise"], ["enterprise", "paid"], ["enterprise", "paid", "free"],
    ]  # fmt: skip
    assert [each.shed_depth for each in current.tiers] == [-1, 500, 100]
    assert [(each.share, each.shadow) for each in current.tiers] == [(0.05, False), (0.25, False), (0.10, False)]
    assert current.capacity_rps == pytest.approx(80.0)


def test_an_idle_tier_is_not_shut_out_by_a_flood_below_it() -> None:
    """Its bucket goes on filling at what it could have, however much free asks for."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")], free=1e6), SNAPSHOT, 0.0)
    rates = {each.name: each.rate for each in limits.current(SNAPSHOT).tiers}

    assert rates == pytest.approx({"enterprise": 72.0, "paid": 72.0, "free": 80.0})
    assert rates == {name: limits.ceiling(name) for name in rates}
    assert {name: limits.allocated(name) for name in rates} == {"enterprise": 0.0, "paid": 0.0, "free": 80.0}


def test_what_is_explained_is_what_is_in_force() -> None:
    """Demand and drain over all gateways, allocation, capacity and the GPUs that it comes from."""
    one = GatewayStats("g1", 0.0, {"free": TierStats(30.0, 0.0, 0.0, answered_rps=10.5)})
    other = GatewayStats("g2", 0.0, {"free": TierStats(90.0, 0.0, 0.0, answered_rps=4.5), "paid": TierStats(8.0, 0, 0)})
    limits = LiveLimits("default")
    workers = [worker("a"), worker("b", healthy=False)]
    limits.observe(Observation(0, {}, workers, [one, other], 0, 0, 0, 0), SNAPSHOT, 0.0)

    assert (limits.capacity_rps, limits.healthy_gpus) == (80.0, 1)
    assert (limits.demand("free"), limits.allocated("free"), limits.factor("free")) == (120.0, 72.0, 0.6)
    assert (limits.demand("paid"), limits.allocated("paid"), limits.factor("paid")) == (8.0, 8.0, 1.0)
    assert (limits.drain_rps("free"), limits.drain_rps("paid"), limits.drain_rps("nobody")) == (15.0, 0.0, 0.0)


def test_what_is_published_tells_what_is_shared_out() -> None:
    """The meter's figures stay as they are."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")], free=100.0, enterprise=10.0), SNAPSHOT, 0.0)
    metered = GatewayStats("g1", 12.0, {"free": TierStats(100.0, 1.0, 2.0, arrived_rps=3.0)})

    assert limits.published(metered) == GatewayStats(
        "g1",
        12.0,
        {"free": TierStats(100.0, 1.0, 2.0, 0.7, 70.0, arrived_rps=3.0)},
        80.0,
        capacity_evidence="fixed",
        capacity_confidence=1.0,
    )


def test_a_tier_in_shadow_announces_its_base_limits() -> None:
    """Its part is reckoned with and told, but lowers nobody's limits; taken out of shadow, it falls at once."""
    free = tier("free", 3, 0.10, 100, shadow=True)
    shadowed = Snapshot(2, (*TIERS[:2], free), {}, {}, {"tiny": TINY}, ())
    flood = observed([worker("a")], enterprise=60.0, free=80.0)
    limits = LiveLimits("default")
    limits.observe(flood, shadowed, 0.0)

    assert (limits.factor("free"), limits.allocated("free")) == (1.0, 20.0)
    assert [each.shadow for each in limits.current(shadowed).tiers] == [False, False, True]
    limits.current(SNAPSHOT)
    assert limits.factor("free") == 0.25


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


def test_one_lost_gpu_of_two_lowers_free_and_not_enterprise() -> None:
    """With the look that shows it."""
    limits = LiveLimits("default")
    load = {"enterprise": 50.0, "paid": 20.0, "free": 80.0}
    limits.observe(observed([worker("a"), worker("b")], **load), SNAPSHOT, 0.0)
    assert [limits.factor(name) for name in load] == [1.0, 1.0, 1.0]
    limits.observe(observed([worker("a"), worker("b", healthy=False)], **load), SNAPSHOT, 0.25)

    assert [limits.factor(name) for name in load] == [1.0, 1.0, pytest.approx(0.125)]


def test_limits_do_not_relax_for_time_in_which_nobody_looked() -> None:
    """Redis was away for eight seconds: the way back begins now, and is as slow as ever."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")], enterprise=60.0, free=80.0), SNAPSHOT, 0.0)
    limits.observe(observed([worker("a")]), SNAPSHOT, 8.0)

    assert limits.factor("free") == pytest.approx(0.5)


def test_a_gateway_that_begins_takes_up_the_limits_where_the_others_are() -> None:
    """A restart is no way around a slow return, nor do customers see two limits."""
    stats = {"free": TierStats(10.0, 0.0, 0.0, factor=0.3)}
    begun = {"free": TierStats(0.0, 0.0, 0.0)}
    seen = Observation(
        0, {}, [worker("a")], [GatewayStats("old", 0.0, stats), GatewayStats("new", 0.0, begun)], 0, 0, 0, 0
    )
    limits = LiveLimits("default")
    limits.observe(seen, SNAPSHOT, 0.0)
    assert limits.factor("free") == 0.3
    limits.observe(seen, SNAPSHOT, 0.4)
    assert limits.factor("free") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("seconds", "capacity", "gpus", "free", "drain"),
    [
        (0.5, 160.0, 2, 1.0, 9.0),
        (HOLD_S, 160.0, 2, 1.0, 9.0),
        (HOLD_S + 0.1, 80.0, 1, 0.375, 0.0),  # Enterprise has 50 of 80, free asks for 80.
        (60.0, 80.0, 1, 0.375, 0.0),
    ],
)
def test_a_stale_look_holds_then_falls_to_one_gpu(
    seconds: float, capacity: float, gpus: int, free: float, drain: float
) -> None:
    """The declared direction of a lost control input; what was asked for is taken to be asked for still."""
    stats = {"enterprise": TierStats(50.0, 0.0, 0.0), "free": TierStats(80.0, 0.0, 0.0, answered_rps=9.0)}
    limits = LiveLimits("default")
    seen = Observation(0, {}, [worker("a"), worker("b")], [GatewayStats("g1", 0.0, stats)], 0, 0, 0, 0)
    limits.observe(seen, SNAPSHOT, 0.0)
    limits.lapse(SNAPSHOT, seconds)

    assert (limits.capacity_rps, limits.healthy_gpus, limits.drain_rps("free")) == (capacity, gpus, drain)
    assert (limits.factor("enterprise"), limits.factor("free")) == (1.0, pytest.approx(free))
    assert limits.current(SNAPSHOT).capacity_rps == capacity


def test_without_a_look_the_gpus_that_are_called_directly_count() -> None:
    """However long Redis is away: of those that were healthy last, as many as this gateway reaches past it, at least one."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a"), worker("b")]), SNAPSHOT, 0.0)
    seen = []
    for reached in (2, 1, 5, 0):
        limits.reached(reached)
        limits.lapse(SNAPSHOT, HOLD_S + 0.1)
        seen.append((limits.healthy_gpus, limits.capacity_rps))

    assert seen == [(2, 160.0), (1, 80.0), (2, 160.0), (1, 80.0)]


def test_before_the_first_look_one_gpu_is_counted_on() -> None:
    """No tier is shut out, and none has more than that."""
    limits = LiveLimits("default")
    limits.lapse(SNAPSHOT, 0.0)

    assert [each.rate for each in limits.current(SNAPSHOT).tiers] == [80.0, 80.0, 80.0]
    assert not limits.no_gpu(100.0)


def test_a_changed_catalog_is_obeyed_before_the_next_look() -> None:
    """A tier that was just added can be admitted at once."""
    limits = LiveLimits("default")
    limits.observe(observed([worker("a")]), SNAPSHOT, 0.0)
    wider = Snapshot(2, (*TIERS, tier("trial", 4, 0.0)), {}, {}, {"tiny": TINY}, ())

    assert [each.name for each in limits.current(wider).tiers] == ["enterprise", "paid", "free", "trial"]
