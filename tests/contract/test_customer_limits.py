"""The limits of a customer: tokens a minute, concurrency, quotas, the key's own; refunds, settling, shadow."""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

import ratelimit.limits
from customer_limits import in_force
from eventually import eventually
from pool import TIERS, WIDE, Pool, done
from ratelimit.limits import BUCKETS, Bucket, BucketKind, EffectiveLimits, LimitColumn, RemainingLimits, packed_kinds
from scheduler.errors import ErrorCode
from scheduler.protocol import admission
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.protocol.batches import Outcome
from scheduler.protocol.limits import LimitState
from scheduler.states import Admission

HASH, LEASES = "rl:customer:customer", "rl:leases:customer"


async def ask(pool: Pool, count: int = 1, **limits: Any) -> list[Verdict]:
    """`count` requests of one customer with these limits, in one call."""
    return await pool.admit([pool.submission(**limits) for _ in range(count)])


async def enter(pool: Pool, **limits: Any) -> Submission:
    """One request that is accepted."""
    submission = pool.submission(**limits)
    (verdict,) = await pool.admit([submission])
    assert verdict.outcome is Admission.ACCEPTED
    return submission


async def left(pool: Pool, **limits: Any) -> RemainingLimits:
    """What a look says."""
    return await LimitState(pool.client, pool.keys).read("customer", in_force(**limits), "key")


async def run(pool: Pool, ids: list[str], outcomes: list[Outcome]) -> None:
    """One batch from forming to its end."""
    await pool.form([("free", len(ids))])
    batch = await pool.claim_next()
    assert {r.id for r in batch.requests} == set(ids)
    await pool.batches.finish(batch.batch_id, batch.token, outcomes)


def outcomes(verdicts: list[Verdict]) -> list[str]:
    return [verdict.outcome.value for verdict in verdicts]


async def test_tokens_are_charged_by_the_estimate(pool: Pool) -> None:
    """A fresh budget is a quarter of a minute's worth; who does not fit is told when it would."""
    verdicts = await ask(pool, 4, tokens=10, tokens_per_minute=120)

    assert outcomes(verdicts) == ["accepted"] * 3 + ["token_limit"]
    assert [round(v.left.buckets[1].left) for v in verdicts] == [20, 10, 0, 0]
    assert verdicts[3].retry_after_ms == pytest.approx(5000, rel=0.05)  # 10 tokens at 2 a second
    assert verdicts[3].left.buckets[1].reset_ms == pytest.approx(60_000, rel=0.05)


async def test_tokens_are_settled_to_what_was_used(pool: Pool) -> None:
    """Less used comes back; more used is owed, and a debt keeps the next ones out."""
    limits = {"tokens": 10, "tokens_per_minute": 0.012}
    await pool.client.set(pool.keys.epoch, 1)  # Long ago: the budget is whole.
    little, much = await enter(pool, **limits), pool.submission(**limits)
    assert float(await pool.client.hget(HASH, "budget")) == pytest.approx(-9.988, abs=0.01)

    await run(pool, [little.id], [Outcome(little.id, "", 50.0, 3, "v1", "x")])
    assert float(await pool.client.hget(HASH, "budget")) == pytest.approx(-2.988, abs=0.01)
    (verdict,) = await pool.admit([much])

    assert verdict.outcome is Admission.TOKEN_LIMIT
    assert verdict.left.buckets[1].left < 0


async def test_a_backend_that_counts_no_tokens_leaves_the_estimate(pool: Pool) -> None:
    """Nothing used would be free for ever."""
    asked = await enter(pool, tokens=10, tokens_per_minute=120)

    await run(pool, [asked.id], [Outcome(asked.id, "", 50.0, 0, "v1", "x")])

    assert (await left(pool, tokens_per_minute=120)).buckets[1].left == pytest.approx(20, abs=1)


async def test_a_request_larger_than_a_minute_enters_when_the_minute_is_whole(pool: Pool) -> None:
    """It could never enter otherwise; its debt is paid by waiting."""
    await pool.client.set(pool.keys.epoch, 1)

    verdicts = await ask(pool, 2, tokens=1000, tokens_per_minute=60)

    assert outcomes(verdicts) == ["accepted", "token_limit"]
    assert verdicts[1].left.buckets[1].left == pytest.approx(-940, abs=1)
    assert verdicts[1].retry_after_ms == pytest.approx(1_000_000, rel=0.01)


async def test_concurrency_counts_who_is_under_way(pool: Pool) -> None:
    """Queued or running: a place is free again when a request ends, however it ends."""
    first = [await enter(pool, max_concurrency=3) for _ in range(3)]
    assert outcomes(await ask(pool, 1, max_concurrency=3)) == ["concurrency"]

    await pool.terminations.cancel([(first[0].id, ErrorCode.CANCELLED)])
    (verdict,) = await ask(pool, 1, max_concurrency=3)

    assert (verdict.outcome, verdict.left.in_use) == ("accepted", 3)
    assert outcomes(await ask(pool, 1, max_concurrency=3)) == ["concurrency"]


async def test_a_lease_ends_with_its_time(pool: Pool) -> None:
    """Whoever forgets it: half a second after the deadline the place is free, and what is left has a TTL."""
    await enter(pool, max_concurrency=1, total_ms=100, queue_ms=100)
    assert outcomes(await ask(pool, 1, max_concurrency=1)) == ["concurrency"]

    async def free() -> bool:
        return outcomes(await ask(pool, 1, max_concurrency=1, total_ms=100, queue_ms=100)) == ["accepted"]

    await eventually(free, "the place is free", timeout_s=3)
    assert await pool.client.zcard(LEASES) == 1
    assert 0 < await pool.client.pttl(LEASES) <= 601_000


async def test_cancelled_requests_leave_no_counter(pool: Pool) -> None:
    """A thousand clients that leave: no lease is left, and not even its key."""
    for _ in range(4):
        fresh = [pool.submission(max_concurrency=2000) for _ in range(250)]
        await pool.admit(fresh)
        await pool.terminations.cancel([(s.id, ErrorCode.CANCELLED) for s in fresh])

    assert await pool.client.exists(LEASES) == 0


async def test_a_quota_is_spent_and_keeps_what_was_spent(pool: Pool) -> None:
    """Another amount of the same period counts on; another period begins at nothing."""
    assert outcomes(await ask(pool, 3, quotas=[("1day", 2)])) == ["accepted", "accepted", "quota"]

    raised = await ask(pool, 2, quotas=[("1day", 3)])
    assert outcomes(raised) == ["accepted", "quota"]
    assert [v.left.quotas[0][0] for v in raised] == [0, 0]
    assert outcomes(await ask(pool, 1, quotas=[("1day", 1)])) == ["quota"]
    assert outcomes(await ask(pool, 1, quotas=[("1month", 1)])) == ["accepted"]


async def test_all_quotas_hold_and_a_refusal_spends_none(pool: Pool) -> None:
    """The tighter one refuses; the wider one is not charged for it."""
    both = [("1day", 1), ("1month", 5)]
    verdicts = await ask(pool, 3, quotas=both)

    assert outcomes(verdicts) == ["accepted", "quota", "quota"]
    assert [q[0] for q in verdicts[2].left.quotas] == [0, 4]
    day_ms, month_ms = (q[1] for q in verdicts[0].left.quotas)
    assert 0 < day_ms <= 86_400_000
    assert day_ms <= month_ms <= 31 * 86_400_000
    assert verdicts[1].retry_after_ms == pytest.approx(day_ms, abs=5000)
    assert await pool.client.pttl(HASH) >= month_ms


async def test_a_new_window_begins_at_nothing(pool: Pool) -> None:
    """What was spent of a past window says nothing of this one."""
    await ask(pool, 2, quotas=[("1day", 2)])
    window, spent = (await pool.client.hget(HASH, "q:1day")).split()
    assert spent == b"2"
    await pool.client.hset(HASH, "q:1day", f"{int(window) - 1} 2")

    assert outcomes(await ask(pool, 3, quotas=[("1day", 2)])) == ["accepted", "accepted", "quota"]


@pytest.mark.parametrize(
    ("code", "comes_back"),
    [
        (ErrorCode.WORKER_LOST, True),
        (ErrorCode.DEADLINE_EXCEEDED, True),
        (ErrorCode.NO_CAPACITY, True),
        (ErrorCode.CANCELLED, False),
    ],
)
async def test_a_failure_of_ours_gives_everything_back(pool: Pool, code: ErrorCode, *, comes_back: bool) -> None:
    """Requests, tokens, quota and the key's own limit; who left by itself has paid."""
    await pool.client.set(pool.keys.epoch, 1)  # Long ago: every bucket begins full.
    limits = {"rate": 1e-6, "burst": 8.0, "tokens_per_minute": 1e-4, "key_rate": 1e-6, "key_burst": 8.0}
    asked = await enter(pool, tokens=7, quotas=[("1year", 10)], **limits)

    await pool.terminations.cancel([(asked.id, code)])

    hash_ = {k.decode(): v.decode() for k, v in (await pool.client.hgetall(HASH)).items()}
    key_tokens = float(await pool.client.hget("rl:key:key", "tokens"))
    assert float(hash_["tokens"]) == pytest.approx(8 if comes_back else 7, abs=0.01)
    assert key_tokens == pytest.approx(8 if comes_back else 7, abs=0.01)
    assert float(hash_["budget"]) == pytest.approx(0 if comes_back else -7, abs=0.01)
    assert hash_["q:1year"].split()[1] == ("0" if comes_back else "1")


async def test_a_poisonous_input_is_paid_for(pool: Pool) -> None:
    """It used the GPU, and it is the client's own."""
    asked = await enter(pool, quotas=[("1year", 10)])

    await run(pool, [asked.id], [Outcome(asked.id, "poison_request", 50.0, 0, "v1", "")])

    assert (await pool.client.hget(HASH, "q:1year")).split()[1] == b"1"
    assert await pool.client.exists(LEASES) == 0


async def test_a_refund_makes_no_bucket(pool: Pool) -> None:
    """One that Redis forgot meanwhile is full, or judged by the epoch: nothing is added to nothing, and nothing leaks."""
    asked = await enter(pool, tokens=5, tokens_per_minute=1e6, quotas=[("1year", 10)])
    await pool.client.delete(HASH, LEASES)

    await pool.terminations.cancel([(asked.id, ErrorCode.WORKER_LOST)])

    assert await pool.client.exists(HASH, LEASES) == 0


async def test_keys_of_one_customer_share_its_limit(pool: Pool) -> None:
    """A second key is no second budget, and one key's own limit does not touch the other."""
    await pool.client.set(pool.keys.epoch, 1)
    own = {"key_rate": 1e-6, "key_burst": 2.0}
    verdicts = await pool.admit(
        [
            *(pool.submission(rate=1e-6, burst=5.0, api_key_id="a", **own) for _ in range(3)),
            *(pool.submission(rate=1e-6, burst=5.0, api_key_id="b") for _ in range(4)),
        ]
    )

    assert outcomes(verdicts) == ["accepted"] * 2 + ["key_limit"] + ["accepted"] * 3 + ["customer_limit"]
    assert [int(v.left.buckets[0].left) for v in verdicts[:3]] == [1, 0, 0]  # What the key's own limit leaves.


async def test_a_raised_rate_gives_nothing_for_the_past(pool: Pool) -> None:
    """The hour that passed at a low rate is not counted at the new one; nor does lowering keep the old one."""
    seconds, micros = await pool.client.time()
    hour_ago = (seconds - 3600) * 1_000_000 + micros
    mapping = {"tokens": "0", "at": str(hour_ago), "rate": "0.001"}
    await pool.client.hset(HASH, mapping=mapping)
    await pool.client.pexpire(HASH, 60_000)

    raised = await ask(pool, 6, rate=1.0, burst=1000.0)
    assert outcomes(raised) == ["accepted"] * 3 + ["customer_limit"] * 3  # 3.6

    await pool.client.hset(HASH, mapping=mapping | {"rate": "1000"})
    lowered = await ask(pool, 6, rate=0.001, burst=1000.0)
    assert outcomes(lowered) == ["accepted"] * 3 + ["customer_limit"] * 3


async def test_a_tier_in_shadow_lets_everybody_in_and_says_what_it_would_have_said(pool: Pool) -> None:
    """Nothing is charged for what would have been refused; the cap of the queue still holds."""
    shadow = [TierLimit("free", 1e6, 1e6, 6, ["free"], 3, shadow=True)]
    submissions = [pool.submission(rate=1e-6, burst=8.0, max_concurrency=50) for _ in range(8)]

    verdicts = await pool.admit(submissions, shadow)

    assert outcomes(verdicts) == ["accepted"] * 6 + ["queue_full"] * 2
    assert [v.shadowed for v in verdicts[:2]] == ["", ""]
    assert {v.shadowed for v in verdicts[2:6]} <= {"customer_limit", "shed"}
    assert verdicts[5].shadowed
    assert float(await pool.client.hget(HASH, "tokens")) >= 0
    assert await pool.client.zcard(LEASES) == 6


async def test_a_look_changes_nothing(pool: Pool, client: Redis) -> None:
    """It tells what admission would tell, and may be asked of a read-only replica."""
    limits = {"rate": 1e-6, "burst": 40.0, "tokens_per_minute": 1200, "max_concurrency": 5, "quotas": [("1day", 9)]}
    (verdict,) = await ask(pool, 1, tokens=100, **limits)
    before = {key: await client.dump(key) async for key in client.scan_iter()}

    seen = await left(pool, **limits)

    assert {key: await client.dump(key) async for key in client.scan_iter()} == before
    assert seen.buckets[0].left == pytest.approx(verdict.left.buckets[0].left, abs=0.1)
    assert seen.buckets[1].left == pytest.approx(verdict.left.buckets[1].left, abs=5)
    assert (seen.in_use, seen.quotas[0][0]) == (1, 8)


async def test_a_look_at_nobody_is_a_full_bucket_of_this_epoch(pool: Pool) -> None:
    """A customer that never came has what a first request would find."""
    seen = await left(pool, rate=1.0, burst=100.0, quotas=[("1month", 7)])

    assert seen.buckets[0].left == pytest.approx(25, abs=5)
    assert (seen.in_use, seen.quotas[0][0]) == (0, 7)


async def test_the_guaranteed_share_is_not_shed_for_a_flood_above(pool: Pool) -> None:
    """With a tenth of the capacity its own, free's line counts by its own pace, not by enterprise's whole queue."""
    for _ in range(2):
        await pool.queue(200, "enterprise")
    tiers = [*WIDE[:2], TierLimit("free", 1e6, 1e6, 1000, TIERS, 100, 1000, share=0.1)]

    first = await pool.admit([pool.submission("free") for _ in range(4)], tiers, 1000.0)
    later = await pool.admit([pool.submission("free") for _ in range(20)], tiers, 1000.0)

    assert outcomes(first) == ["accepted"] * 4
    assert {"shed", "accepted"} >= set(outcomes(later))
    assert outcomes(later).count("shed") >= 10
    assert await pool.depth("free") <= 10


async def test_shedding_rises_smoothly(pool: Pool) -> None:
    """Nobody at half of the limit, everybody at it, a part in between; the same request is told the same again."""
    shed_at = {}
    for depth in (50, 60, 75, 90, 100):
        await pool.client.flushall()
        await pool.queue(depth, "paid")
        tiers = [*WIDE[:2], TierLimit("free", 1e6, 1e6, 1000, TIERS, 100)]
        told = []
        for draw in range(0, 65536, 512):
            submission = pool.submission("free", id=f"req_{'0' * 28}{draw:04x}")
            (verdict,) = await pool.admit([submission], tiers)
            told.append(verdict.outcome is Admission.SHED)
            await pool.client.delete(pool.keys.queue("free"), pool.keys.request(submission.id))
        shed_at[depth] = sum(told) / len(told)

    assert shed_at == {
        50: 0.0,
        60: pytest.approx(0.04, abs=0.02),
        75: pytest.approx(0.25, abs=0.02),
        90: pytest.approx(0.64, abs=0.02),
        100: 1.0,
    }


async def test_nobody_enters_whose_wait_leaves_no_time_to_run(pool: Pool) -> None:
    """3.5 s predicted, 4 s in all: with a run of 400 ms there is time, with one of 600 ms there is none."""
    await pool.queue(35, "free")
    fits = await pool_admit_with_run(pool, 400)
    late = await pool_admit_with_run(pool, 600)

    assert (fits.outcome, late.outcome) == (Admission.ACCEPTED, Admission.WAIT)


async def test_an_idle_pool_takes_whom_it_may_be_too_slow_for(pool: Pool) -> None:
    """Runs measured as longer than all the time there is keep nobody out, or none would be measured again."""
    assert (await pool_admit_with_run(pool, 60_000)).outcome is Admission.ACCEPTED


async def pool_admit_with_run(pool: Pool, run_ms: int) -> Verdict:
    """One request with four seconds, at ten a second."""
    submission = pool.submission("free", total_ms=4000, queue_ms=4000)
    (verdict,) = await pool.admissions("g1").admit(WIDE, 10.0, [submission], 0, run_ms)
    return verdict


async def test_many_gateways_admit_no_more_than_one_bucket_holds(pool: Pool) -> None:
    """Four at once on one key: the script is the only one who counts."""
    await pool.client.set(pool.keys.epoch, 1)
    began = asyncio.get_running_loop().time()

    async def hammer(gateway: str) -> int:
        verdicts = [
            verdict
            for _ in range(30)
            for verdict in await pool.admit([pool.submission(rate=50.0, burst=20.0)], gateway=gateway)
        ]
        return outcomes(verdicts).count("accepted")

    admitted = sum(await asyncio.gather(*(hammer(f"g{n}") for n in range(4))))
    took_s = asyncio.get_running_loop().time() - began

    assert 20 <= admitted <= 20 + 50 * took_s


async def test_a_completed_request_frees_its_place_and_keeps_its_charge(pool: Pool) -> None:
    """The ordinary end."""
    await pool.client.set(pool.keys.epoch, 1)
    asked = await enter(pool, max_concurrency=1, quotas=[("1year", 5)], tokens=5, tokens_per_minute=1e-3)

    await run(pool, [asked.id], [done(asked.id)])

    assert await pool.client.exists(LEASES) == 0
    assert (await pool.client.hget(HASH, "q:1year")).split()[1] == b"1"


BYTES = BucketKind(
    "input-bytes",
    "input bytes per minute",
    outcome="token_limit",
    rate=LimitColumn("input_bytes_per_minute", "bigint", "", "", required=False),
    fields=("bytes", "bytes_rate"),
    cost="input_bytes",
)


@pytest.mark.parametrize(
    ("outcome", "left"), [(None, 0.0), (ErrorCode.WORKER_LOST, 80.0), (ErrorCode.POISON_REQUEST, 0.0)]
)
async def test_a_limit_that_is_only_listed_is_charged_and_refunded(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, outcome: ErrorCode | None, left: float
) -> None:
    """A third bucket, of which no script knows more than its entry: rejects, stays charged, comes back where we failed."""
    monkeypatch.setattr(admission, "KINDS", msgspec.msgpack.encode(packed_kinds(admission.COSTS, (*BUCKETS, BYTES))))
    monkeypatch.setitem(ratelimit.limits._NUMBER, BYTES.name, 3)
    await pool.client.set(pool.keys.epoch, 1)  # Long ago: the bucket is whole.
    limits = EffectiveLimits((*in_force(tokens_per_minute=1e6).buckets, Bucket(BYTES, 1e-3, 120.0)))

    def sized(input_bytes: int) -> Submission:
        return replace(pool.submission(), limits=limits, input_bytes=input_bytes)

    first, second, third = sized(40), sized(81), sized(80)
    verdicts = await pool.admit([first, second, third])
    assert outcomes(verdicts) == ["accepted", "token_limit", "accepted"]
    assert [round(v.left.buckets[2].left) for v in verdicts] == [80, 80, 0]

    await pool.form([("free", 2)])
    batch = await pool.claim_next()
    ends = [Outcome(first.id, "", 50.0, 3, "v1", "x"), Outcome(third.id, outcome or "", 50.0, 3, "v1", "x")]
    await pool.batches.finish(batch.batch_id, batch.token, ends)

    assert float(await pool.client.hget(HASH, "bytes")) == pytest.approx(left, abs=0.01)
