"""Equal requests in Redis: one run, and for each of them its own row, audit records, deadline and answer."""

from typing import Any

import pytest

from customer_limits import in_force
from key_leaks import leaked_keys
from pool import WIDE, Pool, done
from scheduler.protocol.admission import TierLimit, Verdict
from scheduler.protocol.limits import LimitState
from scheduler.protocol.replies import decode_replies, decode_reply
from scheduler.states import Admission
from sharing_story import KEEP, SHUT, ask, batch_of_all, finish, ids, served_from, stored, untold


async def test_one_of_them_runs_and_all_are_answered(pool: Pool) -> None:
    """One stands in the queue; the others have the answer, their own nonce, and no time of the GPU."""
    first, second = await ask(pool, nonce="a" * 16), await ask(pool, nonce="b" * 16)
    assert await pool.depth("free") == 1
    batch = await batch_of_all(pool)
    third = await ask(pool)

    await finish(pool, batch)

    assert [r.id for r in batch.requests] == ids(first)
    led, rode, late = await stored(pool, first + second + third)
    assert led is not None
    assert rode is not None
    assert late is not None
    assert (led.output, led.gpu_ms, led.attempts, led.nonce, led.served_from) == ("text", 50.0, 1, "a" * 16, "")
    assert (rode.output, rode.gpu_ms, rode.attempts, rode.nonce) == ("text", -1, 0, "b" * 16)
    assert (rode.batch_id, rode.worker_id, rode.tokens_used, rode.queue_ms) == (batch.batch_id, "w1", 5, -1)
    assert late.served_from == rode.served_from == "collapsed"


async def test_each_has_its_own_audit_records(pool: Pool) -> None:
    """A beginning and an end each, which says who was collapsed."""
    asked = await ask(pool, 3)
    await finish(pool, await batch_of_all(pool))

    begun, ends = await pool.audit()

    assert sorted(a.id for a in begun) == sorted(e.id for e in ends) == sorted(ids(asked))
    assert await served_from(pool) == dict(zip(ids(asked), ("", "collapsed", "collapsed"), strict=True))
    assert {e.state for e in ends} == {"completed"}
    assert await pool.client.zcard("rl:leases:customer") == 0


async def test_each_gateway_is_told_of_its_own(pool: Pool) -> None:
    """A rider's answer goes to the gateway that holds its connection."""
    channel = pool.client.pubsub()
    await channel.subscribe(pool.keys.responses("g2"))
    await ask(pool)
    rider = pool.submission(**KEEP)
    await pool.admit([rider], gateway="g2")

    await finish(pool, await batch_of_all(pool))

    message = None
    while message is None or message["type"] != "message":
        message = await channel.get_message(timeout=5)
    assert [reply.id for reply in decode_replies(message["data"])] == [rider.id]
    await channel.aclose()


async def test_others_share_nothing(pool: Pool) -> None:
    """Another name (another customer, model or input), or none, is another run."""
    await ask(pool)
    await ask(pool, same="i")
    await pool.queue(1)
    await pool.queue(1)

    assert await pool.depth("free") == 4


async def test_an_answer_is_kept_for_who_comes_later(pool: Pool) -> None:
    """It comes with the verdict; nothing is queued; the audit has both records at once."""
    await ask(pool)
    await finish(pool, await batch_of_all(pool))
    later = pool.submission(**KEEP, nonce="c" * 16)

    (verdict,) = await pool.admit([later])

    reply = decode_reply(verdict.reply)
    assert (reply.id, reply.nonce, reply.output, reply.served_from) == (later.id, "c" * 16, "text", "cache")
    assert (reply.gpu_ms, reply.batch_id, reply.attempts, reply.model_version) == (-1, "", 0, "v1")
    assert await stored(pool, [later]) == [reply]
    assert await pool.depth("free") == 0
    assert (await served_from(pool))[later.id] == "cache"
    assert await pool.client.zcard("rl:leases:customer") == 0
    assert await pool.states([later.id]) == ["completed"]


async def test_an_answer_is_kept_for_its_time(pool: Pool) -> None:
    """The key has that time to live, and so has the index of what is kept."""
    await ask(pool)
    await finish(pool, await batch_of_all(pool))

    for key in (pool.keys.same("h"), pool.keys.same_kept):
        assert 55_000 < await pool.client.pttl(key) <= 60_000
    await pool.client.delete(pool.keys.same("h"))  # Its time is up.
    await ask(pool)
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
async def test_what_is_not_kept(pool: Pool, changes: dict[str, Any], outcome: dict[str, str]) -> None:
    """Nothing where no time is said, the version is another one or not known, it is large, or it failed."""
    await ask(pool, **changes)
    await finish(pool, await batch_of_all(pool), **outcome)

    assert await pool.client.exists(pool.keys.same("h")) == 0
    await ask(pool)
    assert await pool.depth("free") == 1


async def test_the_number_of_kept_answers_is_bounded(pool: Pool) -> None:
    """The one that would end first makes way."""
    await pool.client.hset(pool.keys.same("old"), "answer", "")
    await pool.client.pexpire(pool.keys.same("old"), 60_000)
    soon = await pool.now_ms() + 30_000
    others = {f"o{i}": soon + 1 + i for i in range(9_999)}
    await pool.client.zadd(pool.keys.same_kept, {"old": soon} | others)

    await ask(pool)
    await finish(pool, await batch_of_all(pool))

    assert await pool.client.zcard(pool.keys.same_kept) == 10_000
    assert await pool.client.exists(pool.keys.same("old")) == 0
    assert await pool.client.exists(pool.keys.same("h")) == 1


async def test_a_higher_tier_lifts_the_run(pool: Pool) -> None:
    """It leads in its own queue; the old leader and its riders wait for it, and the old place is dead."""
    old = await ask(pool, 2)
    higher = await ask(pool, tier="enterprise")
    assert await pool.states(ids(old + higher)) == ["riding", "riding", "queued"]

    await pool.form([("enterprise", 9), ("free", 9)])
    batch = await pool.claim_next()
    await finish(pool, batch)

    assert [r.id for r in batch.requests] == ids(higher)
    assert await pool.states(ids(old + higher)) == ["completed"] * 3
    assert await served_from(pool) == dict(zip(ids(higher + old), ("", "collapsed", "collapsed"), strict=True))


@pytest.mark.parametrize(("first", "then"), [("enterprise", "free"), ("paid", "paid")])
async def test_a_lower_or_equal_tier_lifts_nothing(pool: Pool, first: str, then: str) -> None:
    """It rides; so does everybody once the run has left its queue."""
    led = await ask(pool, tier=first)
    await ask(pool, tier=then)
    assert await pool.depth(first) == 1
    await batch_of_all(pool)
    await ask(pool, tier="enterprise")

    assert await pool.states(ids(led)) == ["processing"]
    assert await pool.depth("enterprise") == 0


async def told(pool: Pool, tiers: list[TierLimit], **changes: Any) -> Verdict:
    (verdict,) = await pool.admit([pool.submission(**KEEP | changes)], tiers)
    return verdict


async def test_a_full_pool_goes_on_to_answer_who_needs_no_gpu(pool: Pool) -> None:
    """A tier's part of the capacity, its queue's cap and shedding ask nothing of riders and kept answers."""
    await ask(pool)
    assert (await told(pool, SHUT)).outcome is Admission.ACCEPTED
    assert (await told(pool, SHUT, same="another")).outcome is Admission.TIER_LIMIT
    await finish(pool, await batch_of_all(pool))

    verdict = await told(pool, SHUT)

    assert verdict.outcome is Admission.ACCEPTED
    assert verdict.reply


@pytest.mark.parametrize("kept", [False, True])
async def test_each_customer_pays_its_own_limits(pool: Pool, kept: bool) -> None:
    """Rate, tokens, concurrency and quota, as if it had run; tokens are settled by what the answer has."""
    limits = {"rate": 0.001, "burst": 1.0, "tokens_per_minute": 100.0, "tokens": 30, "customer_id": "payer"}
    await ask(pool)
    if kept:
        await finish(pool, await batch_of_all(pool))
    await pool.client.hset(
        "rl:customer:payer", mapping={"tokens": 1, "budget": 100, "at": (await pool.now_ms()) * 1000}
    )

    assert (await told(pool, WIDE, **limits)).outcome is Admission.ACCEPTED
    refused = await told(pool, WIDE, **limits)
    if not kept:
        await finish(pool, await batch_of_all(pool))

    assert refused.outcome is Admission.CUSTOMER_LIMIT
    left = await LimitState(pool.client, pool.keys).read("payer", in_force(0.001, 1.0, tokens_per_minute=100.0))
    assert 95 <= left.buckets[1].left < 97


async def test_an_idempotency_key_of_a_rider(pool: Pool) -> None:
    """While it rides it is under way; then its own answer is replayed."""
    await ask(pool)
    key = {"idempotency": "customer:k", "fingerprint": "f"}
    rider = pool.submission(**KEEP, **key)
    await pool.admit([rider])
    assert (await told(pool, WIDE, **key)).outcome is Admission.IN_PROGRESS
    await finish(pool, await batch_of_all(pool))

    verdict = await told(pool, WIDE, **key)

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, rider.id)


async def test_one_that_rides_is_queued_to_the_outside(pool: Pool) -> None:
    """Its state is nobody's business but the scripts'."""
    _, rider = await ask(pool, 2)

    detail = await pool.results.request_detail(rider.id)

    assert detail is not None
    assert (detail.state, detail.tier, detail.attempts) == ("queued", "free", 0)


async def test_every_key_of_it_has_an_end(pool: Pool) -> None:
    """While it waits, when it has been told in part, and when an answer is kept."""
    await untold(pool)
    await ask(pool, 2, same="other")

    names = [pool.keys.same("h"), pool.keys.same("other"), pool.keys.sharing, pool.keys.same_kept]
    assert [key for key in names if await pool.client.pttl(key) <= 0] == []
    assert await leaked_keys(pool.client) == []


async def test_a_call_of_others_does_nothing_more(pool: Pool) -> None:
    """Requests of models without `cache_ttl_s` leave no key of this behind, and no field."""
    batch = await pool.running(2)
    await pool.batches.finish(batch.batch_id, batch.token, [done(r.id) for r in batch.requests])

    found = [key async for key in pool.client.scan_iter() if key.startswith((b"same", b"riders", b"sharing"))]
    assert found == []
    fields = await pool.client.hkeys(pool.keys.request(batch.requests[0].id))
    assert {b"same", b"told", b"lifted"} & set(fields) == set()
