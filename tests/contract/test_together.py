"""Submissions that enter together or not at all: a list of prompts is judged once, and a refusal of it spends nothing."""

from typing import Any

import pytest

from customer_limits import in_force
from eventually import eventually
from pool import TIERS, WIDE, Pool, done
from scheduler.protocol.admission import Submission, TierLimit, Verdict


def party(pool: Pool, count: int, **changes: Any) -> list[Submission]:
    """So many that enter together."""
    members = [pool.submission(**changes) for _ in range(count)]
    members[0].together = count
    return members


def outcomes(verdicts: list[Verdict]) -> list[str]:
    return [verdict.outcome.value for verdict in verdicts]


async def waiting(pool: Pool) -> int:
    return int(await pool.client.llen(pool.keys.queue("free")))


@pytest.mark.parametrize(
    ("limits", "tier", "outcome"),
    [
        ({"rate": 1e-6, "burst": 12.0}, {}, "customer_limit"),
        ({"key_rate": 1e-6, "key_burst": 12.0}, {}, "key_limit"),
        ({"tokens": 10, "tokens_per_minute": 120}, {}, "token_limit"),
        ({"max_concurrency": 3}, {}, "concurrency"),
        ({"quotas": (("1day", 3),)}, {}, "quota"),
        ({}, {"rate": 1e-6, "burst": 12.0}, "tier_limit"),
        ({}, {"max_depth": 3}, "queue_full"),
    ],
)
async def test_all_or_none_by_every_limit(
    pool: Pool, limits: dict[str, Any], tier: dict[str, Any], outcome: str
) -> None:
    """Where there is room for three (a fresh bucket is a quarter full), four are refused whole, and then three enter."""
    fields = {"name": "free", "rate": 1e6, "burst": 1e6, "max_depth": 1000, "ahead": TIERS} | tier
    tiers = [*WIDE[:2], TierLimit(**fields)]

    refused = await pool.admit(party(pool, 4, **limits), tiers)
    left_then = await waiting(pool), await pool.client.llen(pool.keys.outbox)
    entered = await pool.admit(party(pool, 3, **limits), tiers)
    (after,) = await pool.admit([pool.submission(**limits)], tiers)

    assert outcomes(refused) == [outcome] * 4
    assert left_then == (0, 0)
    assert outcomes(entered) == ["accepted"] * 3
    assert after.outcome.value == outcome
    assert await waiting(pool) == 3


async def test_neighbours_of_a_refused_party_enter(pool: Pool) -> None:
    """Those before and behind it in one call are judged by themselves, and find what it did not take."""
    alone, late = pool.submission(), pool.submission()
    crowd = party(pool, 5)
    for submission in (alone, late, *crowd):
        submission.limits = in_force(1e-6, 12.0)

    verdicts = await pool.admit([alone, *crowd, late])

    assert outcomes(verdicts) == ["accepted", *["customer_limit"] * 5, "accepted"]


async def test_a_call_that_is_sent_again_is_told_so(pool: Pool) -> None:
    """The answer to the first was lost: nothing is spent twice, and everybody stays in."""
    crowd = party(pool, 3, burst=12.0, rate=1e-6)

    first, again = await pool.admit(crowd), await pool.admit(crowd)

    assert outcomes(first) == ["accepted"] * 3
    assert outcomes(again) == ["duplicate"] * 3
    assert await waiting(pool) == 3


async def test_a_retry_with_its_keys_gets_each_answer(pool: Pool) -> None:
    """Each member has a key of its own: under way it is told so as a whole, and then each answer is its own."""

    def keyed() -> list[Submission]:
        members = party(pool, 2)
        for place, member in enumerate(members):
            member.idempotency, member.fingerprint = f"customer:{place}", "f"
        return members

    first = keyed()
    await pool.admit(first)
    running = await pool.admit(keyed())
    await pool.form([("free", 2)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [done(member.id) for member in first])

    replayed = await pool.admit(keyed())

    assert outcomes(running) == ["in_progress"] * 2
    assert outcomes(replayed) == ["replayed"] * 2
    assert [verdict.stored_id for verdict in replayed] == [member.id for member in first]


async def test_retrying_pays_when_there_is_room_for_all(pool: Pool) -> None:
    """Three of four are there: the fourth takes a second at one a second."""
    refused = await pool.admit(party(pool, 4, rate=1.0, burst=12.0))

    assert [verdict.retry_after_ms for verdict in refused] == [pytest.approx(1000, rel=0.05)] * 4


async def test_a_party_larger_than_its_tiers_part_enters_when_that_is_whole(pool: Pool) -> None:
    """Else a long list could never enter a small pool. Its debt keeps the next ones out for as long as it is worth."""
    tiers = [*WIDE[:2], TierLimit("free", 100.0, 4.0, 1000, TIERS)]
    crowd = party(pool, 40)

    async def entered() -> bool:
        return outcomes(await pool.admit(crowd, tiers)) == ["accepted"] * 40

    await eventually(entered, "the tier's bucket is full")
    (after,) = await pool.admit([pool.submission()], tiers)

    assert after.outcome.value == "tier_limit"
    assert 200 < after.retry_after_ms <= 370  # 36 and one of its own, at 100 a second.
