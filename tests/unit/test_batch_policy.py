"""When a batch leaves and who is in it, by literal tables."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching.policy import (
    NEVER,
    BatchPolicy,
    PoolSnapshot,
    TierPolicy,
    TierQueue,
    WakeCondition,
    choose,
    decide,
    plan,
    ready_limit,
)
from scheduler.batching.timing import Service

TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))


def policy(size: int = 32, window_ms: float = 40.0) -> BatchPolicy:
    return BatchPolicy(size, window_ms, 4, 1000.0, TIERS)


def waiting(enterprise: int = 0, paid: int = 0, free: int = 0, oldest_ms: float = 1.0) -> dict[str, TierQueue]:
    return {
        name: TierQueue(depth, oldest_ms if depth else 0.0)
        for name, depth in (("enterprise", enterprise), ("paid", paid), ("free", free))
    }


MEASURED = Service(base_ms=50.0, item_ms=0.0)


@pytest.mark.parametrize(
    ("free", "oldest_ms", "rate", "workers", "ready", "leased", "wait_ms", "wish"),
    [
        # waiting, its age, arrivals/s, workers, ready, leased -> look again in, or when; no wish: a batch leaves now
        (0, 0.0, 0.0, 4, 0, 0, None, WakeCondition(1)),  # nothing waits
        (
            0,
            0.0,
            1000.0,
            34,
            0,
            9,
            16.0,
            WakeCondition(8),
        ),  # nor here, but eight are worth it, or whoever has come in the window
        (32, 1.0, 900.0, 4, 0, 0, None, None),  # full: leaves at once
        (32, 1.0, 900.0, 4, 0, 4, None, None),  # full, all busy: one may stand ready
        (32, 1.0, 900.0, 4, 1, 5, None, WakeCondition(0, 0)),  # full, all busy, one ready: late binding
        (99, 1.0, 900.0, 34, 9, 43, None, WakeCondition(0, 4)),  # the line is full: when half of it is gone
        (99, 1.0, 900.0, 0, 0, 0, None, WakeCondition(0)),  # no worker at all
        (1, 1.0, 0.0, 4, 0, 1, None, None),  # nobody else comes: waiting would not pay
        (1, 1.0, 100.0, 34, 0, 5, None, None),  # a worker is free for each of them
        (
            1,
            0.0,
            100.0,
            2,
            0,
            1,
            40.0,
            WakeCondition(2, -1),
        ),  # two workers bear no single requests, at 5 s of runs a second
        (1, 31.0, 100.0, 2, 0, 1, None, None),  # less than one more is expected in the 9 ms that are left
        (1, 1.0, 1000.0, 34, 0, 9, 15.0, WakeCondition(8, -1)),  # 8 ms of arrivals, in twice that time
        (8, 5.0, 1000.0, 34, 0, 9, None, None),  # and here they are
        (5, 16.0, 1000.0, 34, 0, 9, None, None),  # the window is over
        (5, 1.0, 1000.0, 34, 0, 0, None, None),  # nothing runs: whoever waits for an answer is here
        (9, 55.0, 900.0, 4, 0, 4, None, WakeCondition(32, 0)),  # part batch, every worker busy: waiting is free
        (9, 55.0, 900.0, 4, 1, 4, None, WakeCondition(0, 0)),  # the same, and one stands ready
        (32, 1.0, 900.0, 4, 1, 1, None, None),  # idle workers: the one that was formed just now is as good as taken
        (32, 1.0, 900.0, 4, 3, 3, None, WakeCondition(0, 0)),  # they are said to be idle, but take nothing
    ],
)
def test_full_or_due(
    free: int,
    oldest_ms: float,
    rate: float,
    workers: int,
    ready: int,
    leased: int,
    wait_ms: float | None,
    wish: WakeCondition | None,
) -> None:
    """A full batch leaves at once, a part batch for an idle worker when waiting would not pay, none beyond need."""
    snapshot = PoolSnapshot(waiting(free=free, oldest_ms=oldest_ms), ready, leased, workers, rate, MEASURED)

    decision = decide(snapshot, policy(), {})

    assert bool(decision.picks) is (wish is None)
    assert decision.wait_ms == wait_ms
    assert decision.wish == (wish or NEVER)


@pytest.mark.parametrize(("workers", "limit"), [(0, 1), (1, 1), (4, 1), (5, 2), (34, 9), (200, 50)])
def test_ready_limit(workers: int, limit: int) -> None:
    """One batch for each four workers, and never under one: workers that died and are still counted add none."""
    assert ready_limit(workers, 4) == limit


def test_an_idle_worker_may_be_on_its_way() -> None:
    """What `form_batch` is told: one more may stand ready while any worker is idle."""
    snapshots = [PoolSnapshot(waiting(free=99), 0, leased, 34, 900.0) for leased in (34, 33)]

    assert [decide(snapshot, policy(), {}).ready_limit for snapshot in snapshots] == [9, 10]


@pytest.mark.parametrize(
    ("queues", "credit", "picks"),
    [
        (waiting(enterprise=50, paid=50, free=50), {}, [("enterprise", 21), ("paid", 8), ("free", 3)]),
        (waiting(enterprise=50), {}, [("enterprise", 32)]),  # nobody else wants a place
        (waiting(free=50), {}, [("free", 32)]),  # work-conserving
        (waiting(enterprise=2, free=50), {}, [("enterprise", 2), ("free", 30)]),
        (waiting(enterprise=50, free=50), {"free": 0.9}, [("enterprise", 28), ("free", 4)]),  # 0.9 + 3.2 owed
        (waiting(enterprise=50, paid=50, free=50, oldest_ms=1500), {}, [("enterprise", 21), ("paid", 8), ("free", 3)]),
    ],
)
def test_who_is_in_it(
    queues: Mapping[str, TierQueue], credit: Mapping[str, float], picks: list[tuple[str, int]]
) -> None:
    """Guarantees first, the rest strictly by priority; a share that is guaranteed does not grow with age."""
    assert choose(queues, policy(), credit)[0] == picks


def test_an_aged_tier_without_a_guarantee_is_served_all_the_same() -> None:
    """One that is promised nothing gets a twentieth once it waited a second, and nothing before."""
    tiers = (TierPolicy("enterprise", 1, 0.5), TierPolicy("free", 2, 0.0))
    bare = BatchPolicy(8, 40.0, 4, 1000.0, tiers)
    served = {}
    for age_ms in (999.0, 1000.0):
        credit: Mapping[str, float] = {}
        served[age_ms] = 0
        for _ in range(100):
            picks, credit = choose(waiting(enterprise=50, free=50, oldest_ms=age_ms), bare, credit)
            served[age_ms] += dict(picks).get("free", 0)

    assert served == {999.0: 0, 1000.0: 40}  # 100 batches x 8 places x 0.05


@pytest.mark.parametrize("size", [1, 4, 8, 32])
def test_the_backlog_of_lower_tiers_leaves_the_highest_its_part(size: int) -> None:
    """Half the GPUs died, everything below is late: enterprise has what is guaranteed to nobody else."""
    credit: Mapping[str, float] = {}
    places = 0
    for _ in range(400):
        picks, credit = choose(waiting(enterprise=90, paid=500, free=500, oldest_ms=1900), policy(size=size), credit)
        places += dict(picks).get("enterprise", 0)

    assert places / (400 * size) >= 1 - 0.25 - 0.10 - 0.01


def test_a_small_share_is_paid_from_credit() -> None:
    """With batches of 8 a share of 0.10 is less than one place: it is owed until it makes one."""
    credit: Mapping[str, float] = {}
    places = 0
    for _ in range(100):
        picks, credit = choose(waiting(enterprise=50, free=50), policy(size=8), credit)
        places += dict(picks).get("free", 0)

    assert places == 80  # 100 batches x 8 places x 0.10


DEPTHS = st.integers(0, 80)
AGES = st.floats(0, 3000)


@given(DEPTHS, DEPTHS, DEPTHS, AGES, st.integers(1, 64), st.floats(0, 40))
def test_a_batch_is_as_full_as_it_can_be(e: int, p: int, f: int, age: float, size: int, owed: float) -> None:
    """Whatever waits: no place is left empty while somebody waits, none is given twice, none to an empty queue."""
    queues = waiting(e, p, f, age)

    picks, credit = choose(queues, policy(size), {"free": owed})

    assert sum(n for _, n in picks) == min(size, e + p + f)
    assert all(0 < n <= queues[name].depth for name, n in picks)
    assert all(0 <= left <= size for left in credit.values())


@given(DEPTHS.filter(bool), DEPTHS.filter(bool), st.integers(8, 64))
def test_a_higher_tier_never_loses_to_a_lower_one_beyond_the_guards(e: int, f: int, size: int) -> None:
    """Without age, free takes at most its guarantee as long as enterprise still waits."""
    picks = dict(choose(waiting(enterprise=e, free=f), policy(size), {})[0])

    if picks.get("enterprise", 0) < e:
        assert picks.get("free", 0) <= 0.10 * size


@pytest.mark.parametrize(
    ("free", "workers", "ready", "leased", "sizes"),
    [
        (31, 4, 0, 1, []),  # less than a batch, and more are expected
        (32, 4, 0, 0, [32]),
        (100, 34, 0, 8, [32, 32, 32]),  # the four that are left wait for others
        (100, 4, 0, 0, [32, 32]),  # no more than may stand ready: one, and one for a worker that is idle
        (100, 4, 0, 4, [32]),  # all busy
        (100, 4, 1, 5, []),
        (1000, 200, 0, 0, [32] * 8),  # in small bites, since something more urgent may come
    ],
)
def test_a_burst_leaves_in_one_go(free: int, workers: int, ready: int, leased: int, sizes: list[int]) -> None:
    """As many batches as may stand ready are planned in one look, and never a part batch that may still grow."""
    snapshot = PoolSnapshot(waiting(free=free), ready, leased, workers, 5000.0, MEASURED)
    planned = plan(snapshot, policy(), {})

    assert [sum(count for _, count in decision.picks) for decision in planned if decision.picks] == sizes


def test_a_plan_keeps_the_order_and_the_shares() -> None:
    """What the first batch takes is not promised again, and the credit goes on from batch to batch."""
    snapshot = PoolSnapshot(waiting(enterprise=40, free=60), 0, 0, 34, 5000.0, MEASURED)
    planned = plan(snapshot, policy(), {})

    assert [dict(decision.picks) for decision in planned] == [
        {"enterprise": 29, "free": 3},
        {"enterprise": 11, "free": 21},
        {"free": 32},
    ]


STEADY = Service(base_ms=48.0, item_ms=0.0, seen_batch=32.0, steady=True)
PACED = BatchPolicy(
    32, 40.0, 4, 1000.0, TIERS, headroom=0.04
)  # Twelve workers: a batch each 48 / (12 x 0.96) = 4.17 ms.


@pytest.mark.parametrize(
    ("waits", "leased", "since_ms", "changes", "wait_ms"),
    [
        (500, 12, 1.5, {}, 2.67),  # the pool is saturated: not before its time
        (500, 12, 4.2, {}, None),
        (500, 3, 1.5, {}, 2.67),  # nine are free, and more waits than they take: they begin one after another
        (300, 3, 1.5, {}, None),  # what waits, they take at once
        (500, 12, 1.5, {"headroom": 0.0}, None),
        (500, 4, 1.5, {"workers": 4}, 10.74),  # 48 / (4 x 0.98) = 12.24: half of the headroom for half of eight
        (500, 1, 1.5, {"workers": 1}, None),  # one has no distances
        (500, 12, 1.5, {"service": STEADY._replace(steady=False)}, None),  # runs that keep no step
        (500, 12, 1.5, {"service": STEADY._replace(seen_batch=15.0)}, None),  # nothing is known of full batches
    ],
)
def test_a_saturated_pool_begins_batches_at_even_distances(
    waits: int, leased: int, since_ms: float, changes: dict[str, Any], wait_ms: float | None
) -> None:
    """Where all runs take the same time a batch leaves when it is due; whatever else holds, as it comes."""
    workers, service = changes.get("workers", 12), changes.get("service", STEADY)
    snapshot = PoolSnapshot(waiting(free=waits), 0, leased, workers, 900.0, service, since_ms)

    decision = decide(snapshot, replace(PACED, headroom=changes.get("headroom", 0.04)), {})

    assert decision.wait_ms == (None if wait_ms is None else pytest.approx(wait_ms, abs=0.01))
    assert bool(decision.picks) is (wait_ms is None)


def test_who_comes_late_may_be_followed_early() -> None:
    """Late by 20 ms: the five milliseconds of slack are made up for, by one batch more in the same look, and no more."""
    snapshot = PoolSnapshot(waiting(free=900), 0, 12, 12, 900.0, STEADY, 24.0)

    decisions = plan(snapshot, replace(PACED, lookahead_workers=1), {})

    assert [decision.since_ms for decision in decisions] == [5.0, pytest.approx(0.83, abs=0.01)]


def test_the_pace_leaves_the_headroom_and_nothing_more() -> None:
    """A saturated pool, looked at each millisecond for ten seconds: 96 % of the batches that twelve workers can do."""
    formed, since_ms = 0, math.inf
    for _ in range(10_000):
        snapshot = PoolSnapshot(waiting(free=900), 0, 12, 12, 900.0, STEADY, since_ms + 1.0)
        decision = decide(snapshot, PACED, {})
        formed, since_ms = formed + bool(decision.picks), decision.since_ms

    assert formed == pytest.approx(0.96 * 10_000 * 12 / 48, rel=0.01)
