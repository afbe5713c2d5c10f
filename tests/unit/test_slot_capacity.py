"""The capacity of engines with slots: use of slots by literal tables, and the estimator with simulated engines."""

import pytest

from gateway.limits.capacity import LiveLimits, healthy_gpus, pool_load
from gpu_pool.worker.slot_usage import SlotUsage
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ratelimit.capacity import CapacityEvidence, GpuRate, PoolLoad, PoolRate
from ratelimit.quotas import Meter
from ratelimit.slot_capacity import SlotEstimator
from scheduler.protocol.pool_view import Observation, TierDepth, WorkerView
from slot_simulation import Engine, Lengths, SlotSimulation, lognormal, mixed

TIER = Tier("free", 1, 0.1, (10.0, 20.0, 8, None), 500, 2000, None, None)
LEARNED = Snapshot(1, (TIER,), {}, {}, {"m": Model("m", "default", 32, None, 40, 100.0, 0.8, 0, True)}, ())


def observed(seen: Observation) -> LiveLimits:
    """Limits after an observation."""
    limits = LiveLimits("default")
    limits.observe(seen, LEARNED, 0.0)
    return limits


LENGTHS: dict[str, Lengths] = {
    "equal": lambda _: 80,
    "lognormal": lognormal(80, 1.0),
    "5 and 2,000 tokens": mixed(5, 2000, 0.1),
}


def slotted(slots: int = 64, running: float = 64.0, mean_ms: float = 1600.0, in_flight: int = 64) -> WorkerView:
    """A worker with slots."""
    return WorkerView(
        "a",
        "busy",
        running / slots,
        in_flight,
        age_ms=10.0,
        healthy=True,
        rps=0.0,
        service_p95_ms=4000.0,
        backend="openai",
        model_version="v1",
        base_ms=mean_ms,
        seen_batch=running,
        width=slots,
        fresh_batch=running,
        slots=slots,
    )


def test_the_part_of_a_request_is_its_share_of_the_engine_over_its_life() -> None:
    """One runs alone for 1 s, two for 2 s: 1 + 2/2 and 2/2 seconds. The parts sum up to the time in which any ran."""
    usage = SlotUsage()
    first = usage.start(10.0)
    second = usage.start(11.0)
    costs = [usage.end(13.0, first, 4), usage.end(13.0, second, 4)]

    assert costs == pytest.approx([2000.0, 1000.0])
    assert usage.mean_ms(13.0) == pytest.approx(2500.0)
    assert usage.mean_running(13.0) == pytest.approx(5 / 3)
    assert usage.mean_ms(20.0) == pytest.approx(2500.0)  # Idle time changes no mean,
    assert usage.recent_running(20.0) < usage.recent_running(13.0)  # but what runs now.


def test_a_slower_engine_is_seen_before_a_request_has_ended() -> None:
    """Requests that still run count in the mean time."""
    usage = SlotUsage()
    for number in range(20):
        usage.end(number + 1.0, usage.start(float(number)), 1)
    usage.start(20.0)

    assert usage.mean_ms(20.0) == pytest.approx(1000.0)
    assert usage.mean_ms(60.0) > 2500.0
    assert usage.served_rps() == pytest.approx(1.0)


def test_slots_by_littles_law() -> None:
    """Slots divided by the mean time, whatever the size of a batch; a GPU that was not measured counts as the median."""
    measured, new = GpuRate(1600.0, 0.0, 40.0, 64, slots=64), GpuRate(slots=4)

    assert PoolRate.of([measured], 32).full_rps == PoolRate.of([measured], 1).most_rps == pytest.approx(40.0)
    assert PoolRate.of([measured, new], 1).full_rps == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("in_flight", "oldest_ms", "backlogged"), [(64, 120.0, True), (64, 90.0, False), (50, 5000.0, False)]
)
def test_a_backlog_is_a_wait_behind_full_slots(in_flight: int, oldest_ms: float, backlogged: bool) -> None:
    """Longer than until the next slot is free, not than a request takes. Batches are not counted."""
    seen = Observation(0, {"free": TierDepth("free", 5, oldest_ms)}, [slotted(in_flight=in_flight)], [], 0, 999, 0, 0)

    assert pool_load(seen, healthy_gpus(seen), LEARNED, {}) == (backlogged, False, 25.0)


def test_a_mean_request_is_charged_and_few_wait_outside_of_the_fair_order() -> None:
    """Metered quotas charge the mean time divided by the mean running; a tier queue has a place for 16 slots."""
    seen = Observation(0, {}, [slotted()], [], 0, 0, 0, 0)
    limits = observed(seen)

    assert limits.meter("m") == Meter(25_000)
    assert {tier.places for tier in limits.current(LEARNED).tiers} == {4}
    assert limits.capacity_rps == pytest.approx(40.0)  # `target_utilization` reduces no limit.
    one = Observation(0, {}, [slotted(2, 2.0)], [], 0, 0, 0, 0)
    assert {tier.places for tier in observed(one).current(LEARNED).tiers} == {1}


CALM, BACKLOG = PoolLoad(False, False), PoolLoad(True, True, 25.0)


def rate(slots: int, running: float) -> GpuRate:
    return GpuRate(1600.0, 0.0, running, slots, 0.0, running, slots)


def test_an_engine_with_free_slots_sets_no_limit() -> None:
    """Limits apply from a backlog of three seconds in full slots until a quarter of them is free."""
    estimator = SlotEstimator()
    assert estimator.look([GpuRate(slots=4)], 20.0, CALM, 0.0).evidence is CapacityEvidence.PRIOR

    def binding(running: float, load: PoolLoad, seconds: range) -> list[bool]:
        return [estimator.look([rate(64, running)], 20.0, load, float(second)).binding for second in seconds]

    assert binding(20.0, CALM, range(1, 5)) == [False] * 4
    assert binding(64.0, BACKLOG, range(5, 10)) == [False, False, False, True, True]
    assert binding(50.0, CALM, range(10, 14)) == [True] * 4
    assert binding(40.0, CALM, range(14, 17)) == [True, False, False]


def test_slots_that_grow_set_no_limit() -> None:
    """They are being learnt, and the backlog waits for more of them. A tenth more or less is no growth."""
    estimator, slots = SlotEstimator(), [2, 4, 8, 16, 32, 64, *([64, 70, 58] * 4)]
    found = [estimator.look([rate(n, n)], 20.0, BACKLOG, float(at)).binding for at, n in enumerate(slots)]

    assert not any(found[:8])
    assert all(found[12:])


def test_a_lost_engine_halves_the_capacity_at_once() -> None:
    """The speed of a slot is the mean, not the sum over engines."""
    estimator = SlotEstimator()
    both = [estimator.look([rate(64, 60.0)] * 2, 20.0, CALM, second / 4).rps for second in range(40)]

    assert both[-1] == pytest.approx(80.0)
    assert estimator.look([rate(64, 60.0)], 20.0, CALM, 10.0).rps == pytest.approx(40.0)


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_nothing_is_refused_while_slots_are_free(lengths: str, load: float) -> None:
    """At constant load below the capacity, from a cold start."""
    engine = Engine(LENGTHS[lengths])
    rps = load * engine.true_rps()
    seconds = SlotSimulation([engine], lambda _: rps, prior_rps=0.1 * rps).run(60)

    assert sum(second.refused for second in seconds) <= 0.005 * sum(second.offered for second in seconds)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("lengths", ["equal", "lognormal"])
def test_twice_the_capacity_keeps_the_slots_full(lengths: str, engines: int) -> None:
    """From the tenth second on 97 % of the capacity is served, and the estimate varies by less than 15 %."""
    all_of_them = [Engine(LENGTHS[lengths], seed=seed) for seed in range(engines)]
    true = sum(engine.true_rps() for engine in all_of_them)
    settled = SlotSimulation(all_of_them, lambda _: 2 * true).run(60)[10:]
    estimates = [second.capacity_rps for second in settled]

    assert sum(second.served for second in settled) >= 0.97 * true * len(settled) * 0.97  # Sampled lengths vary.
    assert max(estimates) < 1.15 * min(estimates)
    assert estimates[-1] == pytest.approx(true, rel=0.15)
    assert sum(second.refused for second in settled) > 0.4 * sum(second.offered for second in settled)


def test_answers_of_5_and_2000_tokens_do_not_make_the_capacity_wrong() -> None:
    """At twice the capacity slots are full. After five minutes the estimate follows waves of long answers, which all began together."""
    engine = Engine(LENGTHS["5 and 2,000 tokens"])
    true = engine.true_rps()
    seconds = SlotSimulation([engine], lambda _: 2 * true).run(420)
    estimates = [second.capacity_rps for second in seconds[300:]]

    assert sum(second.served for second in seconds[60:]) >= 0.9 * true * 360
    assert min(estimates) > 0.7 * true
    assert max(estimates) < 1.7 * true


@pytest.mark.parametrize(("before_ms", "after_ms"), [(12.0, 70.0), (70.0, 12.0)], ids=["slower", "faster"])
@pytest.mark.parametrize("load", [0.5, 2.0])
def test_an_engine_that_changes_its_speed_fourfold_is_followed(before_ms: float, after_ms: float, load: float) -> None:
    """Within ten seconds nothing is refused at half of the new capacity, and it is used completely at twice the load."""
    engine = Engine(LENGTHS["lognormal"], step_ms=lambda now: before_ms if now < 20 else after_ms)
    true = engine.true_rps(30.0)
    seconds = SlotSimulation([engine], lambda _: load * true).run(50)[30:]

    if load < 1:
        assert not sum(second.refused for second in seconds)
    else:
        assert sum(second.served for second in seconds) >= 0.9 * true * len(seconds)
        assert seconds[0].capacity_rps == pytest.approx(true, rel=0.3)


def test_a_step_of_the_load_is_limited_within_seconds() -> None:
    """From 30 % to twice the capacity: requests that wait are as many as fit their time, and no slot is free."""
    engine = Engine(LENGTHS["lognormal"])
    true = engine.true_rps()
    seconds = SlotSimulation([engine], lambda now: true * (0.3 if now < 20 else 2.0)).run(50)

    assert not sum(second.refused for second in seconds[:20])
    assert sum(second.refused for second in seconds[26:]) > 0.4 * sum(second.offered for second in seconds[26:])
    assert sum(second.served for second in seconds[24:]) >= 0.94 * true * 26


def test_costs_sum_up_to_the_time_of_the_engine() -> None:
    """However unequal the requests are, nothing is charged twice or not at all."""
    engine = Engine(LENGTHS["5 and 2,000 tokens"])
    rps = engine.true_rps()
    SlotSimulation([engine], lambda _: rps).run(60)
    engine.advance(1000.0)  # All end.

    assert engine.size == 0
    assert sum(engine.costs_ms) == pytest.approx(1000 * engine.usage.busy_s)


def test_a_pool_of_batches_is_not_changed() -> None:
    """Without slots the estimate is that of batches."""
    batch = WorkerView(
        "a", "busy", 1.0, 1, 0.0, 50.0, "simulated", "1", age_ms=0.0, healthy=True, base_ms=50.0, seen_batch=32.0
    )
    limits = observed(Observation(0, {}, [batch], [], 0, 0, 0, 0))

    assert limits.capacity_rps == pytest.approx(0.8 * 640)
    assert {tier.places for tier in limits.current(LEARNED).tiers} == {32}
