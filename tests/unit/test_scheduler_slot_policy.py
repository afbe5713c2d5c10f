"""Which requests get free slots, by literal tables."""

from collections import Counter
from collections.abc import Mapping

import pytest

from scheduler.batching.slot_policy import MOST_AT_ONCE, fill, kept_free
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.protocol.pool_view import SlotView
from scheduler.protocol.wake_condition import FREE_SLOT, WakeCondition

TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))
STRICT = tuple(TierPolicy(tier.name, tier.priority, 0.0) for tier in TIERS)


def policy(tiers: tuple[TierPolicy, ...] = STRICT, headroom: float = 0.0, background: float = 0.0) -> BatchPolicy:
    return BatchPolicy(32, 40.0, 4, 1000.0, tiers, headroom=headroom, background_share=background)


def waiting(enterprise: int = 0, paid: int = 0, free: int = 0, oldest_ms: float = 1.0) -> dict[str, TierQueue]:
    depths = {"enterprise": enterprise, "paid": paid, "free": free}
    return {name: TierQueue(depth, oldest_ms if depth else 0.0) for name, depth in depths.items()}


def snapshot(
    queues: Mapping[str, TierQueue], slots: SlotView | None, background: Mapping[str, TierQueue] | None = None
) -> PoolSnapshot:
    return PoolSnapshot(queues, 0, 0, 2, 100.0, slots=slots, background=background or {})


def picks(
    queues: Mapping[str, TierQueue],
    slots: SlotView,
    how: BatchPolicy | None = None,
    background: Mapping[str, TierQueue] | None = None,
) -> list[list[tuple[str, int]]]:
    """The picks of each batch that leaves now."""
    return [list(d.picks) for d in fill(snapshot(queues, slots, background), how or policy(), {}) if d.picks]


@pytest.mark.parametrize(
    ("queues", "slots", "batches"),
    [
        (waiting(), SlotView(8, 8, 8), []),
        (waiting(free=3), SlotView(8, 8, 8), [[("free", 3)]]),  # nothing gathers
        (waiting(free=9), SlotView(8, 8, 8), [[("free", 8)]]),
        (waiting(free=9), SlotView(0, 8, 0), []),
        (waiting(free=9), SlotView(5, 12, 2), [[("free", 2)], [("free", 2)], [("free", 1)]]),  # each fits a worker
        (waiting(free=9), SlotView(1, 8, 3), [[("free", 1)]]),  # others wait for a claim
        (waiting(enterprise=2, paid=3, free=9), SlotView(6, 8, 6), [[("enterprise", 2), ("paid", 3), ("free", 1)]]),
        (waiting(enterprise=9, paid=3, free=9), SlotView(6, 8, 6), [[("enterprise", 6)]]),
        (
            waiting(enterprise=3, free=9),
            SlotView(6, 8, 2),
            [[("enterprise", 2)], [("enterprise", 1), ("free", 1)], [("free", 2)]],
        ),
    ],
)
def test_free_slots_are_filled_by_priority(
    queues: Mapping[str, TierQueue], slots: SlotView, batches: list[list[tuple[str, int]]]
) -> None:
    """At once, never more than are free, in batches that one worker has the slots for."""
    assert picks(queues, slots) == batches


def test_a_bounded_number_of_batches_is_planned_at_once() -> None:
    """The rest is planned with the queues that forming returns."""
    assert picks(waiting(free=99), SlotView(50, 64, 1)) == [[("free", 1)]] * MOST_AT_ONCE


@pytest.mark.parametrize(
    ("queues", "free", "condition"),
    [
        (waiting(), 8, WakeCondition(1)),  # the next admission
        (waiting(), 0, WakeCondition(1)),
        (waiting(free=1), 0, WakeCondition(1, FREE_SLOT)),  # the highest tier may have runs withdrawn
        (waiting(free=1), 1, WakeCondition(1, FREE_SLOT)),  # one is kept free: also a request of the highest tier
    ],
)
def test_what_wakes(queues: Mapping[str, TierQueue], free: int, condition: WakeCondition) -> None:
    """Nothing is polled."""
    (decision,) = fill(snapshot(queues, SlotView(free, 8, free)), policy(headroom=0.2), {})

    assert not decision.picks
    assert (decision.wait_ms, decision.condition) == (None, condition)


@pytest.mark.parametrize(
    ("total", "headroom", "kept"), [(4, 0.2, 0), (8, 0.2, 1), (64, 0.2, 2), (64, 0.0, 0), (1, 0.9, 0)]
)
def test_slots_that_are_kept_free(total: int, headroom: float, kept: int) -> None:
    """A few, and none in a small pool."""
    assert kept_free(SlotView(total, total, total), policy(headroom=headroom)) == kept


@pytest.mark.parametrize(
    ("queues", "free", "batches"),
    [
        (waiting(free=9), 2, []),
        (waiting(free=9), 5, [[("free", 3)]]),
        (waiting(enterprise=1, free=9), 2, [[("enterprise", 1)]]),
        (waiting(enterprise=2, free=9), 2, [[("enterprise", 2)]]),
        (waiting(enterprise=1, free=9), 5, [[("enterprise", 1), ("free", 2)]]),
        (waiting(enterprise=4, free=9), 5, [[("enterprise", 4)]]),
        (waiting(enterprise=9, free=9), 5, [[("enterprise", 5)]]),
    ],
)
def test_lower_tiers_leave_slots_free(
    queues: Mapping[str, TierQueue], free: int, batches: list[list[tuple[str, int]]]
) -> None:
    """Two of 64 for the highest tier, which may use them."""
    assert picks(queues, SlotView(free, 64, free), policy(headroom=0.2)) == batches


@pytest.mark.parametrize("size", [1, 2, 5])
def test_guaranteed_shares_hold_over_small_batches(size: int) -> None:
    """All tiers wait all the time, and each batch has the slots that became free: shares are those of all slots together."""
    counts: Counter[str] = Counter()
    credit: Mapping[str, float] = {}
    for _ in range(2000):
        decisions = fill(snapshot(waiting(99, 99, 99), SlotView(size, 64, size)), policy(TIERS), credit)
        credit = decisions[-1].credit
        for decision in decisions:
            for name, places in decision.picks:
                counts[name] += places

    total = counts.total()
    assert total == 2000 * size
    assert counts["paid"] / total == pytest.approx(0.25, rel=0.02)
    assert counts["free"] / total == pytest.approx(0.10, rel=0.02)


def served(queues: Mapping[str, TierQueue], how: BatchPolicy, background: Mapping[str, TierQueue]) -> Counter[str]:
    """The requests of each queue in a thousand slots that became free one after another, while all queues stay as they are."""
    counts: Counter[str] = Counter()
    credit: Mapping[str, float] = {}
    for _ in range(1000):
        decisions = fill(snapshot(queues, SlotView(1, 64, 1), background), how, credit)
        credit = decisions[-1].credit
        counts.update(name for decision in decisions for name, _ in decision.picks)
    return counts


def test_an_aged_tier_gets_a_share() -> None:
    """A lower tier that has waited for a second does not starve."""
    counts = served(waiting(enterprise=99) | {"free": TierQueue(99, 1500.0)}, policy(), {})

    assert counts == {"enterprise": 950, "free": 50}


@pytest.mark.parametrize("tier", ["enterprise", "free"])
def test_background_work_gets_its_share(tier: str) -> None:
    """Whatever tier it is of; it does not age, since it may wait for minutes."""
    counts = served(waiting(enterprise=99), policy(background=0.1), {tier: TierQueue(99, 60_000.0)})

    assert counts[f"{tier}.background"] == pytest.approx(100, abs=1)
    assert counts.total() == 1000


def test_background_work_without_a_share_waits() -> None:
    """As long as others wait; then it gets all slots but those that are kept free."""
    jobs = {"paid": TierQueue(99, 60_000.0)}

    assert served(waiting(free=99), policy(), jobs) == {"free": 1000}
    assert picks(waiting(), SlotView(8, 64, 8), policy(headroom=0.2), jobs) == [[("paid.background", 6)]]


def test_a_paused_tier_gets_no_slot() -> None:
    """Nor does its background work."""
    how = policy(STRICT[:2])

    assert picks(waiting(free=9), SlotView(8, 8, 8), how, {"free": TierQueue(9, 1.0)}) == []


def test_no_tier_is_no_batch() -> None:
    """All are paused."""
    assert picks(waiting(free=9), SlotView(8, 8, 8), policy(())) == []
