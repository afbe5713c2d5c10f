"""Equal requests in Redis: one run, and for each of them its own row, audit records, deadline and answer."""

from typing import Any

import msgspec
import pytest

from key_leaks import leaked_keys
from pool import TIERS, WIDE, Pool, done
from scheduler.admission import Submission, TierLimit, Verdict
from scheduler.audit import Ended
from scheduler.batches import ClaimedBatch, Outcome
from scheduler.errors import ErrorCode
from scheduler.limit_state import LimitsInForce, LimitState
from scheduler.replies import Reply, decode_replies, decode_reply
from scheduler.riders import Riders
from scheduler.states import Admission

KEEP = {"same": "h", "keep_answer_ms": 60_000, "model_version": "v1"}
SHUT = [TierLimit("free", 0.0, 0.0, 0, ["free"], 0, 0)]


async def ask(pool: Pool, count: int = 1, tier: str = "free", **changes: Any) -> list[Submission]:
    """Equal requests that are accepted, oldest first."""
    asked = [pool.submission(tier, **KEEP | changes) for _ in range(count)]
    verdicts = await pool.admit(asked)
    assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
    return asked


def ids(submissions: list[Submission]) -> list[str]:
    return [s.id for s in submissions]


async def batch_of_all(pool: Pool, worker: str = "w1", token: str = "token") -> ClaimedBatch:
    """Whatever waits, claimed as one batch."""
    await pool.form([(tier, 32) for tier in TIERS])
    return await pool.claim_next(worker, token)


async def finish(pool: Pool, batch: ClaimedBatch, code: str = "", output: str = "text", version: str = "v1") -> None:
    outcomes = [Outcome(member.id, code, 50.0, 5, version, output) for member in batch.requests]
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0


async def served_from(pool: Pool) -> dict[str, str]:
    """Where the audit says that each ended one's answer came from."""
    _, ends = await pool.audit()
    return {end.id: end.served_from for end in ends}


async def stored(pool: Pool, asked: list[Submission]) -> list[Reply | None]:
    return await pool.results.fetch(ids(asked))


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


async def test_a_leader_that_leaves_hands_over(pool: Pool) -> None:
    """Its own end is its own; the oldest rider is first in the queue, and a scheduler is woken for it."""
    first, *riders = await ask(pool, 3)
    other = await pool.queue(1)
    await pool.client.delete(pool.keys.wake)

    await pool.endings.cancel([(first.id, ErrorCode.CANCELLED)])

    assert await pool.states(ids([first, *riders])) == ["failed", "queued", "riding"]
    assert await pool.client.llen(pool.keys.wake) == 1
    batch = await batch_of_all(pool)
    assert [r.id for r in batch.requests] == [riders[0].id, *other]
    await finish(pool, batch)
    assert await pool.states(ids(riders)) == ["completed"] * 2


async def test_a_rider_that_leaves_ends_alone(pool: Pool) -> None:
    """Its deadline or its client's leaving is nobody else's."""
    first, gone, stays = await ask(pool, 3)

    (reply,) = await pool.endings.cancel([(gone.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert reply.error_code == "deadline_exceeded"
    await finish(pool, await batch_of_all(pool))
    assert await pool.states(ids([first, gone, stays])) == ["completed", "failed", "completed"]


async def test_when_all_have_left_nothing_runs(pool: Pool) -> None:
    """The last one's leaving ends the run."""
    asked = await ask(pool, 3)
    for each in asked:
        await pool.endings.cancel([(each.id, ErrorCode.CANCELLED)])

    await pool.form([("free", 9)])

    assert await pool.pop() is None
    assert await pool.client.exists(pool.keys.same("h")) == 0
    assert await leaked_keys(pool.client) == []


async def test_a_run_goes_on_when_its_leader_leaves(pool: Pool) -> None:
    """As every run whose client leaves: its riders get the answer."""
    first, rider = await ask(pool, 2)
    batch = await batch_of_all(pool)

    await pool.endings.cancel([(first.id, ErrorCode.CANCELLED)])
    await finish(pool, batch)

    assert await pool.states([rider.id]) == ["completed"]


@pytest.mark.parametrize("field", ["qdl", "dl"])
async def test_a_leader_whose_time_is_up_hands_over(pool: Pool, field: str) -> None:
    """A rider has a deadline of its own, and is not asked for its queue age: it waited in time."""
    first, rider = await ask(pool, 2)
    await pool.overdue([first.id], field)
    await pool.overdue([rider.id], "qdl")

    await pool.endings.expire(TIERS)

    assert await pool.states([first.id, rider.id]) == ["failed", "queued"]
    assert [r.id for r in (await batch_of_all(pool)).requests] == [rider.id]


async def test_riders_whose_time_is_up_are_passed_over(pool: Pool) -> None:
    """They end as what they are; the next one leads."""
    first, late, heir = await ask(pool, 3)
    await pool.overdue([late.id], "dl")

    await pool.endings.cancel([(first.id, ErrorCode.CANCELLED)])

    assert await pool.states([late.id, heir.id]) == ["failed", "queued"]
    (reply,) = await pool.results.fetch([late.id])
    assert reply is not None
    assert reply.error_code == "deadline_exceeded"


async def test_nobody_rides_on_one_whose_time_is_up(pool: Pool) -> None:
    """Whatever became of it: a leader that nobody ends must not hold up all that come after it."""
    (first,) = await ask(pool)
    await pool.overdue([first.id], "dl")

    (second,) = await ask(pool)

    assert await pool.states([second.id]) == ["queued"]


async def test_a_lifted_one_that_leads_again_runs_once(pool: Pool) -> None:
    """Its old place in the queue goes when it gets a new one."""
    (old,) = await ask(pool)
    (higher,) = await ask(pool, tier="enterprise")
    await pool.endings.cancel([(higher.id, ErrorCode.CANCELLED)])

    assert await pool.depth("free") == 1
    assert [r.id for r in (await batch_of_all(pool)).requests] == [old.id]


@pytest.mark.parametrize("code", ["poison_request", "invalid_request", "invalid_output"])
async def test_what_another_run_would_repeat_is_everybodys(pool: Pool, code: str) -> None:
    """One letter tells of a poison, not a thousand."""
    asked = await ask(pool, 3)
    await finish(pool, await batch_of_all(pool), code, "why")

    replies = await stored(pool, asked)

    assert [r.error_code for r in replies if r] == [code] * 3
    assert [letter.id for letter in await pool.letters()] == ids(asked[:1]) * (code == "poison_request")


async def test_a_lost_run_is_tried_again_for_all(pool: Pool) -> None:
    """The leader's retry is theirs."""
    asked = await ask(pool, 3)
    batch = await batch_of_all(pool)
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    await finish(pool, await pool.claim_next("w2", "t2"))

    assert await pool.states(ids(asked)) == ["completed"] * 3


async def test_what_kills_workers_kills_three(pool: Pool) -> None:
    """However many ride on it: with its last attempt all of them end."""
    asked = await ask(pool, 5)
    await pool.form([("free", 9)])
    for number in range(3):
        batch = await pool.claim_next("w", f"t{number}")
        await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    assert await pool.states(ids(asked)) == ["failed"] * 5
    assert await pool.pop() is None
    assert [letter.id for letter in await pool.letters()] == ids(asked[:1])


async def test_an_heir_inherits_the_losses(pool: Pool) -> None:
    """Time ran out for the leader after a loss: the next is a batch by itself, in the attempt after that."""
    first, heir, rider = await ask(pool, 3)
    fresh = await pool.queue(1)
    batch = await batch_of_all(pool)
    await pool.overdue([first.id], "dl")
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    batches = [await pool.claim_next("w", "t1"), await pool.claim_next("w", "t2")]

    assert sorted([r.id for r in b.requests] for b in batches) == sorted([[heir.id], fresh])
    (alone,) = [r for b in batches for r in b.requests if r.id == heir.id]
    assert alone.attempt == 2
    for b in batches:
        await finish(pool, b)
    assert await pool.states([heir.id, rider.id]) == ["completed"] * 2


async def test_no_heir_where_the_pool_can_afford_no_retry(pool: Pool) -> None:
    """It would be one: a wave of losses is not doubled by riders."""
    first, *riders = await ask(pool, 3)
    batch = await batch_of_all(pool)
    await pool.overdue([first.id], "dl")
    at_us = (await pool.now_ms() + 600_000) * 1000
    await pool.client.hset(pool.keys.retry_budget, mapping={"tokens": 0, "at": at_us})
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    assert await pool.states(ids(riders)) == ["failed"] * 2
    assert [r.error_code for r in await stored(pool, riders) if r] == ["worker_lost"] * 2


async def test_a_thousand_riders_are_told_a_few_a_call(pool: Pool) -> None:
    """A script tells 64; the worker goes on until all are told."""
    asked = [s for _ in range(5) for s in await ask(pool, 200)]
    batch = await batch_of_all(pool)

    await finish(pool, batch)

    assert [r.id for r in batch.requests] == [asked[0].id]
    assert set(await pool.states(ids(asked))) == {"completed"}
    assert await pool.client.exists(pool.keys.sharing) == 0
    assert list((await served_from(pool)).values()).count("collapsed") == 999


async def untold(pool: Pool, count: int = 200) -> list[Submission]:
    """Equal requests whose run has ended, and whose worker died before it told more than the first 64."""
    asked = await ask(pool, count)
    batch = await batch_of_all(pool)
    worker = pool.batches._riders

    async def die() -> None:
        return

    worker.share_all = die  # type: ignore[method-assign]
    await finish(pool, batch)
    del worker.share_all
    return asked


async def test_a_worker_that_dies_on_the_way_is_replaced(pool: Pool) -> None:
    """The scheduler's pass finds who is not told, and tells them."""
    asked = await untold(pool)
    assert (await pool.states(ids(asked))).count("riding") == 135

    await pool.endings.expire(TIERS)

    assert set(await pool.states(ids(asked))) == {"completed"}


async def test_two_who_tell_do_no_harm(pool: Pool) -> None:
    """Each rider is ended once; who left meanwhile has its own end."""
    asked = await untold(pool)
    await pool.endings.cancel([(asked[-1].id, ErrorCode.CANCELLED)])
    riders = Riders(pool.client, pool.keys)

    left = [await riders.share() for _ in range(4)]

    assert left == [True, True, False, False]
    assert (await pool.states(ids(asked)))[-1] == "failed"
    _, ends = await pool.audit()
    assert sorted(e.id for e in ends) == sorted(ids(asked))


async def test_many_dead_riders_cost_a_few_a_call(pool: Pool) -> None:
    """Who left is passed over, 64 a call, until one is found who leads."""
    asked = await ask(pool, 150)
    for start in (1, 75):
        gone = ids(asked)[start : start + 74]
        await pool.endings.cancel([(i, ErrorCode.CANCELLED) for i in gone])

    await pool.endings.cancel([(asked[0].id, ErrorCode.CANCELLED)])
    assert await pool.states([asked[-1].id]) == ["riding"]
    await pool.endings.expire(TIERS)

    assert await pool.states([asked[-1].id]) == ["queued"]


async def test_a_leader_of_a_dead_gateway_hands_over(pool: Pool) -> None:
    """It is dropped before the GPU, and those of living gateways are not."""
    first, rider = pool.submission(**KEEP), pool.submission(**KEEP)
    await pool.admit([first], gateway="dead")
    await pool.admit([rider])
    await pool.aged([first.id, rider.id], 3000)

    await pool.form([("free", 9)])

    assert await pool.states([first.id, rider.id]) == ["failed", "queued"]


async def test_one_that_was_answered_past_redis_hands_over(pool: Pool) -> None:
    """Its answer is not here: a rider runs."""
    first, rider = await ask(pool, 2)
    begun, _ = await pool.audit()
    end = Ended(first.id, "completed", "", 1, 9.0, -1, 9.0, "", 1, "w", 1, 5, 5, "direct", delivered=True)

    await pool.adoption.adopt([(begun[0], end)])

    assert await pool.states([first.id, rider.id]) == ["completed", "queued"]


async def test_what_is_told_again_shares_again(pool: Pool) -> None:
    """After a loss of Redis its gateways submit all that waits: one of them runs."""
    asked = await ask(pool, 3)
    await pool.client.flushall()

    verdicts = await pool.admit([msgspec.structs.replace(s, again=True) for s in asked], SHUT)

    assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
    assert await pool.states(ids(asked)) == ["queued", "riding", "riding"]


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
    asked = LimitsInForce(customer_id="payer", rate=0.001, burst=1.0, tokens_per_minute=100.0)
    left = await LimitState(pool.client, pool.keys).read(asked)
    assert 95 <= left.tokens_left < 97


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
