"""The limits of a customer: buckets, concurrency, quotas and the key's own limit; charges, refunds, settlement."""

import random
import time
from typing import Any

import msgspec
import pytest

import ratelimit.limits
from contract.builders import (
    CUSTOMER,
    KEY,
    LEASES,
    accept,
    admit,
    everything,
    fill_buckets,
    outcomes,
    shift_bucket,
    spent,
)
from customer_limits import in_force
from eventually import eventually
from pool import TIERS, WIDE, Pool
from ratelimit.limits import BUCKETS, Bucket, BucketKind, EffectiveLimits, LimitColumn, RemainingLimits, packed_kinds
from scheduler.errors import ErrorCode
from scheduler.protocol import admission
from scheduler.protocol.admission import TierLimit
from scheduler.protocol.batches import Outcome
from scheduler.protocol.limits import LimitState

HOUR_MS = 3_600_000
MOST_TOKENS = 2**30 - 1


async def remaining(pool: Pool, **limits: Any) -> RemainingLimits:
    """The remaining limits, read without a charge."""
    return await LimitState(pool.client, pool.keys).read("customer", in_force(**limits), "key")


async def run(pool: Pool, *ends: Outcome) -> None:
    """Run the queued requests as one batch with these outcomes."""
    await pool.form([("free", len(ends))])
    batch = await pool.claim_next()
    assert {r.id for r in batch.requests} == {end.id for end in ends}
    assert await pool.batches.finish(batch.batch_id, batch.token, ends) == 0


async def tokens_left(pool: Pool) -> float:
    """The level of the customer's bucket of tokens."""
    return float(await pool.client.hget(CUSTOMER, "budget"))


async def test_a_customer_can_spend_its_burst_over_all_keys(pool: Pool) -> None:
    """A fresh bucket is a quarter full, is shared by all keys of the customer, and a rejection has a retry time."""
    verdicts = await pool.admit([pool.submission(rate=0.001, burst=20.0, api_key_id=f"key-{i}") for i in range(8)])

    assert outcomes(verdicts) == ["accepted"] * 5 + ["customer_limit"] * 3
    assert {round(v.left.buckets[0].left) for v in verdicts} == {0}
    assert verdicts[5].retry_after_ms == pytest.approx(1_000_000, rel=0.01)
    assert await pool.depth("free") == 5


async def test_a_key_can_have_a_limit_of_its_own(pool: Pool) -> None:
    """The limit of one key does not affect other keys, and the remaining requests are the lower of the two levels."""
    await fill_buckets(pool)
    own = [pool.submission(rate=1e-6, burst=5.0, api_key_id="a", key_rate=1e-6, key_burst=2.0) for _ in range(3)]
    verdicts = await pool.admit([*own, *(pool.submission(rate=1e-6, burst=5.0, api_key_id="b") for _ in range(2))])

    assert outcomes(verdicts) == ["accepted"] * 2 + ["key_limit"] + ["accepted"] * 2
    assert [round(v.left.buckets[0].left) for v in verdicts] == [0, 0, 0, 1, 1]
    assert await admit(pool, 2, rate=1e-6, burst=5.0, api_key_id="b") == ["accepted", "customer_limit"]


# Tokens


async def test_tokens_are_charged_by_the_estimate(pool: Pool) -> None:
    """A fresh bucket holds a quarter of a minute's tokens; a rejection has the time until the request fits."""
    verdicts = await pool.admit([pool.submission(tokens=10, tokens_per_minute=120) for _ in range(4)])

    assert outcomes(verdicts) == ["accepted"] * 3 + ["token_limit"]
    assert {round(v.left.buckets[1].left) for v in verdicts} == {0}
    assert verdicts[3].retry_after_ms == pytest.approx(5000, rel=0.05)  # 10 tokens at 2/s
    assert verdicts[3].left.buckets[1].reset_ms == pytest.approx(60_000, rel=0.05)


@pytest.mark.parametrize(
    ("used", "left"),
    [
        (3, 97.0),  # unused tokens are refunded
        (60, 40.0),
        (160, -60.0),  # more than estimated: a debt, which rejects the next requests
        (30_008, 100.0 - 30_008),  # whatever was estimated: it was delivered
        (2**53, 100.0 - MOST_TOKENS),  # a wrong count of a backend
        (0, 90.0),  # not counted: the estimate stays charged
    ],
)
async def test_tokens_are_settled_when_the_request_ends(pool: Pool, used: int, left: float) -> None:
    """The charge becomes the tokens that the request used."""
    await fill_buckets(pool)
    request = await accept(pool, tokens=10, tokens_per_minute=100)

    await run(pool, Outcome(request.id, "", 50.0, used, "v1", "x"))

    assert await tokens_left(pool) == pytest.approx(left, abs=1)
    expected = "accepted" if left > 10 else "token_limit"
    assert await admit(pool, tokens=10, tokens_per_minute=100) == [expected]


async def test_a_request_larger_than_the_bucket_is_accepted_when_it_is_full(pool: Pool) -> None:
    """Otherwise it could never be accepted; its debt rejects later requests."""
    await fill_buckets(pool)

    verdicts = await pool.admit([pool.submission(tokens=1000, tokens_per_minute=60) for _ in range(2)])

    assert outcomes(verdicts) == ["accepted", "token_limit"]
    assert verdicts[1].left.buckets[1].left == pytest.approx(-940, abs=1)
    assert verdicts[1].retry_after_ms == pytest.approx(1_000_000, rel=0.01)


# Changed rates. Regressions: each of these was accepted, forgotten or rejected wrongly once.


@pytest.mark.parametrize(
    ("old", "now", "old_rate", "accepted"),
    [
        (3600, 1.0, "0.001", 3),  # a raised rate adds nothing for the past: 3.6 in the hour at the old rate
        (3600, 0.001, "1000", 3),  # nor does the past keep the old rate
    ],
)
async def test_the_lower_rate_counts_for_the_past(
    pool: Pool, old: int, now: float, old_rate: str, accepted: int
) -> None:
    """A bucket that was written at another rate fills at the lower of the two."""
    at_us = (await pool.now_ms() - old * 1000) * 1000
    await pool.client.hset(CUSTOMER, mapping={"tokens": "0", "at": str(at_us), "rate": old_rate})
    await pool.client.pexpire(CUSTOMER, 60_000)

    assert (await admit(pool, 6, rate=now, burst=1000.0)).count("accepted") == accepted


async def test_changed_limits_add_no_burst(pool: Pool) -> None:
    """However rate and size change, no more requests are accepted than the first burst and the highest rate allow; a
    smaller size reduces the level.
    """
    assert await admit(pool, rate=0.0, burst=100.0) == ["accepted"]
    await pool.client.hset(CUSTOMER, "tokens", "100.000000")
    random.seed(20)
    accepted, began = 0, time.monotonic()
    for _ in range(60):
        rate, burst = random.choice([1.0, 5.0, 10.0]), random.choice([60.0, 100.0, 1000.0])
        accepted += (await admit(pool, 5, rate=rate, burst=burst)).count("accepted")
    assert 60 <= accepted <= 100 + 10.0 * (time.monotonic() - began + 0.01)

    await pool.client.hset(CUSTOMER, "tokens", "100.000000")
    assert (await admit(pool, 20, rate=0.0, burst=3)).count("accepted") == 3


async def test_after_a_loss_of_redis_buckets_are_a_quarter_full(pool: Pool) -> None:
    """Of customers and of tiers: otherwise every customer would have a full burst at once."""
    await admit(pool, rate=0.001, burst=100.0)
    await pool.client.flushall()

    assert (await admit(pool, 100, rate=0.001, burst=100.0)).count("accepted") == 25

    await pool.client.flushall()
    tiers = [*WIDE[:2], TierLimit("free", 0.001, 40, 1000, TIERS)]
    verdicts = await pool.admit([pool.submission(api_key_id=f"key-{i}") for i in range(40)], tiers)
    assert outcomes(verdicts).count("accepted") == 10


async def test_a_tier_with_a_rate_of_zero_recovers(pool: Pool) -> None:
    """A rejecting bucket was not written, so it filled at the rate 0 for ever."""
    await fill_buckets(pool)

    async def outcome(rate: float) -> str:
        tiers = [*WIDE[:2], TierLimit("free", rate, max(1.0, rate), 1000, TIERS)]
        return outcomes(await pool.admit([pool.submission("free")], tiers))[0]

    assert [await outcome(rate) for rate in (1000.0, 0.0, 1000.0)] == ["accepted", "accepted", "tier_limit"]
    await shift_bucket(pool.client, "rl:tier:free", 1)
    assert await outcome(1000.0) == "accepted"


@pytest.mark.parametrize(
    ("key", "low", "high", "limit", "seconds", "accepted"),
    [
        (CUSTOMER, {"rate": 1e-6, "burst": 1.0}, {"rate": 10.0, "burst": 10.0}, "customer_limit", 0.5, 5),
        (KEY, {"key_rate": 1e-6, "key_burst": 1.0}, {"key_rate": 10.0, "key_burst": 10.0}, "key_limit", 0.5, 5),
        (
            CUSTOMER,
            {"tokens": 10, "tokens_per_minute": 1e-3},
            {"tokens": 10, "tokens_per_minute": 6000},
            "token_limit",
            1,
            9,  # 100 tokens less the debt of 10
        ),
    ],
)
async def test_an_empty_bucket_fills_at_the_raised_rate(
    pool: Pool, key: str, low: dict[str, Any], high: dict[str, Any], limit: str, seconds: float, accepted: int
) -> None:
    """At the old rate the next request would have been accepted after days."""
    await fill_buckets(pool)
    assert await admit(pool, 2, **low) == ["accepted", limit]
    assert await admit(pool, 2, **high) == [limit] * 2
    await shift_bucket(pool.client, key, seconds)

    assert (await admit(pool, 12, **high)).count("accepted") == accepted


async def test_a_rate_that_was_low_for_some_time_counts_as_low(pool: Pool) -> None:
    """Lowered and raised again without an accepted request between: it counted as if it had been high all the time."""
    await fill_buckets(pool)
    low, high = {"rate": 1e-6, "burst": 20.0}, {"rate": 100.0, "burst": 20.0}
    assert await admit(pool, 20, **high) == ["accepted"] * 20
    assert await admit(pool, **low) == ["customer_limit"]
    await shift_bucket(pool.client, CUSTOMER, 60)

    assert await admit(pool, **high) == ["customer_limit"]


async def test_a_rejection_writes_only_a_changed_rate(pool: Pool) -> None:
    """The new rate is written once; small differences between gateways, and missing limits, write nothing."""
    await fill_buckets(pool)
    limits = {"tokens_per_minute": 1e-6, "tokens": 1, "burst": 1.0}
    await admit(pool, rate=1e-9, **limits)
    assert await admit(pool, rate=1e-6, **limits) == ["customer_limit"]
    before = await pool.client.hgetall(CUSTOMER)

    assert await admit(pool, 3, rate=1e-6, **limits) == ["customer_limit"] * 3
    assert await admit(pool, rate=1.005e-6, **limits) == ["customer_limit"]
    assert await admit(pool, rate=1e-6, burst=1.0) == ["customer_limit"]

    assert await pool.client.hgetall(CUSTOMER) == before
    assert float(before[b"tokens"]) < 0.01


async def test_a_clock_that_went_back_blocks_no_customer(pool: Pool) -> None:
    """A bucket that was written in the future counts as after a loss of Redis: a quarter full."""
    await fill_buckets(pool)
    limits = {"rate": 1.0, "burst": 8.0, "key_rate": 1.0, "key_burst": 8.0}
    await admit(pool, 8, **limits)
    for key in (CUSTOMER, KEY):
        await shift_bucket(pool.client, key, -3600)

    assert await admit(pool, 4, **limits) == ["accepted"] * 2 + ["key_limit"] * 2


@pytest.mark.parametrize(
    ("count", "limits", "least_ms"),
    [
        (20, {"key_rate": 100.0, "key_burst": 20.0, "rate": 100.0, "burst": 20.0}, HOUR_MS - 60_000),
        (10, {"rate": 1 / 36_000, "burst": 10.0}, 100 * HOUR_MS),  # until it is full
    ],
)
async def test_a_bucket_lives_until_it_is_full_and_at_least_an_hour(
    pool: Pool, count: int, limits: dict[str, Any], least_ms: int
) -> None:
    """If a bucket expired earlier, and its rate was reduced meanwhile, the customer would get a full burst again."""
    await fill_buckets(pool)
    await admit(pool, count, **limits)

    keys = [CUSTOMER, *([KEY] if "key_rate" in limits else [])]
    assert min([await pool.client.pttl(key) for key in keys]) > least_ms


async def test_a_debt_lives_until_it_is_paid(pool: Pool) -> None:
    """Tokens beyond the estimate may be a debt of hours, which the expiry of the bucket must not cancel."""
    await fill_buckets(pool)
    request = await accept(pool, tokens=600, tokens_per_minute=600)

    await run(pool, Outcome(request.id, "", 50.0, 60_000, "v1", "x"))

    assert await pool.client.pttl(CUSTOMER) >= 1.6 * HOUR_MS  # 99 minutes of 600 tokens


# Concurrency


async def test_concurrency_counts_requests_in_progress(pool: Pool) -> None:
    """Queued or running, jobs and lines of batches included: a place is free again when a request ends."""
    first = [await accept(pool, max_concurrency=3, background=number > 0) for number in range(3)]
    assert (
        await admit(pool, max_concurrency=3) == await admit(pool, max_concurrency=3, background=True) == ["concurrency"]
    )

    await pool.terminations.cancel([(first[0].id, ErrorCode.CANCELLED)])
    (verdict,) = await pool.admit([pool.submission(max_concurrency=3)])

    assert (verdict.outcome, verdict.left.in_use) == ("accepted", 3)
    assert await admit(pool, max_concurrency=3) == ["concurrency"]


async def test_a_lease_expires(pool: Pool) -> None:
    """Half a second after the deadline the place is free, even if the request never ended; its key has a TTL."""
    await accept(pool, max_concurrency=1, total_ms=100, queue_ms=100)
    assert await admit(pool, max_concurrency=1) == ["concurrency"]

    async def free() -> bool:
        return await admit(pool, max_concurrency=1, total_ms=100, queue_ms=100) == ["accepted"]

    await eventually(free, "the place is free", timeout_s=3)
    assert await pool.client.zcard(LEASES) == 1
    assert 0 < await pool.client.pttl(LEASES) <= 601_000


async def test_expired_leases_do_not_count(pool: Pool) -> None:
    """Two of three leases were never released: three requests are accepted in one call, and reads do not count them."""
    await pool.client.zadd(LEASES, {"gone1": 1, "gone2": 1})
    await pool.client.pexpire(LEASES, 60_000)

    assert (await remaining(pool, max_concurrency=9)).in_use == 0
    assert await admit(pool, 4, max_concurrency=3) == ["accepted"] * 3 + ["concurrency"]
    assert await pool.client.zcard(LEASES) == 3


async def test_many_requests_of_one_customer_can_end_in_one_call(pool: Pool) -> None:
    """More leases than one Redis command takes from Lua are released."""
    (source,) = await pool.queue(1)
    ids = [f"req_{n}" for n in range(8200)]
    await pool.client.zadd(LEASES, dict.fromkeys(ids, 9e15))
    pipe = pool.client.pipeline(transaction=False)
    for request_id in ids:
        pipe.copy(pool.keys.request(source), pool.keys.request(request_id))
    await pipe.execute()

    await pool.terminations.cancel([(request_id, ErrorCode.CANCELLED) for request_id in ids])

    assert await pool.client.zrange(LEASES, 0, -1) == [source.encode()]


# Ends and refunds


@pytest.mark.parametrize(
    ("code", "refunded"),
    [
        (ErrorCode.WORKER_LOST, True),
        (ErrorCode.DEADLINE_EXCEEDED, True),
        (ErrorCode.NO_CAPACITY, True),
        (ErrorCode.CANCELLED, False),
    ],
)
async def test_a_failure_of_the_service_refunds_everything(pool: Pool, code: ErrorCode, *, refunded: bool) -> None:
    """Requests, tokens, quota and the key's own limit; a cancelled request stays charged, without tokens."""
    await fill_buckets(pool)
    limits = {"rate": 1e-6, "burst": 8.0, "tokens_per_minute": 1e-4, "key_rate": 1e-6, "key_burst": 8.0}
    request = await accept(pool, tokens=7, quotas=[("1year", 10)], **limits)

    await pool.terminations.cancel([(request.id, code)])

    levels = [float(await pool.client.hget(key, "tokens")) for key in (CUSTOMER, KEY)]
    assert levels == [pytest.approx(8 if refunded else 7, abs=0.01)] * 2
    assert await tokens_left(pool) == pytest.approx(0, abs=0.01)
    assert await spent(pool, "1year") == (b"0" if refunded else b"1")


@pytest.mark.parametrize("code", ["", "poison_request"])
async def test_a_request_that_ran_stays_charged_and_frees_its_place(pool: Pool, code: str) -> None:
    """Completed, or failed because of its input."""
    request = await accept(pool, max_concurrency=1, quotas=[("1year", 5)], tokens=5, tokens_per_minute=1e3)

    await run(pool, Outcome(request.id, code, 50.0, 5, "v1", "x"))

    assert await pool.client.exists(LEASES) == 0
    assert await spent(pool, "1year") == b"1"


async def test_a_refund_creates_no_bucket(pool: Pool) -> None:
    """A bucket that is missing by now is full; a new one would have no TTL."""
    request = await accept(pool, tokens=5, tokens_per_minute=1e6, quotas=[("1year", 10)])
    await pool.client.delete(CUSTOMER, LEASES)

    await pool.terminations.cancel([(request.id, ErrorCode.WORKER_LOST)])

    assert await pool.client.exists(CUSTOMER, LEASES) == 0


BYTES = BucketKind(
    "input-bytes",
    "input bytes per minute",
    outcome="token_limit",
    rate=LimitColumn("input_bytes_per_minute", "bigint", "", "", required=False),
    fields=("bytes", "bytes_rate"),
    cost="input_bytes",
)


@pytest.mark.parametrize(
    ("code", "left"), [(None, 0.0), (ErrorCode.WORKER_LOST, 80.0), (ErrorCode.POISON_REQUEST, 0.0)]
)
async def test_a_new_kind_of_bucket_needs_only_its_entry(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, code: ErrorCode | None, left: float
) -> None:
    """A third bucket, which the scripts know only from its entry: it rejects, is charged and is refunded."""
    monkeypatch.setattr(admission, "KINDS", msgspec.msgpack.encode(packed_kinds(admission.COSTS, (*BUCKETS, BYTES))))
    monkeypatch.setitem(ratelimit.limits._NUMBER, BYTES.name, 3)
    await fill_buckets(pool)
    limits = EffectiveLimits((*in_force(tokens_per_minute=1e6).buckets, Bucket(BYTES, 1e-3, 120.0)))
    requests = [pool.submission(limits=limits, input_bytes=size) for size in (40, 81, 80)]

    verdicts = await pool.admit(requests)
    assert outcomes(verdicts) == ["accepted", "token_limit", "accepted"]
    assert {round(v.left.buckets[2].left) for v in verdicts} == {0}

    first, _, third = requests
    await run(
        pool,
        Outcome(first.id, "", 50.0, 3, "v1", "x"),
        Outcome(third.id, code or "", 50.0, 0 if code else 3, "v1", "x"),
    )
    assert float(await pool.client.hget(CUSTOMER, "bytes")) == pytest.approx(left, abs=0.01)


# Reads


async def test_a_read_of_the_limits_changes_nothing(pool: Pool) -> None:
    """It returns the same values as the last verdict."""
    limits = {"rate": 1e-6, "burst": 40.0, "tokens_per_minute": 1200, "max_concurrency": 5, "quotas": [("1day", 9)]}
    (verdict,) = await pool.admit([pool.submission(tokens=100, **limits)])
    before = await everything(pool.client)

    found = await remaining(pool, **limits)

    assert await everything(pool.client) == before
    assert found.buckets[0].left == pytest.approx(verdict.left.buckets[0].left, abs=0.1)
    assert found.buckets[1].left == pytest.approx(verdict.left.buckets[1].left, abs=5)
    assert (found.in_use, found.quotas[0][0]) == (1, 8)


async def test_the_limits_of_an_unknown_customer_are_those_of_its_first_request(pool: Pool) -> None:
    """A quarter of the burst, and the whole quota."""
    found = await remaining(pool, rate=1.0, burst=100.0, quotas=[("1month", 7)])

    assert found.buckets[0].left == pytest.approx(25, abs=5)
    assert (found.in_use, found.quotas[0][0]) == (0, 7)
