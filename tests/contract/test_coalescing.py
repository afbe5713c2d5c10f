"""Equal requests: one run, and for each request its own row, audit records, deadline and reply.

The primary is queued and runs; its followers wait for its result. A small result can be cached for later requests.
"""

from typing import Any

import msgspec
import pytest

from contract.coalescing import (
    CLOSED,
    KEEP,
    claim_all,
    finish,
    finished_with_followers_left,
    ids,
    replies,
    served_from,
    submit,
)
from customer_limits import in_force
from pool import TIERS, WIDE, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import TierLimit, Verdict
from scheduler.protocol.audit_records import EndedRecord
from scheduler.protocol.followers import Followers
from scheduler.protocol.limits import LimitState
from scheduler.protocol.replies import decode_replies, decode_reply
from scheduler.states import Admission


async def verdict_of(pool: Pool, tiers: list[TierLimit] = WIDE, **changes: Any) -> Verdict:
    """The verdict of another equal request."""
    (verdict,) = await pool.admit([pool.submission(**KEEP | changes)], tiers)
    return verdict


async def test_one_request_runs_and_all_get_the_result(pool: Pool) -> None:
    """Followers have their own nonce and audit records, and no GPU time; also those that arrive while it runs."""
    first, second = await submit(pool, nonce="a" * 16), await submit(pool, nonce="b" * 16)
    assert await pool.depth("free") == 1
    batch = await claim_all(pool)
    third = await submit(pool)
    requests = first + second + third

    await finish(pool, batch)

    assert [r.id for r in batch.requests] == ids(first)
    primary, follower, late = await replies(pool, requests)
    assert primary is not None
    assert follower is not None
    assert late is not None
    assert (primary.output, primary.gpu_ms, primary.attempts, primary.nonce) == ("text", 50.0, 1, "a" * 16)
    assert (follower.output, follower.gpu_ms, follower.attempts, follower.nonce) == ("text", -1, 0, "b" * 16)
    assert (follower.batch_id, follower.worker_id, follower.tokens_used, follower.queue_ms) == ("b1", "w1", 5, -1)
    assert [each.served_from for each in (primary, follower, late)] == ["", "collapsed", "collapsed"]
    accepted, ended = await pool.audit()
    assert sorted(a.id for a in accepted) == sorted(e.id for e in ended) == sorted(ids(requests))
    assert await served_from(pool) == dict(zip(ids(requests), ("", "collapsed", "collapsed"), strict=True))
    assert await pool.client.zcard("rl:leases:customer") == 0


async def test_a_shared_run_is_paid_in_equal_parts(pool: Pool) -> None:
    """By the primary and each follower: in replies and audit, and by customers with a backlog also in the fair order."""
    wide = [msgspec.structs.replace(WIDE[2], places=2)]
    shared = [pool.submission(**KEEP | {"customer_id": f"c{n}"}) for n in range(4)]
    await pool.admit(shared, wide)
    for customer in ("c0", "c3"):
        await pool.admit([pool.submission(customer_id=customer) for _ in range(4)], wide)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()
    before = dict(await pool.client.zrange("backlogs:free", 0, -1, withscores=True))

    await pool.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)._replace(cost_ms=40.0)])

    assert [reply.cost_ms for reply in await replies(pool, shared) if reply] == [10.0] * 4
    _, ended = await pool.audit()
    assert [record.cost_ms for record in ended] == [10.0] * 4
    after = dict(await pool.client.zrange("backlogs:free", 0, -1, withscores=True))
    assert after[b"c3"] - before[b"c3"] == 10.0


async def test_each_gateway_gets_the_replies_of_its_requests(pool: Pool) -> None:
    """Also for a follower of another gateway's primary."""
    channel = pool.client.pubsub()
    await channel.subscribe(pool.keys.responses("g2"))
    await submit(pool)
    follower = pool.submission(**KEEP)
    await pool.admit([follower], gateway="g2")

    await finish(pool, await claim_all(pool))

    message = None
    while message is None or message["type"] != "message":
        message = await channel.get_message(timeout=5)
    assert [reply.id for reply in decode_replies(message["data"])] == [follower.id]
    await channel.aclose()


async def test_other_requests_are_not_coalesced(pool: Pool) -> None:
    """Another key, or none, is another run, and leaves no keys or fields of coalescing."""
    await submit(pool)
    await submit(pool, same="i")
    single, _ = await pool.queue(2)

    assert await pool.depth("free") == 4
    assert {b"same", b"told", b"lifted"} & set(await pool.client.hkeys(pool.keys.request(single))) == set()


async def test_a_result_is_cached(pool: Pool) -> None:
    """A later equal request gets it with the verdict, is not queued, and has both audit records, until the cache expires."""
    await submit(pool)
    await finish(pool, await claim_all(pool))
    later = pool.submission(**KEEP, nonce="c" * 16)

    (verdict,) = await pool.admit([later])

    reply = decode_reply(verdict.reply)
    assert (reply.id, reply.nonce, reply.output, reply.served_from) == (later.id, "c" * 16, "text", "cache")
    assert (reply.gpu_ms, reply.batch_id, reply.attempts, reply.model_version) == (-1, "", 0, "v1")
    assert await replies(pool, [later]) == [reply]
    assert await pool.states([later.id]) == ["completed"]
    assert (await served_from(pool))[later.id] == "cache"
    assert await pool.client.zcard("rl:leases:customer") == 0
    for key in (pool.keys.same("h"), pool.keys.same_kept):
        assert 55_000 < await pool.client.pttl(key) <= 60_000
    await pool.client.delete(pool.keys.same("h"))
    await submit(pool)
    assert await pool.depth("free") == 1


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"keep_answer_ms": 0}, {}),
        ({"model_version": "v2"}, {}),
        ({"model_version": ""}, {"version": ""}),
        ({}, {"version": "v2"}),
        ({}, {"output": "x" * 16_385}),
        ({}, {"code": "poison_request"}),
    ],
)
async def test_results_that_are_not_cached(pool: Pool, changes: dict[str, Any], outcome: dict[str, str]) -> None:
    """No cache time, another or an unknown model version, a large output, a failure."""
    await submit(pool, **changes)
    await finish(pool, await claim_all(pool), **outcome)

    assert await pool.client.exists(pool.keys.same("h")) == 0
    await submit(pool)
    assert await pool.depth("free") == 1


async def test_the_number_of_cached_results_is_bounded(pool: Pool) -> None:
    """The one that expires first is deleted."""
    await pool.client.hset(pool.keys.same("old"), "answer", "")
    await pool.client.pexpire(pool.keys.same("old"), 60_000)
    soon = await pool.now_ms() + 30_000
    await pool.client.zadd(pool.keys.same_kept, {"old": soon} | {f"o{i}": soon + 1 + i for i in range(9_999)})

    await submit(pool)
    await finish(pool, await claim_all(pool))

    assert await pool.client.zcard(pool.keys.same_kept) == 10_000
    assert await pool.client.exists(pool.keys.same("old")) == 0
    assert await pool.client.exists(pool.keys.same("h")) == 1


async def test_a_request_of_a_higher_tier_becomes_the_primary(pool: Pool) -> None:
    """The old primary and its followers follow it, and the old queue entry is dead."""
    old = await submit(pool, 2)
    higher = await submit(pool, tier="enterprise")
    assert await pool.states(ids(old + higher)) == ["riding", "riding", "queued"]

    await pool.form([("enterprise", 9), ("free", 9)])
    batch = await pool.claim_next()
    await finish(pool, batch)

    assert [r.id for r in batch.requests] == ids(higher)
    assert await pool.states(ids(old + higher)) == ["completed"] * 3
    assert await served_from(pool) == dict(zip(ids(higher + old), ("", "collapsed", "collapsed"), strict=True))


@pytest.mark.parametrize(("first", "then"), [("enterprise", "free"), ("paid", "paid")])
async def test_a_request_of_a_lower_or_equal_tier_follows(pool: Pool, first: str, then: str) -> None:
    """As does one of any tier once the primary runs."""
    primary = await submit(pool, tier=first)
    await submit(pool, tier=then)
    assert await pool.depth(first) == 1
    await claim_all(pool)
    await submit(pool, tier="enterprise")

    assert await pool.states(ids(primary)) == ["processing"]
    assert await pool.depth("enterprise") == 0


async def test_limits_of_the_gpus_do_not_apply_to_followers_and_cached_results(pool: Pool) -> None:
    """The tier's rate, the maximum depth and shedding."""
    await submit(pool)
    assert (await verdict_of(pool, CLOSED)).outcome is Admission.ACCEPTED
    assert (await verdict_of(pool, CLOSED, same="other")).outcome is Admission.TIER_LIMIT
    await finish(pool, await claim_all(pool))

    verdict = await verdict_of(pool, CLOSED)

    assert verdict.outcome is Admission.ACCEPTED
    assert verdict.reply


@pytest.mark.parametrize("is_cached", [False, True])
async def test_each_customer_is_charged(pool: Pool, *, is_cached: bool) -> None:
    """Requests and tokens, as for a run of its own; tokens are settled by the result."""
    limits = {"rate": 0.001, "burst": 1.0, "tokens_per_minute": 100.0, "tokens": 30, "customer_id": "payer"}
    await submit(pool)
    if is_cached:
        await finish(pool, await claim_all(pool))
    levels = {"tokens": 1, "budget": 100, "at": (await pool.now_ms()) * 1000}
    await pool.client.hset("rl:customer:payer", mapping=levels)

    assert (await verdict_of(pool, **limits)).outcome is Admission.ACCEPTED
    assert (await verdict_of(pool, **limits)).outcome is Admission.CUSTOMER_LIMIT
    if not is_cached:
        await finish(pool, await claim_all(pool))

    left = await LimitState(pool.client, pool.keys).read("payer", in_force(0.001, 1.0, tokens_per_minute=100.0))
    assert 95 <= left.buckets[1].left < 97


async def test_the_idempotency_key_of_a_follower(pool: Pool) -> None:
    """In progress while it waits, then its own reply is replayed."""
    await submit(pool)
    key = {"idempotency": "customer:k", "fingerprint": "f"}
    (follower,) = await submit(pool, **key)
    assert (await verdict_of(pool, **key)).outcome is Admission.IN_PROGRESS
    await finish(pool, await claim_all(pool))

    verdict = await verdict_of(pool, **key)

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, follower.id)


async def test_a_follower_is_reported_as_queued(pool: Pool) -> None:
    """Its stored state is internal."""
    _, follower = await submit(pool, 2)

    detail = await pool.results.request_detail(follower.id)

    assert detail is not None
    assert (detail.state, detail.tier, detail.attempts) == ("queued", "free", 0)


# The primary or a follower ends early


async def test_the_oldest_follower_replaces_a_cancelled_primary(pool: Pool) -> None:
    """It is first in the queue, and a scheduler is woken; the other followers follow it."""
    first, *followers = await submit(pool, 3)
    other = await pool.queue(1)
    await pool.client.delete(pool.keys.wake)

    await pool.terminations.cancel([(first.id, ErrorCode.CANCELLED)])

    assert await pool.states(ids([first, *followers])) == ["failed", "queued", "riding"]
    assert await pool.client.llen(pool.keys.wake) == 1
    batch = await claim_all(pool)
    assert [r.id for r in batch.requests] == [followers[0].id, *other]
    await finish(pool, batch)
    assert await pool.states(ids(followers)) == ["completed"] * 2


@pytest.mark.parametrize("field", ["qdl", "dl"])
async def test_a_follower_replaces_an_overdue_primary(pool: Pool, field: str) -> None:
    """Its own queue timeout does not apply, but a follower after its deadline ends."""
    first, late, follower = await submit(pool, 3)
    await pool.overdue([first.id], field)
    await pool.overdue([late.id], "dl")
    await pool.overdue([follower.id], "qdl")

    await pool.terminations.expire(TIERS)

    assert await pool.states([first.id, late.id, follower.id]) == ["failed", "failed", "queued"]
    assert [r.error_code for r in await replies(pool, [late]) if r] == ["deadline_exceeded"]
    assert [r.id for r in (await claim_all(pool)).requests] == [follower.id]


async def test_no_request_follows_an_overdue_primary(pool: Pool) -> None:
    """Otherwise a primary that never ends would block all later equal requests."""
    (first,) = await submit(pool)
    await pool.overdue([first.id], "dl")

    (second,) = await submit(pool)

    assert await pool.states([second.id]) == ["queued"]


async def test_a_follower_replaces_a_primary_of_a_lost_gateway(pool: Pool) -> None:
    """The primary ends before it reaches a GPU."""
    first = pool.submission(**KEEP)
    await pool.admit([first], gateway="lost")
    (follower,) = await submit(pool)
    await pool.aged([first.id, follower.id], 3000)

    await pool.form([("free", 9)])

    assert await pool.states([first.id, follower.id]) == ["failed", "queued"]


async def test_a_follower_replaces_a_primary_that_ended_in_direct_mode(pool: Pool) -> None:
    """Its output is not in Redis."""
    first, follower = await submit(pool, 2)
    accepted, _ = await pool.audit()
    end = EndedRecord(first.id, "completed", "", 1, 9.0, -1, 9.0, "", 1, "w", 1, 5, 5, "direct", delivered=True)

    await pool.adoption.adopt([(accepted[0], end)])

    assert await pool.states([first.id, follower.id]) == ["completed", "queued"]


async def test_resubmitted_requests_are_coalesced_again(pool: Pool) -> None:
    """After a loss of Redis one of them runs."""
    requests = await submit(pool, 3)
    await pool.client.flushall()

    verdicts = await pool.admit([msgspec.structs.replace(s, again=True) for s in requests], CLOSED)

    assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
    assert await pool.states(ids(requests)) == ["queued", "riding", "riding"]


# Failures and losses of the run


@pytest.mark.parametrize("code", ["poison_request", "invalid_request", "invalid_output"])
async def test_followers_get_a_failure_that_another_run_would_repeat(pool: Pool, code: str) -> None:
    """There is one dead letter, of the primary."""
    requests = await submit(pool, 3)
    await finish(pool, await claim_all(pool), code, "why")

    assert [r.error_code for r in await replies(pool, requests) if r] == [code] * 3
    assert [letter.id for letter in await pool.letters()] == ids(requests[:1]) * (code == "poison_request")


@pytest.mark.parametrize("losses", [1, 3])
async def test_followers_share_the_retries_of_the_primary(pool: Pool, losses: int) -> None:
    """A retry completes all of them; after the third loss all of them fail, with one dead letter."""
    requests = await submit(pool, 5)
    await pool.form([("free", 9)])
    for number in range(losses):
        batch = await pool.claim_next("w", f"t{number}")
        await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)
    if losses < 3:
        await finish(pool, await pool.claim_next("w2", "t2"))

    assert await pool.states(ids(requests)) == ["completed" if losses < 3 else "failed"] * 5
    assert await pool.pop() is None
    assert [letter.id for letter in await pool.letters()] == ids(requests[:1]) * (losses == 3)


async def test_a_promoted_follower_has_the_losses_of_its_primary(pool: Pool) -> None:
    """The deadline of a primary passed after a loss: the follower runs alone, and counts the next attempt."""
    first, next_primary, follower = await submit(pool, 3)
    fresh = await pool.queue(1)
    batch = await claim_all(pool)
    await pool.overdue([first.id], "dl")
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    batches = [await pool.claim_next("w", "t1"), await pool.claim_next("w", "t2")]

    assert sorted([r.id for r in b.requests] for b in batches) == sorted([[next_primary.id], fresh])
    assert [r.attempt for b in batches for r in b.requests if r.id == next_primary.id] == [2]
    for b in batches:
        await finish(pool, b)
    assert await pool.states([next_primary.id, follower.id]) == ["completed"] * 2


async def test_without_retry_budget_followers_fail(pool: Pool) -> None:
    """The run of a follower after a loss is a retry."""
    first, *followers = await submit(pool, 3)
    batch = await claim_all(pool)
    await pool.overdue([first.id], "dl")
    at_us = (await pool.now_ms() + 600_000) * 1000
    await pool.client.hset(pool.keys.retry_budget, mapping={"tokens": 0, "at": at_us})
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    assert [r.error_code for r in await replies(pool, followers) if r] == ["worker_lost"] * 2


# Many followers


async def test_many_followers_end_in_several_calls(pool: Pool) -> None:
    """A script ends 64; the worker repeats it until all have ended."""
    requests = [s for _ in range(5) for s in await submit(pool, 200)]
    batch = await claim_all(pool)

    await finish(pool, batch)

    assert [r.id for r in batch.requests] == [requests[0].id]
    assert set(await pool.states(ids(requests))) == {"completed"}
    assert await pool.client.exists(pool.keys.sharing) == 0
    assert list((await served_from(pool)).values()).count("collapsed") == 999


async def test_a_scheduler_ends_the_followers_of_a_lost_worker(pool: Pool) -> None:
    """With its next pass."""
    requests = await finished_with_followers_left(pool)
    assert (await pool.states(ids(requests))).count("riding") == 135

    await pool.terminations.expire(TIERS)

    assert set(await pool.states(ids(requests))) == {"completed"}


async def test_repeated_calls_end_each_follower_once(pool: Pool) -> None:
    """A follower that was cancelled meanwhile keeps its own end."""
    requests = await finished_with_followers_left(pool)
    await pool.terminations.cancel([(requests[-1].id, ErrorCode.CANCELLED)])
    followers = Followers(pool.client, pool.keys)

    assert [await followers.share() for _ in range(4)] == [True, True, False, False]

    assert (await pool.states(ids(requests)))[-1] == "failed"
    assert sorted(e.id for e in (await pool.audit())[1]) == sorted(ids(requests))


async def test_cancelled_followers_are_skipped_in_several_calls(pool: Pool) -> None:
    """At most 64 per call, until one is found that can run."""
    requests = await submit(pool, 150)
    for start in (1, 75):
        await pool.terminations.cancel([(i, ErrorCode.CANCELLED) for i in ids(requests)[start : start + 74]])

    await pool.terminations.cancel([(requests[0].id, ErrorCode.CANCELLED)])
    assert await pool.states([requests[-1].id]) == ["riding"]
    await pool.terminations.expire(TIERS)

    assert await pool.states([requests[-1].id]) == ["queued"]
