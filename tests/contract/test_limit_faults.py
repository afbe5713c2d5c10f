"""Ways in which limits were wrong once: each of these was admitted, forgotten, kept out or told falsely."""

from typing import Any

import pytest
from redis.asyncio import Redis

from customer_limits import in_force
from pool import TIERS, WIDE, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import TierLimit, Verdict
from scheduler.protocol.batches import Outcome
from scheduler.protocol.limits import CHUNK, LimitState, QuotaRestore, QuotaSpent
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission

HASH, LEASES, KEY = "rl:customer:customer", "rl:leases:customer", "rl:key:key"
SECOND_US = 1_000_000
HOUR_MS = 3_600_000


async def outcomes(pool: Pool, count: int = 1, **limits: Any) -> list[str]:
    """What `count` requests of one customer with these limits are told, in one call."""
    return [v.outcome.value for v in await pool.admit([pool.submission(**limits) for _ in range(count)])]


async def as_if_past(client: Redis, key: str, seconds: float) -> None:
    """As if the bucket had been written so long ago."""
    await client.hincrby(key, "at", -int(seconds * SECOND_US))


async def free_tier(pool: Pool, rate: float) -> Verdict:
    """One request of the tier free, whose ceiling is this now."""
    tiers = [*WIDE[:2], TierLimit("free", rate, max(1.0, rate), 1000, TIERS)]
    (verdict,) = await pool.admit([pool.submission("free")], tiers)
    return verdict


async def test_a_tier_that_had_nothing_for_a_moment_is_not_locked_out(pool: Pool) -> None:
    """Its bucket was written at a rate of 0, and a bucket that refuses is not written: it filled at 0 for ever."""
    await pool.client.set(pool.keys.epoch, 1)
    for rate in (1000.0, 0.0):
        assert (await free_tier(pool, rate)).outcome is Admission.ACCEPTED

    assert (await free_tier(pool, 1000.0)).outcome is Admission.TIER_LIMIT  # Nothing for the past,
    await as_if_past(pool.client, "rl:tier:free", 1)

    assert (await free_tier(pool, 1000.0)).outcome is Admission.ACCEPTED  # but from the raise on.


async def test_a_raised_rate_is_obeyed_by_an_empty_bucket(pool: Pool) -> None:
    """At the old rate the customer's next request would be let in after 11 days."""
    await pool.client.set(pool.keys.epoch, 1)
    low, high = {"rate": 1e-6, "burst": 1.0}, {"rate": 10.0, "burst": 10.0}
    assert await outcomes(pool, 2, **low) == ["accepted", "customer_limit"]
    assert await outcomes(pool, 2, **high) == ["customer_limit"] * 2
    await as_if_past(pool.client, HASH, 0.5)
    assert (await outcomes(pool, 10, **high)).count("accepted") == 5


async def test_a_raised_rate_is_obeyed_by_a_key_of_its_own(pool: Pool) -> None:
    """The same for a key that has a limit of its own."""
    await pool.client.set(pool.keys.epoch, 1)
    key_low, key_high = {"key_rate": 1e-6, "key_burst": 1.0}, {"key_rate": 10.0, "key_burst": 10.0}
    assert await outcomes(pool, 2, **key_low) == ["accepted", "key_limit"]
    assert await outcomes(pool, 1, **key_high) == ["key_limit"]
    await as_if_past(pool.client, KEY, 0.5)
    assert (await outcomes(pool, 10, **key_high)).count("accepted") == 5


async def test_raised_tokens_a_minute_are_obeyed_by_an_empty_budget(pool: Pool) -> None:
    """The same for the tokens."""
    await pool.client.set(pool.keys.epoch, 1)
    assert await outcomes(pool, 2, tokens=10, tokens_per_minute=1e-3) == ["accepted", "token_limit"]
    assert await outcomes(pool, 1, tokens=10, tokens_per_minute=6000) == ["token_limit"]
    await as_if_past(pool.client, HASH, 1)

    told = await outcomes(pool, 12, tokens=10, tokens_per_minute=6000)

    assert told.count("accepted") == 9  # 100 tokens less the debt of 10.


async def test_a_rate_that_was_low_for_a_while_gives_nothing_for_it(pool: Pool) -> None:
    """Lowered and raised again, and nobody could enter in between: it counted as if it had been high all the time."""
    await pool.client.set(pool.keys.epoch, 1)
    low, high = {"rate": 1e-6, "burst": 20.0}, {"rate": 100.0, "burst": 20.0}
    assert await outcomes(pool, 20, **high) == ["accepted"] * 20
    assert await outcomes(pool, 1, **low) == ["customer_limit"]
    await as_if_past(pool.client, HASH, 60)

    assert await outcomes(pool, 1, **high) == ["customer_limit"]


async def test_a_refusal_writes_nothing_once_the_rate_is_known(pool: Pool) -> None:
    """Only that a rate is another one is noted, once; what is left stays as it was."""
    await pool.client.set(pool.keys.epoch, 1)
    limits = {"tokens_per_minute": 1e-6, "tokens": 1, "burst": 1.0}
    await outcomes(pool, 1, rate=1e-9, **limits)
    assert await outcomes(pool, 1, rate=1e-6, **limits) == ["customer_limit"]
    noted = await pool.client.hgetall(HASH)

    assert await outcomes(pool, 3, rate=1e-6, **limits) == ["customer_limit"] * 3
    assert await outcomes(pool, 1, rate=1.005e-6, **limits) == ["customer_limit"]  # Another gateway, a little further.
    assert await outcomes(pool, 1, rate=1e-6, burst=1.0) == ["customer_limit"]  # And one that knows of no tokens.

    assert await pool.client.hgetall(HASH) == noted
    assert float(noted[b"tokens"]) < 0.01


async def test_a_lowered_rate_finds_what_was_spent(pool: Pool) -> None:
    """A bucket that was gone after a minute came back full, though at the rate it has now it holds next to nothing."""
    await pool.client.set(pool.keys.epoch, 1)
    limits = {"key_rate": 100.0, "key_burst": 20.0, "rate": 100.0, "burst": 20.0}
    await outcomes(pool, 20, **limits)

    assert await pool.client.pttl(HASH) > HOUR_MS - 60_000
    assert await pool.client.pttl(KEY) > HOUR_MS - 60_000


async def test_a_slow_bucket_is_kept_until_it_is_full(pool: Pool) -> None:
    """At one request in ten hours four days are not enough for a burst of ten."""
    await pool.client.set(pool.keys.epoch, 1)
    await outcomes(pool, 10, rate=1 / 36_000, burst=10.0)

    assert await pool.client.pttl(HASH) >= 100 * HOUR_MS


async def test_a_debt_is_kept_until_it_is_paid(pool: Pool) -> None:
    """What was used beyond the estimate may be hours of tokens: who waits for the bucket's end is not rid of them."""
    await pool.client.set(pool.keys.epoch, 1)
    (asked,) = submissions = [pool.submission(tokens=600, tokens_per_minute=600)]
    await pool.admit(submissions)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()

    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(asked.id, "", 50.0, 60_000, "v1", "x")])

    assert await pool.client.pttl(HASH) >= 1.6 * HOUR_MS  # 99 minutes of 600.


async def test_a_backend_that_counts_nonsense_shuts_nobody_out_for_days(pool: Pool) -> None:
    """A hundred times the estimate is the most that is believed."""
    await pool.client.set(pool.keys.epoch, 1)
    (asked,) = submissions = [pool.submission(tokens=10, tokens_per_minute=100)]
    await pool.admit(submissions)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()

    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(asked.id, "", 50.0, 2**53, "v1", "x")])

    assert float(await pool.client.hget(HASH, "budget")) == pytest.approx(90 - 990, abs=1)


async def test_what_is_known_of_quotas_outlives_a_view_without_them(pool: Pool) -> None:
    """A gateway that has not heard of the quota yet, or a row that is replaced, does not shorten its memory."""
    await outcomes(pool, 2, quotas=[("1year", 2)])
    before = await pool.client.pttl(HASH)

    await outcomes(pool, 1)

    assert await pool.client.pttl(HASH) >= before - 60_000


async def test_a_refund_keeps_quotas_that_were_told(pool: Pool) -> None:
    """A hash with restored quotas has no bucket yet: the refund of an earlier request adds none, and takes nothing."""
    (asked,) = submissions = [pool.submission(quotas=[("1year", 10)])]
    await pool.admit(submissions)
    await pool.client.delete(HASH)
    await QuotaRestore(pool.client, pool.keys).tell([QuotaSpent("customer", "1year", await pool.now_ms(), 8)])

    await pool.terminations.cancel([(asked.id, ErrorCode.WORKER_LOST)])

    fields = await pool.client.hgetall(HASH)
    assert list(fields) == [b"q:1year"]
    assert fields[b"q:1year"].split()[1] == b"7"


async def test_a_bucket_that_cannot_be_added_to_keeps_no_answer_back(pool: Pool) -> None:
    """Whatever stands in its place: requests end, are told and noted, all of their batch."""
    mine = [pool.submission(tokens=10, tokens_per_minute=1e6, quotas=[("1year", 9)]) for _ in range(2)]
    await pool.admit(mine)
    await pool.client.delete(HASH, LEASES)
    for key in (HASH, LEASES):
        await pool.client.set(key, "nonsense", px=60_000)
    await pool.form([("free", 2)])
    batch = await pool.claim_next()

    outcome = Outcome(mine[1].id, "invalid_output", 50.0, 0, "v1", "")
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(mine[0].id), outcome]) == 0

    assert await pool.states([s.id for s in mine]) == ["completed", "failed"]
    assert len((await pool.audit())[1]) == 2


async def test_many_ends_of_one_customer_in_one_call(pool: Pool) -> None:
    """More than Lua can hand to one command: all their places are free."""
    (asked,) = await pool.queue(1)
    ids = [f"req_{n}" for n in range(8200)]
    await pool.client.zadd(LEASES, dict.fromkeys(ids, 9e15))
    pipe = pool.client.pipeline(transaction=False)
    for request_id in ids:
        pipe.copy(pool.keys.request(asked), pool.keys.request(request_id))
    await pipe.execute()

    await pool.terminations.cancel([(request_id, ErrorCode.CANCELLED) for request_id in ids])

    assert await pool.client.zrange(LEASES, 0, -1) == [asked.encode()]


async def test_places_of_expired_leases_are_free_within_one_call(pool: Pool) -> None:
    """Two of three places were never given back: three may enter together all the same."""
    await pool.client.zadd(LEASES, {"gone1": 1, "gone2": 1})
    await pool.client.pexpire(LEASES, 60_000)

    assert await outcomes(pool, 4, max_concurrency=3) == ["accepted"] * 3 + ["concurrency"]
    assert await pool.client.zcard(LEASES) == 3


async def test_a_look_counts_no_expired_lease(pool: Pool) -> None:
    """People who ask are told who is under way, not who once was."""
    await pool.queue(2)
    await pool.client.zadd(LEASES, {"gone": 1})
    limits = in_force(1.0, 1.0, max_concurrency=9)

    assert (await LimitState(pool.client, pool.keys).read("customer", limits)).in_use == 2


async def test_who_has_spent_two_quotas_is_told_the_later_end(pool: Pool) -> None:
    """The new day does not help while the year is used up."""
    asked = [pool.submission(quotas=[("1day", 1), ("1year", 1)]) for _ in range(2)]
    verdicts = await pool.admit(asked)

    assert verdicts[1].outcome is Admission.QUOTA
    assert verdicts[1].retry_after_ms == verdicts[1].left.quotas[1][1]


async def test_a_clock_that_went_back_locks_nobody_out(pool: Pool) -> None:
    """A bucket that was written in what is the future now would not fill before it is the present again."""
    await pool.client.set(pool.keys.epoch, 1)
    limits = {"rate": 1.0, "burst": 8.0, "key_rate": 1.0, "key_burst": 8.0}
    await outcomes(pool, 8, **limits)
    for key in (HASH, KEY):
        await as_if_past(pool.client, key, -3600)

    told = await outcomes(pool, 4, **limits)

    assert told == ["accepted"] * 2 + ["key_limit"] * 2  # As after a loss of Redis: a quarter.


async def test_a_redis_that_is_emptied_while_it_is_told_is_told_again(pool: Pool) -> None:
    """The first part went to the one before: only the last one said that it was all."""

    class Emptied(QuotaRestore):
        async def _tell_some(self, chunk: Any, told: bytes) -> int:
            raised = await super()._tell_some(chunk, told)
            if not told:
                await pool.client.flushall()
                await pool.gateway_lives("g1")
            return raised

    restore, now = Emptied(pool.client, Keys()), await pool.now_ms()

    await restore.tell([QuotaSpent(f"c{n}", "1year", now, 1) for n in range(CHUNK + 1)])

    assert await restore.wanted()
