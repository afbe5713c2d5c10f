"""Direct mode's door: this gateway's share of every limit, all or nothing, and what the verdict tells of them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from direct_parts import submission, waiting
from gateway.direct.limits import MOST_RETRY_MS, DirectAdmission, LocalLimits
from gateway.direct.queue import DirectEntry, DirectQueue
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.states import Admission

WIDE = TierLimit("free", 1000.0, 1000.0, 100, ["free"])
SHADOW = TierLimit("free", 1000.0, 1000.0, 100, ["free"], shadow=True)


class Door:
    """A door that is open, with a customer that has nothing under way where nothing else is said."""

    def __init__(self, gateways: int = 1, max_waiting: int = 10) -> None:
        self.limits = LocalLimits()
        self.queue = DirectQueue(max_waiting)
        self.door = DirectAdmission(self.queue, self.limits)
        self.door.open(gateways)

    def judge(
        self, asked: Submission, tier: TierLimit = WIDE, now: float = 0.0, *, in_use: int = 0, priority: int = 1
    ) -> Verdict:
        return self.door.judge(asked, tier, priority, now, in_use=in_use)

    def outcomes(self, asked: Submission, times: int, now: float = 0.0, **more: Any) -> list[Admission]:
        return [self.judge(asked, now=now, **more).outcome for _ in range(times)]


def told(outcomes: Sequence[Admission], accepted: int, refusal: Admission) -> bool:
    """So many are let in, and then everybody is refused for this reason."""
    return list(outcomes) == [Admission.ACCEPTED] * accepted + [refusal] * (len(outcomes) - accepted)


@pytest.mark.parametrize(("gateways", "let_in"), [(1, 25), (2, 12), (50, 1), (1000, 1)])
def test_a_customer_has_its_share_and_begins_with_a_quarter_of_it(gateways: int, let_in: int) -> None:
    """What it spent in Redis a moment ago is not known here; one request is always let in."""
    outcomes = Door(gateways).outcomes(submission(), 50)

    assert told(outcomes, let_in, Admission.CUSTOMER_LIMIT)


def test_all_keys_of_a_customer_share_its_limit() -> None:
    """Another key is no other budget; another customer is."""
    door = Door()
    assert told(door.outcomes(submission(burst=20.0), 9), 5, Admission.CUSTOMER_LIMIT)

    assert door.judge(submission(burst=20.0, api_key_id="other")).outcome is Admission.CUSTOMER_LIMIT
    assert door.judge(submission(burst=20.0, customer_id="other")).outcome is Admission.ACCEPTED


def test_a_key_s_own_limit_speaks_first_and_leaves_the_customer_s_alone() -> None:
    """A key of 4 a second has a quarter of 20; what it is refused costs its customer nothing."""
    door = Door()
    own = submission(key_rate=4.0, key_burst=20.0)
    assert told(door.outcomes(own, 50), 5, Admission.KEY_LIMIT)

    verdict = door.judge(own)
    assert (verdict.left.buckets[0].left, verdict.outcome) == (0.0, Admission.KEY_LIMIT)  # Of the one that holds less.
    assert told(door.outcomes(submission(api_key_id="other"), 30), 20, Admission.CUSTOMER_LIMIT)


def test_a_refusal_says_when_to_come_back_and_spends_nothing() -> None:
    """The tier's share is whole after a customer was refused, and the hint is when it has room again."""
    door = Door(gateways=2)
    tier = TierLimit("narrow", 10.0, 8.0, 100, ["narrow"])  # Half of it here, a quarter of that to begin with: one.
    poor = submission(rate=4.0, burst=4.0, customer_id="poor")
    assert door.judge(poor).outcome is Admission.ACCEPTED
    refused = door.judge(poor, tier)
    assert (refused.outcome, refused.retry_after_ms) == (Admission.CUSTOMER_LIMIT, 501)
    assert (refused.left.buckets[0].left, refused.left.buckets[0].reset_ms) == (0.0, 1001)
    assert door.outcomes(submission(), 2, tier=tier) == [Admission.ACCEPTED, Admission.TIER_LIMIT]
    assert door.judge(poor, now=0.6).outcome is Admission.ACCEPTED


def test_the_tier_is_held_to_its_share_of_the_capacity() -> None:
    """Many customers of one tier together get no more than the tier has."""
    door = Door()
    narrow = TierLimit("free", 40.0, 40.0, 100, ["free"])
    outcomes = [door.judge(submission(customer_id=f"c{n}"), narrow).outcome for n in range(12)]

    assert told(outcomes, 10, Admission.TIER_LIMIT)


async def test_a_full_room_is_a_full_queue() -> None:
    """With a hint, and without spending anything; who may push somebody out gets in."""
    door = Door(max_waiting=1)
    door.queue.put(DirectEntry(waiting("first"), 2, 0.0))

    refused = door.judge(submission(), priority=2)
    assert (refused.outcome, refused.retry_after_ms, refused.left.buckets[0].left) == (Admission.QUEUE_FULL, 500, 25.0)
    assert door.judge(submission()).outcome is Admission.ACCEPTED


def test_tokens_are_charged_by_the_estimate() -> None:
    """A minute's worth at a time, a quarter to begin with; what is larger than all of it waits until all is there."""
    door = Door(gateways=2)
    asked = submission(tokens=50, tokens_per_minute=1202.0)  # 601 here, a window for 600 in a minute.
    outcomes = door.outcomes(asked, 5)
    assert told(outcomes, 3, Admission.TOKEN_LIMIT)
    verdict = door.judge(asked)
    assert (verdict.left.buckets[1].left, verdict.left.buckets[1].reset_ms) == (0.0, pytest.approx(120_000, abs=60_000))
    assert verdict.retry_after_ms == pytest.approx(50 / 450 * 60_000, rel=0.01)

    huge = submission(customer_id="big", tokens=5000, tokens_per_minute=1202.0)
    assert told(door.outcomes(huge, 2), 1, Admission.TOKEN_LIMIT)  # The first has its chance.
    assert door.judge(huge, now=115.0).outcome is Admission.TOKEN_LIMIT
    assert door.judge(huge, now=121.0).outcome is Admission.ACCEPTED


@pytest.mark.parametrize(
    ("changes", "most", "refusal"),
    [
        ({"burst": 20.0, "rate": 0.001}, 5, Admission.CUSTOMER_LIMIT),
        ({"key_burst": 12.0, "key_rate": 0.001}, 3, Admission.KEY_LIMIT),
        ({"max_concurrency": 4}, 4, Admission.CONCURRENCY),
        ({"quotas": (("1day", 3),)}, 3, Admission.QUOTA),
        ({"tokens": 50, "tokens_per_minute": 601.0}, 3, Admission.TOKEN_LIMIT),
    ],
)
def test_a_list_is_let_in_whole_or_costs_nothing(changes: dict[str, Any], most: int, refusal: Admission) -> None:
    """One more than there is room for is refused, and as many as there is room for can enter after it."""
    door, asked = Door(), submission(**changes)
    out = door.door.keeps_out([asked] * (most + 1), WIDE, 1, 0.0, in_use=0)

    assert out is not None
    assert out.outcome is refusal
    assert door.door.keeps_out([asked] * most, WIDE, 1, 0.0, in_use=0) is None
    assert [door.judge(asked, in_use=n).outcome for n in range(most)] == [Admission.ACCEPTED] * most
    assert door.judge(asked, in_use=most).outcome is refusal


def test_without_a_token_limit_nothing_is_told_of_it() -> None:
    """No limit, no charge."""
    verdict = Door().judge(submission(tokens=5_000_000))

    assert (verdict.outcome, len(verdict.left.buckets)) == (Admission.ACCEPTED, 1)


@pytest.mark.parametrize(("gateways", "most"), [(1, 8), (3, 2), (20, 1)])
def test_concurrency_is_what_is_under_way_here(gateways: int, most: int) -> None:
    """Its share, one at least; the verdict tells the customer's whole, of which each gateway sees a part."""
    asked = submission(max_concurrency=8)
    last = Door(gateways).judge(asked, in_use=most - 1)
    over = Door(gateways).judge(asked, in_use=most)

    assert (last.outcome, last.left.in_use) == (Admission.ACCEPTED, min(8, most * gateways))
    assert (over.outcome, over.left.in_use, over.retry_after_ms) == (
        Admission.CONCURRENCY,
        min(8, most * gateways),
        500,
    )
    assert Door().judge(submission(), in_use=1000).outcome is Admission.ACCEPTED  # 0 is no limit.


def test_a_quota_counts_from_nothing() -> None:
    """Its share is there from the start; a raised one keeps what was spent, and a share under one request is one."""
    door = Door(gateways=2)
    asked = submission(quotas=[("1day", 8), ("1month", 100)])
    verdicts = [door.judge(asked) for _ in range(6)]
    assert told([verdict.outcome for verdict in verdicts], 4, Admission.QUOTA)
    assert verdicts[0].left.quotas == [(6, 86_400_001), (98, 30 * 86_400_001 - 29)]
    assert verdicts[-1].left.quotas == [(0, 86_400_001), (92, 30 * 86_400_001 - 29)]
    assert verdicts[-1].retry_after_ms == MOST_RETRY_MS

    raised = submission(quotas=[("1day", 12), ("1month", 100)])
    assert told(door.outcomes(raised, 3), 2, Admission.QUOTA)
    assert told(door.outcomes(submission(customer_id="small", quotas=[("1day", 1)]), 2), 1, Admission.QUOTA)


ROOMY: dict[str, Any] = {
    "key_rate": 100.0,
    "key_burst": 100.0,
    "tokens": 100,
    "tokens_per_minute": 1e6,
    "quotas": [("1day", 1000)],
    "max_concurrency": 100,
}
NARROW: dict[Admission, dict[str, Any]] = {
    Admission.KEY_LIMIT: {"key_rate": 0.01, "key_burst": 1.0},
    Admission.CUSTOMER_LIMIT: {"rate": 0.01, "burst": 1.0},
    Admission.TOKEN_LIMIT: {"tokens_per_minute": 100.0},
    Admission.CONCURRENCY: {"max_concurrency": 1},
    Admission.QUOTA: {"quotas": [("1day", 1)]},
    Admission.TIER_LIMIT: {},
}
NARROW_TIER = TierLimit("narrow", 0.01, 1.0, 100, ["narrow"])


def narrow(*refusals: Admission) -> Submission:
    """One whose second request is refused by these limits."""
    changes = ROOMY
    for refusal in refusals:
        changes = changes | NARROW[refusal]
    return submission(**changes)


REFUSALS = [
    Admission.KEY_LIMIT,
    Admission.CUSTOMER_LIMIT,
    Admission.TOKEN_LIMIT,
    Admission.CONCURRENCY,
    Admission.QUOTA,
    Admission.TIER_LIMIT,
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_one_limit_refuses_costs_nothing_under_the_others(refusal: Admission) -> None:
    """All or nothing: a hundred refusals leave every limit as it was after the one that was let in."""
    door = Door()
    asked = narrow(refusal)
    tier = NARROW_TIER if refusal is Admission.TIER_LIMIT else WIDE
    in_use = [0] + [1] * 100
    first, *others = [door.judge(asked, tier, in_use=count) for count in in_use]

    assert first.outcome is Admission.ACCEPTED
    assert {verdict.outcome for verdict in others} == {refusal}
    states = {
        (v.left.buckets[0].left, v.left.buckets[1].left, tuple(v.left.quotas), v.left.in_use) for v in (first, *others)
    }
    assert len(states) == 1


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_shadow_tier_refuses_nobody_and_says_who_would_have_been(refusal: Admission) -> None:
    """Let in without being charged, with the refusal beside it; a full room refuses there, too."""
    door = Door()
    tier = TierLimit("narrow", 0.01, 1.0, 100, ["narrow"], shadow=True) if refusal is Admission.TIER_LIMIT else SHADOW
    asked = narrow(refusal)
    verdicts = [door.judge(asked, tier, in_use=count) for count in (0, 1, 1)]

    assert [(v.outcome, v.shadowed) for v in verdicts] == [
        (Admission.ACCEPTED, ""),
        (Admission.ACCEPTED, refusal.value),
        (Admission.ACCEPTED, refusal.value),
    ]
    assert [v.left.in_use for v in verdicts] == ([1, 1, 1] if refusal is Admission.CONCURRENCY else [1, 2, 2])
    full = Door(max_waiting=0)
    assert full.judge(asked, tier).outcome is Admission.QUEUE_FULL


@pytest.mark.parametrize("first", range(len(REFUSALS)))
def test_refusals_speak_in_the_order_of_admission(first: int) -> None:
    """Key, customer, tokens, concurrency, quota, tier: of all that refuse, the first is told."""
    door, asked = Door(), narrow(*REFUSALS[first:])
    door.judge(asked, NARROW_TIER)

    assert door.judge(asked, NARROW_TIER, in_use=1).outcome is REFUSALS[first]


def test_a_lowered_limit_hands_out_nothing_and_a_raised_one_only_its_rate() -> None:
    """The customer's factor falls and rises again within a second: nothing is let in by it."""
    door = Door()
    assert door.judge(submission(rate=1.0, burst=6.0)).outcome is Admission.ACCEPTED  # Quarter.
    assert door.outcomes(submission(rate=1.0, burst=6.0), 9, now=60.0).count(Admission.ACCEPTED) == 5
    for burst in (4.0, 5.0, 2.0, 6.0, 3.0, 6.0):
        assert door.judge(submission(rate=1.0, burst=burst), now=60.0).outcome is Admission.CUSTOMER_LIMIT
    assert door.outcomes(submission(rate=1.0, burst=6.0), 9, now=61.5).count(Admission.ACCEPTED) == 2


def test_direct_mode_that_begins_again_knows_nothing() -> None:
    """A quarter again; nothing is kept in between."""
    door = Door()
    door.outcomes(submission(), 50)
    assert len(door.limits) == 2
    door.door.close()
    assert len(door.limits) == 0

    door.door.open(2)
    assert told(door.outcomes(submission(), 50, now=100.0), 12, Admission.CUSTOMER_LIMIT)


def test_what_was_spent_of_a_quota_is_kept_between_two_times() -> None:
    """A Redis that comes and goes does not give it again."""
    door, asked = Door(), submission(quotas=[("1day", 3)])
    assert told(door.outcomes(asked, 4), 3, Admission.QUOTA)
    door.door.close()
    door.door.open(1)

    assert door.judge(asked, now=3600.0).outcome is Admission.QUOTA
    assert door.judge(asked, now=3 * 86_400.0).outcome is Admission.ACCEPTED


def test_the_number_of_limits_is_bounded() -> None:
    """Whatever customers come."""
    limits = LocalLimits(max_limits=30)
    door = DirectAdmission(DirectQueue(), limits)
    for number in range(500):
        door.judge(submission(customer_id=f"c{number}", api_key_id=f"k{number}", key_rate=1.0), WIDE, 1, 0.0, in_use=0)

    assert (len(limits._rates), len(limits._rates.storage)) == (30, 60)


@given(
    rate=st.floats(0.5, 200.0),
    burst=st.floats(1.0, 400.0),
    gateways=st.integers(1, 8),
    gaps=st.lists(st.floats(0.0, 0.2), min_size=1, max_size=200),
)
def test_no_window_lets_in_more_than_the_share(rate: float, burst: float, gateways: int, gaps: list[float]) -> None:
    """Over any run of requests: at most the local bucket and what flows into it."""
    door, now, accepted = Door(gateways), 0.0, 0
    for gap in gaps:
        now += gap
        accepted += door.judge(submission(rate=rate, burst=burst), now=now).outcome is Admission.ACCEPTED

    assert accepted <= max(1.0, burst / gateways) + rate / gateways * now + 1e-6
