"""A customer has one set of limits, whichever pools its requests go to; what a tier may use of a pool is the pool's."""

from pool import Pool, done
from scheduler.protocol.admission import TierLimit
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission


def two_pools(pool: Pool) -> tuple[Pool, Pool]:
    return pool, Pool(pool.client, Keys("second"))


async def test_requests_are_counted_together(pool: Pool) -> None:
    """What was spent in one pool is gone in the other."""
    first, second = two_pools(pool)
    limits = {"rate": 0.001, "burst": 8.0}  # A new bucket is a quarter full.

    told = [await outcome_of(each, **limits) for each in (first, second, first, second)]

    assert told == [Admission.ACCEPTED, Admission.ACCEPTED, Admission.CUSTOMER_LIMIT, Admission.CUSTOMER_LIMIT]


async def test_concurrency_is_counted_together(pool: Pool) -> None:
    """A request that runs in one pool takes a place in the other, and gives it back when it ends."""
    first, second = two_pools(pool)
    await first.queue(1, max_concurrency=1)

    assert await outcome_of(second, max_concurrency=1) is Admission.CONCURRENCY

    await first.form([("free", 1)])
    batch = await first.claim_next()
    await first.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)])
    assert await outcome_of(second, max_concurrency=1) is Admission.ACCEPTED


async def test_quotas_are_counted_together(pool: Pool) -> None:
    """A quota of two a year is two in all."""
    quota = {"quotas": (("1year", 2),)}

    told = [await outcome_of(each, **quota) for each in (*two_pools(pool), *two_pools(pool))]

    assert told == [Admission.ACCEPTED] * 2 + [Admission.QUOTA] * 2


async def test_a_tiers_part_is_of_its_pool(pool: Pool) -> None:
    """Capacity is that of a pool's own GPUs: what a tier used of one leaves the other as it was."""
    first, second = two_pools(pool)
    narrow = [TierLimit("free", 0.001, 4.0, 1000, ("free",))]

    told = [(await each.admit([each.submission()], narrow))[0].outcome for each in (first, first, second)]

    assert told == [Admission.ACCEPTED, Admission.TIER_LIMIT, Admission.ACCEPTED]


async def outcome_of(pool: Pool, **changes: object) -> Admission:
    return (await pool.admit([pool.submission(**changes)]))[0].outcome
