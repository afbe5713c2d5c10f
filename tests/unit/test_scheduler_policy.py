"""When a batch leaves, and with which requests, by literal tables."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import BACKGROUND_SHARE
from scheduler.batching.policy import decide, plan, ready_limit
from scheduler.batching.service import Service
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.batching.tier_shares import choose
from scheduler.protocol.wake_condition import FIRST_IDLE, NEVER, WakeCondition

TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))


def policy(size: int = 32, window_ms: float = 40.0) -> BatchPolicy:
    return BatchPolicy(size, window_ms, 4, 1000.0, TIERS, BACKGROUND_SHARE)


def waiting(enterprise: int = 0, paid: int = 0, free: int = 0, oldest_ms: float = 1.0) -> dict[str, TierQueue]:
    return {
        name: TierQueue(depth, oldest_ms if depth else 0.0)
        for name, depth in (("enterprise", enterprise), ("paid", paid), ("free", free))
    }


MEASURED = Service(base_ms=50.0, item_ms=0.0)


@pytest.mark.parametrize(
    ("free", "oldest_ms", "rate", "workers", "ready", "leased", "wait_ms", "condition"),
    [
        # no condition: a batch leaves now
        (0, 0.0, 0.0, 4, 0, 0, None, WakeCondition(1)),  # nothing is queued
        (0, 0.0, 1000.0, 34, 0, 9, 16.0, WakeCondition(8)),  # leaves at eight requests, or at the end of the window
        (32, 1.0, 900.0, 4, 0, 0, None, None),  # full: leaves at once
        (32, 1.0, 900.0, 4, 0, 4, None, None),  # full, all busy: one may be ready
        (32, 1.0, 900.0, 4, 1, 5, None, WakeCondition(0, 0)),  # full, all busy, one ready: late binding
        (99, 1.0, 900.0, 34, 9, 43, None, WakeCondition(0, 4)),  # at the limit of ready batches: at half of it
        (99, 1.0, 900.0, 0, 0, 0, None, WakeCondition(0)),  # no worker
        (1, 1.0, 0.0, 4, 0, 1, None, None),  # no other request is expected
        (1, 1.0, 100.0, 34, 0, 5, None, None),  # a worker is idle for each of them
        (1, 0.0, 100.0, 2, 0, 1, 40.0, WakeCondition(2, FIRST_IDLE)),  # single requests: 5 s of runs per second
        (1, 31.0, 100.0, 2, 0, 1, None, None),  # less than one more is expected in the remaining 9 ms
        (1, 1.0, 1000.0, 34, 0, 9, 15.0, WakeCondition(8, FIRST_IDLE)),  # 8 ms of arrivals, in twice that time
        (8, 5.0, 1000.0, 34, 0, 9, None, None),  # the size is reached
        (5, 16.0, 1000.0, 34, 0, 9, None, None),  # the window is over
        (5, 1.0, 1000.0, 34, 0, 0, None, None),  # nothing runs, so no client waits that could send more
        (9, 55.0, 900.0, 4, 0, 4, None, WakeCondition(32, FIRST_IDLE)),  # all workers are busy: waiting costs nothing
        (9, 55.0, 900.0, 4, 1, 4, None, WakeCondition(0, 0)),  # the same, and one is ready
        (32, 1.0, 900.0, 4, 1, 1, None, None),  # idle workers: the batch that was just formed will be claimed
        (32, 1.0, 900.0, 4, 3, 3, None, WakeCondition(0, 0)),  # workers count as idle but claim nothing
    ],
)
def test_when_a_batch_leaves(
    free: int,
    oldest_ms: float,
    rate: float,
    workers: int,
    ready: int,
    leased: int,
    wait_ms: float | None,
    condition: WakeCondition | None,
) -> None:
    """A full batch at once, a partial one for an idle worker if waiting is not worthwhile, none beyond the limit."""
    snapshot = PoolSnapshot(waiting(free=free, oldest_ms=oldest_ms), ready, leased, workers, rate, MEASURED)

    decision = decide(snapshot, policy(), {})

    assert bool(decision.picks) is (condition is None)
    assert decision.wait_ms == wait_ms
    assert decision.condition == (condition or NEVER)


@pytest.mark.parametrize(
    ("workers", "limit", "with_distance"), [(0, 1, 1), (1, 1, 1), (4, 1, 1), (5, 2, 1), (34, 9, 5), (200, 50, 25)]
)
def test_ready_limit(workers: int, limit: int, with_distance: int) -> None:
    """One ready batch per four workers, or per eight if batches have a distance; at least one."""
    assert (ready_limit(workers, 4, 0.0), ready_limit(workers, 4, 6.25)) == (limit, with_distance)


def test_an_idle_worker_raises_the_ready_limit() -> None:
    """One more batch may be ready while a worker is idle."""
    snapshots = [PoolSnapshot(waiting(free=99), 0, leased, 34, 900.0) for leased in (34, 33)]

    assert [decide(snapshot, policy(), {}).ready_limit for snapshot in snapshots] == [9, 10]


@pytest.mark.parametrize(
    ("queues", "credit", "picks"),
    [
        (waiting(enterprise=50, paid=50, free=50), {}, [("enterprise", 21), ("paid", 8), ("free", 3)]),
        (waiting(enterprise=50), {}, [("enterprise", 32)]),  # no other demand
        (waiting(free=50), {}, [("free", 32)]),  # work-conserving
        (waiting(enterprise=2, free=50), {}, [("enterprise", 2), ("free", 30)]),
        (waiting(enterprise=50, free=50), {"free": 0.9}, [("enterprise", 28), ("free", 4)]),  # credit 0.9 + 3.2
        (waiting(enterprise=50, paid=50, free=50, oldest_ms=1500), {}, [("enterprise", 21), ("paid", 8), ("free", 3)]),
    ],
)
def test_the_requests_of_a_batch(
    queues: Mapping[str, TierQueue], credit: Mapping[str, float], picks: list[tuple[str, int]]
) -> None:
    """Guarantees first, the rest strictly by priority; a guaranteed share does not grow with age."""
    assert choose(queues, policy(), credit)[0] == picks


def test_a_tier_without_a_guarantee_is_served_when_it_has_waited_long() -> None:
    """It gets 5 % after a second, and nothing before."""
    tiers = (TierPolicy("enterprise", 1, 0.5), TierPolicy("free", 2, 0.0))
    bare = BatchPolicy(8, 40.0, 4, 1000.0, tiers, BACKGROUND_SHARE)
    served = {}
    for age_ms in (999.0, 1000.0):
        credit: Mapping[str, float] = {}
        served[age_ms] = 0
        for _ in range(100):
            picks, credit = choose(waiting(enterprise=50, free=50, oldest_ms=age_ms), bare, credit)
            served[age_ms] += dict(picks).get("free", 0)

    assert served == {999.0: 0, 1000.0: 40}  # 100 batches x 8 places x 0.05


@pytest.mark.parametrize("size", [1, 4, 8, 32])
def test_old_requests_of_lower_tiers_do_not_displace_the_highest_tier(size: int) -> None:
    """Enterprise gets the capacity that is not guaranteed to other tiers."""
    credit: Mapping[str, float] = {}
    places = 0
    for _ in range(400):
        picks, credit = choose(waiting(enterprise=90, paid=500, free=500, oldest_ms=1900), policy(size=size), credit)
        places += dict(picks).get("enterprise", 0)

    assert places / (400 * size) >= 1 - 0.25 - 0.10 - 0.01


def test_a_small_share_accumulates_as_credit() -> None:
    """With batches of 8, a share of 0.10 is less than one place per batch."""
    credit: Mapping[str, float] = {}
    places = 0
    for _ in range(100):
        picks, credit = choose(waiting(enterprise=50, free=50), policy(size=8), credit)
        places += dict(picks).get("free", 0)

    assert places == 80  # 100 batches x 8 places x 0.10


def test_shares_of_a_cell() -> None:
    """They replace those of the tiers that they name."""
    changed = policy().with_shares({"free": 0.4, "background": 0.2})

    assert [tier.guaranteed_share for tier in changed.tiers] == [0.05, 0.25, 0.4]
    assert policy().with_shares({}) == policy()


DEPTHS = st.integers(0, 80)
AGES = st.floats(0, 3000)


@given(DEPTHS, DEPTHS, DEPTHS, AGES, st.integers(1, 64), st.floats(0, 40))
def test_no_place_is_left_empty(e: int, p: int, f: int, age: float, size: int, owed: float) -> None:
    """While requests are queued; no request is picked twice, and the credit is bounded."""
    queues = waiting(e, p, f, age)

    picks, credit = choose(queues, policy(size), {"free": owed})

    assert sum(n for _, n in picks) == min(size, e + p + f)
    assert all(0 < n <= queues[name].depth for name, n in picks)
    assert all(0 <= left <= size for left in credit.values())


@given(DEPTHS.filter(bool), DEPTHS.filter(bool), st.integers(8, 64))
def test_a_lower_tier_gets_at_most_its_guarantee(e: int, f: int, size: int) -> None:
    """While requests of a higher tier are queued."""
    picks = dict(choose(waiting(enterprise=e, free=f), policy(size), {})[0])

    if picks.get("enterprise", 0) < e:
        assert picks.get("free", 0) <= 0.10 * size


@pytest.mark.parametrize(
    ("free", "workers", "ready", "leased", "sizes"),
    [
        (31, 4, 0, 1, []),  # less than a batch, and more are expected
        (32, 4, 0, 0, [32]),
        (100, 34, 0, 8, [32, 32, 32]),  # four requests are left for the next batch
        (100, 4, 0, 0, [32, 32]),  # the limit: one ready, and one for an idle worker
        (100, 4, 0, 4, [32]),  # all busy
        (100, 4, 1, 5, []),
        (1000, 200, 0, 0, [32] * 8),  # a limited number, since more urgent requests may arrive
    ],
)
def test_a_burst_leaves_in_several_batches(free: int, workers: int, ready: int, leased: int, sizes: list[int]) -> None:
    """Up to the limit in one plan, without a partial batch that may still grow."""
    snapshot = PoolSnapshot(waiting(free=free), ready, leased, workers, 5000.0, MEASURED)
    planned = plan(snapshot, policy(), {})

    assert [sum(count for _, count in decision.picks) for decision in planned if decision.picks] == sizes


@pytest.mark.parametrize(
    ("queues", "background", "leased", "service", "picks"),
    [
        # a worker is idle, and no interactive request waits: a batch of background work, highest tier first
        (waiting(), {"paid": 9, "free": 99}, 3, MEASURED, [("paid.background", 9), ("free.background", 23)]),
        (waiting(), {"free": 99}, 4, MEASURED, []),  # no worker is idle: nothing is formed ahead
        (waiting(free=1), {"free": 99}, 4, MEASURED, []),
        # an interactive batch: the share, and all places that are left, because they take no time
        (waiting(free=2), {"free": 99}, 3, MEASURED, [("free", 2), ("free.background", 30)]),
        (waiting(free=2), {"free": 99}, 3, Service(50.0, 1.0), [("free", 2), ("free.background", 1 + 2)]),
        (waiting(free=2), {"free": 99}, 3, Service(), [("free", 2), ("free.background", 1)]),
        (
            waiting(enterprise=20, free=50),
            {"free": 9},
            3,
            MEASURED,
            [("enterprise", 20), ("free", 11), ("free.background", 1)],
        ),
        (waiting(free=50), {}, 3, MEASURED, [("free", 32)]),
    ],
)
def test_background_work_gives_way(
    queues: Mapping[str, TierQueue],
    background: Mapping[str, int],
    leased: int,
    service: Service,
    picks: list[tuple[str, int]],
) -> None:
    """It gets idle workers, its share of each batch, and places that add at most 5 % to the duration of a batch."""
    behind = {name: TierQueue(depth, 9.0) for name, depth in background.items()}
    snapshot = PoolSnapshot(queues, 0, leased, 4, 0.0, service, background=behind)

    assert list(decide(snapshot, policy(), {}).picks) == picks


COSTLY = Service(
    base_ms=20.0, item_ms=1.0, seen_batch=32.0
)  # A full batch takes 52 ms: of four workers, one each 13 ms.


@pytest.mark.parametrize(
    ("waits", "leased", "since_ms", "service", "picks", "wait_ms"),
    [
        # others could join within the window, but background work fills the batch without additional time
        (2, 3, math.inf, MEASURED, [("free", 2), ("free.background", 30)], None),
        # it would add time: the last idle worker is kept for those that gather, and the others get background work
        (2, 3, math.inf, COSTLY, [], 15.0),
        (2, 2, math.inf, COSTLY, [("free.background", 32)], None),
        # at even intervals: 52 / 4 x 0.97 = 12.61
        (0, 3, 2.0, COSTLY, [], 10.61),
        (0, 3, 12.7, COSTLY, [("free.background", 32)], None),
        (
            2,
            3,
            2.0,
            MEASURED,
            [("free", 2), ("free.background", 30)],
            None,
        ),  # interactive requests do not wait for that
    ],
)
def test_background_work_beside_requests_that_gather(
    waits: int, leased: int, since_ms: float, service: Service, picks: list[tuple[str, int]], wait_ms: float | None
) -> None:
    """Idle workers get it, nearly evenly apart, but never the last one for which interactive requests gather."""
    snapshot = PoolSnapshot(waiting(free=waits), 0, leased, 4, 1000.0, service, since_ms, {"free": TierQueue(99, 9.0)})
    decision = decide(snapshot, policy(), {})

    assert list(decision.picks) == picks
    assert decision.wait_ms == (None if wait_ms is None else pytest.approx(wait_ms, abs=0.01))


def test_background_work_that_got_idle_workers_gets_no_share() -> None:
    """A batch of its own counts as its share of the next ones, of four batches at most."""
    behind = {"free": TierQueue(99, 9.0)}
    alone = decide(PoolSnapshot(waiting(), 0, 3, 4, 0.0, COSTLY, background=behind), policy(), {})
    full = decide(PoolSnapshot(waiting(free=99), 0, 3, 4, 0.0, COSTLY, background=behind), policy(), alone.credit)

    assert list(alone.picks) == [("free.background", 32)]
    assert list(full.picks) == [("free", 32)]
    assert full.credit[""] == pytest.approx(2 * 1.6 - 32)


def test_waiting_background_work_wakes_the_dispatcher_when_a_worker_is_idle() -> None:
    """Whatever the condition of interactive requests is."""
    snapshot = PoolSnapshot(waiting(), 0, 4, 4, 0.0, MEASURED, background={"free": TierQueue(5, 9.0)})

    assert decide(snapshot, policy(), {}).condition == WakeCondition(1, 0)


def test_the_share_of_background_work_is_kept_as_credit() -> None:
    """5 % of 32 places are 1.6: one, then two."""
    snapshot = PoolSnapshot(waiting(free=500), 0, 0, 34, 0.0, Service(), background={"free": TierQueue(99, 9.0)})
    planned = plan(snapshot, policy(), {})

    assert [dict(each.picks)["free.background"] for each in planned[:4]] == [1, 2, 1, 2]


def test_the_batches_of_a_plan_share_the_credit() -> None:
    """Requests of the first batch are not picked again."""
    snapshot = PoolSnapshot(waiting(enterprise=40, free=60), 0, 0, 34, 5000.0, MEASURED)
    planned = plan(snapshot, policy(), {})

    assert [dict(decision.picks) for decision in planned] == [
        {"enterprise": 29, "free": 3},
        {"enterprise": 11, "free": 21},
        {"free": 32},
    ]


PARTS = Service(base_ms=50.0, item_ms=1.0, seen_batch=32.0, steady=True)
STEADY = Service(base_ms=48.0, item_ms=0.0, seen_batch=32.0, steady=True)
PACED = BatchPolicy(
    32, 40.0, 4, 1000.0, TIERS, BACKGROUND_SHARE, headroom=0.04
)  # Twelve workers: a batch each 48 / (12 x 0.96) = 4.17 ms.


@pytest.mark.parametrize(
    ("quiet", "enterprise", "ready", "limit", "condition"),
    [
        ("", 0, 1, None, WakeCondition(0, 0)),  # enough batches are ready
        ("free", 0, 1, 2, None),  # one more is formed, which leaves first
        ("free", 0, 2, None, WakeCondition(0, 1)),  # only one
        ("free", 5, 1, None, WakeCondition(0, 0)),  # a higher tier waits
        ("paid", 0, 1, None, WakeCondition(0, 0)),  # of a tier that does not wait
    ],
)
def test_a_batch_of_quiet_customers_does_not_wait_for_the_ready_one(
    quiet: str, enterprise: int, ready: int, limit: int | None, condition: WakeCondition | None
) -> None:
    """All four workers are busy."""
    snapshot = PoolSnapshot(
        waiting(enterprise=enterprise, free=99), ready, 4 + ready, 4, 900.0, MEASURED, quiet=[quiet]
    )

    decision = decide(snapshot, policy(), {})

    if condition:
        assert (decision.picks, decision.condition) == ((), condition)
    else:
        assert (dict(decision.picks), decision.ready_limit) == ({"free": 32}, limit)


@pytest.mark.parametrize(
    ("waits", "leased", "since_ms", "changes", "wait_ms"),
    [
        (500, 12, 1.5, {}, 2.67),  # saturated: the batch is not due yet
        (500, 12, 4.2, {}, None),
        (500, 3, 1.5, {}, 2.67),  # nine idle, and more queued than they can claim: they start one after another
        (300, 3, 1.5, {}, None),  # they can claim all queued requests at once
        (500, 12, 1.5, {"headroom": 0.0}, None),
        (500, 4, 1.5, {"workers": 4}, 10.74),  # 48 / (4 x 0.98) = 12.24: half of the headroom for half of eight
        (500, 1, 1.5, {"workers": 1}, None),  # one worker has no pacing
        (500, 12, 1.5, {"service": STEADY._replace(steady=False)}, None),  # runs are not steady
        (500, 12, 1.5, {"service": STEADY._replace(seen_batch=15.0)}, None),  # full batches were not measured
    ],
)
def test_the_batches_of_a_saturated_pool_are_paced(
    waits: int, leased: int, since_ms: float, changes: dict[str, Any], wait_ms: float | None
) -> None:
    """If all runs take the same time, a batch leaves when it is due; otherwise at once."""
    workers, service = changes.get("workers", 12), changes.get("service", STEADY)
    snapshot = PoolSnapshot(waiting(free=waits), 0, leased, workers, 900.0, service, since_ms)

    decision = decide(snapshot, replace(PACED, headroom=changes.get("headroom", 0.04)), {})

    assert decision.wait_ms == (None if wait_ms is None else pytest.approx(wait_ms, abs=0.01))
    assert bool(decision.picks) is (wait_ms is None)


@pytest.mark.parametrize(
    ("waits", "leased", "since_ms", "changes", "wait_ms"),
    [
        (3, 3, 10.0, {}, 3.25),  # runs of 50 + 3 x 1 ms on four workers: 13.25 ms
        (3, 3, 13.0, {}, None),  # within a millisecond
        (3, 3, math.inf, {}, None),  # no batch is known
        (3, 2, 10.0, {}, 3.25),  # half of the workers are idle
        (3, 1, 10.0, {}, None),  # more are
        (3, 0, 0.0, {}, None),  # nothing runs
        (3, 3, 10.0, {"rate": 1000.0}, 9.0),  # the target of 19 requests arrives within 19 ms
        (3, 3, 18.5, {"rate": 1000.0}, None),  # fewer leave then too
        (3, 3, 10.0, {"rate": 1000.0, "max_wait_ms": 15.0}, 5.0),  # the model's window
        (32, 3, 0.0, {}, None),  # a full batch
        (3, 3, 10.0, {"rate": 37.0}, None),  # less than half of a request is expected within the distance
        (3, 3, 10.0, {"headroom": 0.0}, None),  # no distances
        (3, 3, 0.0, {"service": PARTS._replace(base_ms=4.0)}, None),  # below 5 ms
        (3, 3, 10.0, {"service": PARTS._replace(steady=False)}, None),  # the time of a run is not known
    ],
)
def test_part_batches_are_paced_while_few_workers_are_idle(
    waits: int, leased: int, since_ms: float, changes: dict[str, Any], wait_ms: float | None
) -> None:
    """At even distances a worker becomes free soon; a full batch wakes the dispatcher earlier."""
    rate, service = changes.get("rate", 100.0), changes.get("service", PARTS)
    snapshot = PoolSnapshot(waiting(free=waits, oldest_ms=50.0), 0, leased, 4, rate, service, since_formed_ms=since_ms)

    rule = replace(policy(), headroom=changes.get("headroom", 0.05), max_wait_ms=changes.get("max_wait_ms", 40.0))
    decision = decide(snapshot, rule, {})

    assert decision.wait_ms == (None if wait_ms is None else pytest.approx(wait_ms, abs=0.01))
    assert decision.condition == (NEVER if wait_ms is None else WakeCondition(32, FIRST_IDLE))
    pace_ms = math.inf if wait_ms is None else since_ms + wait_ms  # Then all requests that have arrived leave at once.
    assert decision.pace_ms == pytest.approx(pace_ms, abs=0.01)
    assert bool(decision.picks) is (wait_ms is None)


def test_a_late_batch_is_followed_earlier() -> None:
    """Late by 20 ms: one more batch leaves in the same plan, for at most 5 ms of slack."""
    snapshot = PoolSnapshot(waiting(free=900), 0, 12, 12, 900.0, STEADY, 24.0)

    decisions = plan(snapshot, replace(PACED, lookahead_workers=1), {})

    assert [decision.since_ms for decision in decisions] == [5.0, pytest.approx(0.83, abs=0.01)]


def test_the_pace_leaves_the_headroom_and_nothing_more() -> None:
    """A saturated pool, with a decision each millisecond for ten seconds: 96 % of the batches of twelve workers."""
    formed, since_ms = 0, math.inf
    for _ in range(10_000):
        snapshot = PoolSnapshot(waiting(free=900), 0, 12, 12, 900.0, STEADY, since_ms + 1.0)
        decision = decide(snapshot, PACED, {})
        formed, since_ms = formed + bool(decision.picks), decision.since_ms

    assert formed == pytest.approx(0.96 * 10_000 * 12 / 48, rel=0.01)
