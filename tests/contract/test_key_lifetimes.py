"""No key expires while another refers to it, no key is kept for ever, and a queued request takes little memory.

Jobs live for minutes and more, far longer than the keys of a batch after their last renewal.
"""

import pytest

from contract.builders import DAY_MS, LEASES
from contract.coalescing import claim_all, finished_with_followers_left, submit
from key_leaks import leaked_keys
from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import MAX_SUBMISSIONS, TierLimit
from scheduler.protocol.batches import BATCH_KEEP_MS
from scheduler.redis_client.keys import JOBS_GATEWAY
from tierlane_local.embedded.jemalloc import find_jemalloc

JOB_MS = 600_000
LONG = {"total_ms": JOB_MS, "queue_ms": JOB_MS}


async def least_ttl(pool: Pool, *patterns: str) -> int:
    """The least TTL, in ms, of all keys of these patterns; without patterns, of all keys of batches."""
    keys = [key for each in patterns or ("batch:*", "inflight:*") async for key in pool.client.scan_iter(each)]
    return int(min([await pool.client.pttl(key) for key in keys]))


async def almost_expire_batches(pool: Pool) -> None:
    """Make the keys of all batches expire in three seconds."""
    for pattern in ("batch:*", "inflight:*"):
        async for key in pool.client.scan_iter(pattern):
            await pool.client.pexpire(key, 3000)


@pytest.mark.parametrize("step", ["formed", "renewed", "split", "released after a loss"])
async def test_a_batch_outlives_its_members(pool: Pool, step: str) -> None:
    """In each state: if worker and scheduler are lost, the batch still exists at the deadline of its last member."""
    for limits in (LONG, {}, LONG):
        await pool.queue(1, **limits)
    await pool.form([("free", 3)])
    if step != "formed":
        batch = await pool.claim_next()
        assert await pool.batches.renew(batch.batch_id, batch.token)
    if step in {"split", "released after a loss"}:
        await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)
        assert len(await pool.inflight()) == 2
    if step == "released after a loss":
        again = await pool.claim_next()
        assert await pool.batches.release(again.batch_id, again.token)

    assert await least_ttl(pool) > JOB_MS


async def test_the_reaper_extends_the_keys_of_an_unclaimed_batch(pool: Pool) -> None:
    """However long the only worker loads its model."""
    (request_id,) = await pool.queue(1, **LONG)
    await pool.form([("free", 1)])
    await almost_expire_batches(pool)

    await pool.reaped()

    assert await least_ttl(pool) >= BATCH_KEEP_MS - 1000
    assert [r.id for r in (await pool.claim_next()).requests] == [request_id]


async def test_the_reaper_extends_the_keys_of_a_running_batch_after_a_suspension(pool: Pool) -> None:
    """The lease for a worker that could not renew extends the keys too."""
    await pool.running(1)
    await pool.client.set(pool.keys.reaped_at, await pool.now_ms() - 30_000)
    await almost_expire_batches(pool)
    await pool.expire_leases()

    assert (await pool.terminations.reap(0)).renewed == 1
    assert await least_ttl(pool) >= BATCH_KEEP_MS - 1000


async def test_the_batch_of_a_promoted_follower_outlives_it(pool: Pool) -> None:
    """A follower that runs in place of a lost primary is in a batch by itself."""
    first, follower = await submit(pool, 2, **LONG)
    await claim_all(pool)
    await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)

    await pool.terminations.cancel([(first.id, ErrorCode.DEADLINE_EXCEEDED)])

    batch = follower.id[4:]
    assert f"inflight:free:{batch}" in await pool.inflight()
    assert await least_ttl(pool, f"batch:{batch}", f"inflight:free:{batch}") > JOB_MS


async def test_the_list_of_followers_lives_as_long_as_each_of_them(pool: Pool) -> None:
    """A follower with a short deadline does not shorten it; nor does a new primary of a higher tier."""
    primary, *_ = await submit(pool, 2, **LONG)
    await submit(pool)
    assert await pool.client.pttl(pool.keys.followers(primary.id)) > JOB_MS

    (higher,) = await submit(pool, tier="enterprise")
    assert await pool.client.pttl(pool.keys.followers(higher.id)) > JOB_MS


async def test_a_result_lives_as_long_as_the_followers_that_need_it(pool: Pool) -> None:
    """Followers that the worker did not end wait for a scheduler, which may be unavailable."""
    primary = (await finished_with_followers_left(pool, **LONG))[0].id

    ttl_ms = await pool.client.pttl(pool.keys.followers(primary))
    for key in (pool.keys.sharing, pool.keys.request(primary)):
        assert await pool.client.pttl(key) >= ttl_ms - 1000


async def test_every_key_of_coalescing_expires(pool: Pool) -> None:
    """While requests wait, when some followers have ended, and when a reply is cached."""
    await finished_with_followers_left(pool)
    await submit(pool, 2, same="other")

    names = [pool.keys.same("h"), pool.keys.same("other"), pool.keys.sharing, pool.keys.same_kept]
    assert [key for key in names if await pool.client.pttl(key) <= 0] == []
    assert await leaked_keys(pool.client) == []


async def test_the_row_of_an_ended_request_does_not_live_until_its_deadline(pool: Pool) -> None:
    """With minutes left its result is kept for one; that of a job as long as before, since it is read later."""
    ended, job = pool.submission(**LONG), pool.submission(**LONG)
    await pool.admit([ended])
    await pool.admit([job], gateway=JOBS_GATEWAY)
    await pool.terminations.cancel([(each.id, ErrorCode.QUEUE_TIMEOUT) for each in (ended, job)])

    assert 50_000 < await pool.client.pttl(pool.keys.request(ended.id)) <= 60_000
    assert await pool.client.pttl(pool.keys.request(job.id)) > JOB_MS


async def test_an_idempotency_key_does_not_shorten_a_row(pool: Pool) -> None:
    """A job may live longer than its key."""
    total_ms = 2 * DAY_MS
    job = pool.submission(idempotency="customer:k", fingerprint="f", total_ms=total_ms, queue_ms=total_ms)

    await pool.admit([job])

    assert await pool.client.pttl(pool.keys.request(job.id)) > total_ms > DAY_MS


async def test_leases_of_one_call_live_as_long_as_the_longest(pool: Pool) -> None:
    """A request next to a job in one call does not shorten the lease of the job."""
    long_ms = 7_200_000
    job = pool.submission(max_concurrency=5, total_ms=long_ms, queue_ms=long_ms)

    await pool.admit([job, pool.submission(max_concurrency=5)])

    assert await pool.client.pttl(LEASES) > long_ms


COUNT = 20 * MAX_SUBMISSIONS
ALLOWED = 700
"""Bytes of a queued request in addition to its body."""

ROUNDED = 0.2 if find_jemalloc() else 0.0
"""How much jemalloc may add to a large block: its sizes are up to a quarter apart (jemalloc(3), "size classes")."""


@pytest.mark.parametrize(("length", "rounded"), [(30, 0.0), (500, 0.0), (1500, 0.0), (3000, ROUNDED)])
async def test_a_queued_request_takes_little_more_memory_than_its_body(pool: Pool, length: int, rounded: float) -> None:
    """Row, queue entry, lease and audit record, with ids of real length and all limits."""
    body = encode_payload(Payload("simulated", "x" * length, {}))
    quotas = [("1day", 1_000_000), ("1month", 10_000_000)]
    limits = {"max_concurrency": COUNT * 2, "tokens_per_minute": 1e12, "quotas": quotas, "tokens": 40}
    ids = {"customer_id": "0192f0c1-7a3b-7000-8000-000000000001", "api_key_id": "4tq8Zr1mXw", "trace_id": "a" * 32}
    wide = [TierLimit("free", 1e9, 1e9, COUNT * 2, ("free",))]

    async def admit() -> int:
        submissions = [pool.submission(body=body, **limits, **ids) for _ in range(MAX_SUBMISSIONS)]
        verdicts = await pool.admit(submissions, wide, gateway="gw-0192f0c17a3b70008000000000000001")
        assert {v.outcome for v in verdicts} == {"accepted"}
        return int((await pool.client.info("memory"))["used_memory"])

    before = await admit()  # with the scripts and buckets
    for _ in range(COUNT // MAX_SUBMISSIONS):
        after = await admit()

    assert (after - before) / COUNT <= len(body) * (1 + rounded) + ALLOWED
