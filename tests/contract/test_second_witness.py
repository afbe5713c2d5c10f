"""The second witness: what gateways tell again when Redis may have lost it, by `admit` and by `adopt`."""

import msgspec
import pytest
from redis.asyncio import Redis

from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_PAIRS, TierLimit
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord
from scheduler.protocol.cancellation import Reaped
from scheduler.states import Admission

SHUT = [TierLimit("free", 0.0, 0.0, 0, ["free"], 0, 0)]


def pair(request_id: str, state: str = "completed", code: str = "") -> tuple[AcceptedRecord, EndedRecord]:
    """What a gateway told its client of a request that a worker ran past Redis."""
    begun = AcceptedRecord(request_id, "customer", "key", "free", "tiny", "g1", 5, "")
    end = EndedRecord(request_id, state, code, 1, 60.0, -1, 50.0, "", 1, "w1", 1, 5, 5, "direct", delivered=True)
    return begun, end


async def everything(client: Redis) -> dict[bytes, bytes]:
    return {key: await client.dump(key) async for key in client.scan_iter()}


async def test_a_lost_request_is_stored_again_whatever_the_limits_say(pool: Pool) -> None:
    """It was judged and paid for once: an empty bucket, a full queue and shedding do not stop it, nor does it pay."""
    lost = pool.submission(rate=0.0, burst=0.0)

    (verdict,) = await pool.admit([msgspec.structs.replace(lost, again=True)], SHUT, 0.001)

    assert verdict.outcome is Admission.ACCEPTED
    assert await pool.depth("free") == 1
    assert await pool.states([lost.id]) == ["queued"]
    accepted, _ = await pool.audit()
    assert [a.id for a in accepted] == [lost.id]
    assert [key async for key in pool.client.scan_iter("rl:*")] == [b"rl:leases:customer"]


async def test_telling_again_what_is_known_changes_nothing(pool: Pool) -> None:
    """Redis had not lost it after all: waiting, running or done, it is a duplicate."""
    waits, runs, ended = (pool.submission() for _ in range(3))
    for submission in (ended, runs):
        await pool.admit([submission])
        await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [done(ended.id)])
    await pool.admit([waits])
    before = await everything(pool.client)

    verdicts = await pool.admit([msgspec.structs.replace(s, again=True) for s in (waits, runs, ended)])

    assert [v.outcome for v in verdicts] == [Admission.DUPLICATE] * 3
    assert await everything(pool.client) == before


async def test_what_its_gateway_has_answered_is_not_stored_again(pool: Pool) -> None:
    """The deadline came while Redis was away, so that `cancel` left a stub: the late word does not run for nobody."""
    lost = pool.submission(again=True)
    await pool.terminations.cancel([(lost.id, ErrorCode.DEADLINE_EXCEEDED)])

    (verdict,) = await pool.admit([lost])

    assert verdict.outcome is Admission.DUPLICATE
    assert await pool.depth("free") == 0


async def test_an_empty_redis_serves_what_is_told_again(pool: Pool) -> None:
    """FLUSHALL: every pending request is told again under its id, runs, and is answered."""
    submissions = [pool.submission() for _ in range(3)]
    await pool.admit(submissions)
    await pool.client.flushall()

    await pool.admit([msgspec.structs.replace(s, again=True) for s in submissions])
    await pool.form([("free", 3)])
    batch = await pool.claim_next()

    assert [r.id for r in batch.requests] == [s.id for s in submissions]
    assert [r.attempt for r in batch.requests] == [1, 1, 1]


async def test_a_request_that_is_told_again_has_its_idempotency_key(pool: Pool) -> None:
    """After the loss of Redis its client is still told that it is in progress."""
    lost = pool.submission(idempotency="customer:k1", fingerprint="f1", again=True)
    await pool.admit([lost])

    (verdict,) = await pool.admit([pool.submission(idempotency="customer:k1", fingerprint="f1")])

    assert verdict.outcome is Admission.IN_PROGRESS
    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == lost.id.encode()


async def test_a_key_that_was_taken_meanwhile_stays_taken(pool: Pool) -> None:
    """The client was faster than the first gateway: both requests are answered, the key stays with the new one."""
    first = pool.submission(idempotency="customer:k1", fingerprint="f1")
    second = pool.submission(idempotency="customer:k1", fingerprint="f1")
    await pool.admit([second])

    (verdict,) = await pool.admit([msgspec.structs.replace(first, again=True)])

    assert verdict.outcome is Admission.ACCEPTED
    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()


async def test_a_full_redis_refuses_even_that(pool: Pool) -> None:
    """At the memory limit nothing is half written; the gateway still holds it and comes again."""
    await pool.client.config_set("maxmemory", 1)
    try:
        (verdict,) = await pool.admit([pool.submission(again=True)])
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert verdict.outcome is Admission.BACKPRESSURE
    assert await pool.depth("free") == 0


async def test_pairs_go_to_the_outbox_as_they_are(pool: Pool) -> None:
    """Redis knows nothing of them: the auditor gets beginning and end of each, and nothing else is written."""
    before = await everything(pool.client)
    pairs = [pair("req_1"), pair("req_2", "failed", "gpu_timeout")]

    assert await pool.adoption.adopt(pairs) == 0

    accepted, ended = await pool.audit()
    assert list(zip(accepted, ended, strict=True)) == pairs
    after = await everything(pool.client)
    del after[pool.keys.outbox.encode()]
    assert after == before


async def test_a_beginning_alone_ends_nothing(pool: Pool) -> None:
    """Unknown, waiting, running or done: the auditor gets the record, and Redis keeps what it has."""
    running = (await pool.running(1)).requests[0].id
    waits, over = await pool.queue(2)
    await pool.adoption.adopt([pair(over)])
    await pool.audit()
    before = await everything(pool.client)
    begun = [pair(i)[0] for i in ("req_new", waits, running, over)]

    assert await pool.adoption.adopt([(begun[0], None)]) == 0
    assert await pool.adoption.adopt([*((each, None) for each in begun[1:]), pair("req_other")]) == 0

    after = await everything(pool.client)
    del before[pool.keys.outbox.encode()], after[pool.keys.outbox.encode()]
    assert after == before
    accepted, ended = await pool.audit()
    assert [each for each in accepted if each in begun][-4:] == begun
    assert [each.id for each in ended] == [over, "req_other"]


async def test_a_waiting_request_ends_as_its_client_was_told(pool: Pool) -> None:
    """It was answered past Redis while it waited: it never reaches a GPU, and nobody gets a message."""
    told, other = await pool.queue(2)
    async with pool.client.pubsub() as channel:
        await channel.subscribe(pool.keys.responses("g1"))
        await channel.get_message(timeout=1)

        assert await pool.adoption.adopt([pair(told)]) == 1

        assert await channel.get_message(timeout=0.05) is None
    row = await pool.client.hgetall(pool.keys.request(told))
    assert (row[b"state"], row.get(b"code")) == (b"completed", None)
    assert row[b"body"] == b""
    await pool.form([("free", 2)])
    assert [r.id for r in (await pool.claim_next()).requests] == [other]


async def test_a_running_request_leaves_its_batch(pool: Pool) -> None:
    """The worker's late word on it is stale, on the others it counts; the audit has one end of it."""
    claimed = await pool.running(2)
    told, other = (r.id for r in claimed.requests)

    await pool.adoption.adopt([pair(told, "failed", "deadline_exceeded")])

    assert await pool.inflight() == {"inflight:free:b1": [other]}
    assert await pool.batches.renew("b1", "token") is True
    assert await pool.batches.finish("b1", "token", [done(told), done(other)]) == 1
    assert await pool.states([told, other]) == ["failed", "completed"]
    _, ended = await pool.audit()
    assert [(e.id, e.error_code) for e in ended] == [(told, "deadline_exceeded"), (other, "")]


async def test_a_running_batch_that_is_left_empty_is_closed_by_its_owner(pool: Pool) -> None:
    """Nobody else needs to look after it."""
    claimed = await pool.running(1)
    await pool.adoption.adopt([pair(claimed.requests[0].id)])

    assert await pool.batches.finish("b1", "token", [done(claimed.requests[0].id)]) == 1

    assert await pool.client.exists(pool.keys.batch("b1")) == 0
    assert await pool.client.zcard(pool.keys.leases) == 0


@pytest.mark.parametrize("popped", [False, True])
async def test_a_ready_batch_that_is_left_empty_goes(pool: Pool, *, popped: bool) -> None:
    """Claimed, it is empty; never claimed, the reaper drops it."""
    ids = await pool.queue(2)
    await pool.form([("free", 2)])
    await pool.adoption.adopt([pair(i) for i in ids])

    if popped:
        assert (await pool.claim_next()).requests == []
    else:
        await pool.expire_leases()
        assert await pool.terminations.reap(0) == Reaped(0, 0, 0, 0)

    assert await pool.client.exists(pool.keys.batch("b1")) == 0
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_an_end_that_stands_is_not_overwritten(pool: Pool) -> None:
    """Redis had the end already, and the client was told it or nothing: first writer wins, and the auditor gets the pair."""
    claimed = await pool.running(1)
    request_id = claimed.requests[0].id
    await pool.batches.finish("b1", "token", [done(request_id)])

    begun, end = pair(request_id, "failed", "deadline_exceeded")
    untold = msgspec.structs.replace(end, delivered=False)
    assert await pool.adoption.adopt([(begun, untold)]) == 0

    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert reply.state == "completed"
    _, ended = await pool.audit()
    assert [(e.state, e.delivered) for e in ended] == [("completed", False), ("failed", False)]


async def test_adopting_twice_is_adopting_once(pool: Pool) -> None:
    """The reply was lost and the call is made again: the state stays, the auditor folds the pair."""
    (request_id,) = await pool.queue(1)
    await pool.adoption.adopt([pair(request_id)])
    row = await pool.client.hgetall(pool.keys.request(request_id))

    assert await pool.adoption.adopt([pair(request_id)]) == 0

    assert await pool.client.hgetall(pool.keys.request(request_id)) == row


async def test_an_answer_that_is_not_here_is_not_replayed(pool: Pool) -> None:
    """It was given past Redis: the next request with that key runs, rather than being told an empty text."""
    first = pool.submission(idempotency="customer:k1", fingerprint="f1")
    await pool.admit([first])
    await pool.adoption.adopt([pair(first.id)])

    (verdict,) = await pool.admit([pool.submission(idempotency="customer:k1", fingerprint="f1")])

    assert verdict.outcome is Admission.ACCEPTED


async def test_a_full_redis_takes_pairs(pool: Pool) -> None:
    """They are what the audit would lack; the auditor drains them."""
    await pool.client.config_set("maxmemory", 1)
    try:
        await pool.adoption.adopt([pair("req_1")])
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert len((await pool.audit())[1]) == 1


async def test_a_call_with_too_many_pairs_is_refused(pool: Pool) -> None:
    """A caller's mistake is named before anything is sent; no pairs are no call."""
    with pytest.raises(ValueError, match="at most 256"):
        await pool.adoption.adopt([pair("req_1")] * (MAX_PAIRS + 1))
    assert await pool.adoption.adopt([]) == 0
    assert await pool.client.llen(pool.keys.outbox) == 0
