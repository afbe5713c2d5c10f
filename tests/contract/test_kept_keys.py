"""No key runs out while something refers to it: batches, riders, leases and rows outlive the requests that need them.

Jobs live for minutes and more, far longer than the time for which a batch's keys are kept after their last renewal.
"""

from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import BATCH_KEEP_MS
from sharing_story import ask, batch_of_all, untold

JOB_MS = 600_000
DAY_MS = 86_400_000
LONG = {"total_ms": JOB_MS, "queue_ms": JOB_MS}


async def shortest(pool: Pool, *patterns: str) -> int:
    """The least time to live, in ms, of all keys of these patterns; at least one key must exist."""
    found = [await pool.client.pttl(key) for each in patterns async for key in pool.client.scan_iter(each)]
    return int(min(found))


async def batch_keys(pool: Pool) -> int:
    """The same of all keys of all batches."""
    return await shortest(pool, "batch:*", "inflight:*")


async def almost_out(pool: Pool, *patterns: str) -> None:
    """As if these keys had been kept for all but the last seconds of their time."""
    for each in patterns:
        async for key in pool.client.scan_iter(each):
            await pool.client.pexpire(key, 3000)


async def test_a_formed_batch_outlives_its_members(pool: Pool) -> None:
    """With no worker that claims it and no scheduler, a batch is still there when its last member's time is over."""
    await pool.queue(1)
    await pool.queue(1, **LONG)
    await pool.form([("free", 2)])

    assert await batch_keys(pool) > JOB_MS


async def test_the_reaper_keeps_a_batch_that_nobody_claims(pool: Pool) -> None:
    """A batch whose lease it renews does not run out under it, however long the only worker loads its model."""
    (request_id,) = await pool.queue(1, **LONG)
    await pool.form([("free", 1)])
    await almost_out(pool, "batch:*", "inflight:*")

    await pool.reaped()

    assert await batch_keys(pool) >= BATCH_KEEP_MS - 1000
    assert [r.id for r in (await pool.claim_next()).requests] == [request_id]


async def test_the_reaper_keeps_a_running_batch_when_redis_stood_still(pool: Pool) -> None:
    """The lease that it gives a batch whose worker could not renew comes with time for the keys."""
    await pool.running(1)
    await pool.client.set(pool.keys.reaped_at, await pool.now_ms() - 30_000)
    await almost_out(pool, "batch:*", "inflight:*")
    await pool.expire_leases()

    assert (await pool.terminations.reap(0)).renewed == 1

    assert await batch_keys(pool) >= BATCH_KEEP_MS - 1000


async def test_a_renewal_never_shortens_what_a_batch_has(pool: Pool) -> None:
    """A worker that dies after its renewal, with no scheduler left, does not take jobs with it."""
    await pool.queue(1, **LONG)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()

    assert await pool.batches.renew(batch.batch_id, batch.token)

    assert await batch_keys(pool) > JOB_MS


async def test_the_parts_of_a_lost_batch_outlive_their_members(pool: Pool) -> None:
    """Halves are batches of their own, and live as long as the whole would have."""
    await pool.queue(2, **LONG)
    await pool.form([("free", 2)])
    await pool.claim_next()

    await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)

    assert len(await pool.inflight()) == 2
    assert await batch_keys(pool) > JOB_MS


async def test_a_suspect_that_is_handed_back_outlives_its_members(pool: Pool) -> None:
    """A batch that was lost before and released by a stopping worker is kept as long as before."""
    await pool.queue(1, **LONG)
    await pool.form([("free", 1)])
    await pool.claim_next()
    await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)
    again = await pool.claim_next()

    assert await pool.batches.release(again.batch_id, again.token)

    assert await batch_keys(pool) > JOB_MS


async def test_the_batch_of_an_heir_outlives_it(pool: Pool) -> None:
    """A rider that runs in the place of a leader whose worker was lost is in a batch by itself."""
    first, rider = await ask(pool, 2, **LONG)
    await batch_of_all(pool)
    await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)

    await pool.terminations.cancel([(first.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert f"inflight:free:{rider.id[4:]}" in await pool.inflight()
    assert await shortest(pool, f"batch:{rider.id[4:]}", f"inflight:free:{rider.id[4:]}") > JOB_MS


async def test_a_late_rider_does_not_shorten_the_list(pool: Pool) -> None:
    """A job waits for the run of an equal request; one that joins with seconds to live leaves the job's time alone."""
    leader, *_ = await ask(pool, 2, **LONG)
    await ask(pool, 1)

    assert await pool.client.pttl(pool.keys.followers(leader.id)) > JOB_MS


async def test_a_leader_that_is_overtaken_is_kept_in_the_list(pool: Pool) -> None:
    """A job that led rides on a request of a higher tier with seconds to live: its place lives as long as the job."""
    await ask(pool, 1, **LONG)
    (lifted,) = await ask(pool, 1, "enterprise")

    assert await pool.client.pttl(pool.keys.followers(lifted.id)) > JOB_MS


async def test_what_riders_are_owed_is_kept_as_long_as_they(pool: Pool) -> None:
    """The answer for riders that were not told yet waits for a scheduler for as long as they may."""
    asked = await untold(pool, **LONG)
    leader = asked[0].id
    kept_ms = await pool.client.pttl(pool.keys.followers(leader))
    for key in (pool.keys.sharing, pool.keys.request(leader)):
        assert await pool.client.pttl(key) >= kept_ms - 1000


async def test_an_idempotency_key_does_not_shorten_a_row(pool: Pool) -> None:
    """A job may live for longer than its key holds."""
    total_ms = 2 * DAY_MS
    job = pool.submission(idempotency="customer:k", fingerprint="f", total_ms=total_ms, queue_ms=total_ms)

    await pool.admit([job])

    assert await pool.client.pttl(pool.keys.request(job.id)) > total_ms > DAY_MS


async def test_leases_of_one_call_live_as_long_as_the_longest(pool: Pool) -> None:
    """A request beside a job in one call does not shorten the concurrency that the job holds."""
    long_ms = 7_200_000
    job = pool.submission(max_concurrency=5, total_ms=long_ms, queue_ms=long_ms)

    await pool.admit([job, pool.submission(max_concurrency=5)])

    assert await pool.client.pttl("rl:leases:customer") > long_ms
