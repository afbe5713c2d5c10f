"""After a possible loss of Redis: gateways resubmit pending requests (`admit`) and send recent results again (`adopt`)."""

import msgspec
import pytest

from contract.builders import everything
from contract.coalescing import CLOSED
from pool import Pool, done
from scheduler.protocol.admission import Submission
from scheduler.protocol.adoption import MAX_PAIRS
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.cancellation import Reaped
from scheduler.states import Admission


def records(request_id: str, state: str = "completed", code: str = "") -> tuple[AcceptedRecord, EndedRecord]:
    """The records of a request that ended in direct mode."""
    accepted = AcceptedRecord(request_id, "customer", "key", "free", "tiny", "g1", 5, "")
    end = EndedRecord(request_id, state, code, 1, 60.0, -1, 50.0, "", 1, "w1", 1, 5, 5, "direct", delivered=True)
    return accepted, end


def resubmitted(submission: Submission) -> Submission:
    return msgspec.structs.replace(submission, again=True)


def keyed(pool: Pool) -> Submission:
    return pool.submission(idempotency="customer:k1", fingerprint="f1")


async def test_a_lost_request_is_stored_again_whatever_the_limits(pool: Pool) -> None:
    """It was evaluated and charged when it was first submitted."""
    lost = pool.submission(rate=0.0, burst=0.0)

    (verdict,) = await pool.admit([resubmitted(lost)], CLOSED, 0.001)

    assert verdict.outcome is Admission.ACCEPTED
    assert await pool.depth("free") == 1
    assert await pool.states([lost.id]) == ["queued"]
    accepted, _ = await pool.audit()
    assert [a.id for a in accepted] == [lost.id]
    assert [key async for key in pool.client.scan_iter("rl:*")] == [b"rl:leases:customer"]


async def test_a_known_request_is_a_duplicate(pool: Pool) -> None:
    """Redis had not lost it: queued, running or ended, nothing changes."""
    queued, running, ended = (pool.submission() for _ in range(3))
    for submission in (ended, running):
        await pool.admit([submission])
        await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [done(ended.id)])
    await pool.admit([queued])
    before = await everything(pool.client)

    verdicts = await pool.admit([resubmitted(s) for s in (queued, running, ended)])

    assert [v.outcome for v in verdicts] == [Admission.DUPLICATE] * 3
    assert await everything(pool.client) == before


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_resubmitted_request_claims_its_idempotency_key_if_it_is_free(pool: Pool, *, is_claimed: bool) -> None:
    """If a retry of the client claimed it meanwhile, both requests run, and the key stays with the retry."""
    lost, retry = keyed(pool), keyed(pool)
    if is_claimed:
        await pool.admit([retry])

    (verdict,) = await pool.admit([resubmitted(lost)])
    (next_verdict,) = await pool.admit([keyed(pool)])

    assert verdict.outcome is Admission.ACCEPTED
    assert next_verdict.outcome is Admission.IN_PROGRESS
    owner = retry if is_claimed else lost
    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == owner.id.encode()


async def test_adopted_records_of_unknown_requests_are_written_to_the_outbox(pool: Pool) -> None:
    """And nothing else, also when Redis has no memory left."""
    before = await everything(pool.client, pool.keys.outbox)
    pairs = [records("req_1"), records("req_2", "failed", "gpu_timeout")]

    await pool.client.config_set("maxmemory", 1)
    try:
        assert await pool.adoption.adopt(pairs) == 0
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert list(zip(*await pool.audit(), strict=True)) == pairs
    assert await everything(pool.client, pool.keys.outbox) == before


async def test_an_accepted_record_alone_ends_nothing(pool: Pool) -> None:
    """Of an unknown, queued, running or ended request."""
    running = (await pool.running(1)).requests[0].id
    queued, over = await pool.queue(2)
    await pool.adoption.adopt([records(over)])
    before = await everything(pool.client, pool.keys.outbox)
    accepted = [records(i)[0] for i in ("req_new", queued, running, over)]

    assert await pool.adoption.adopt([(accepted[0], None)]) == 0
    assert await pool.adoption.adopt([*((each, None) for each in accepted[1:]), records("req_other")]) == 0

    assert await everything(pool.client, pool.keys.outbox) == before
    found, ended = await pool.audit()
    assert [each for each in found if each in accepted][-4:] == accepted
    assert [each.id for each in ended] == [over, "req_other"]


async def test_a_queued_request_ends_with_the_delivered_result(pool: Pool) -> None:
    """It does not reach a GPU, and no message is published. A repeated call changes nothing."""
    adopted, other = await pool.queue(2)
    async with pool.client.pubsub() as channel:
        await channel.subscribe(pool.keys.responses("g1"))
        await channel.get_message(timeout=1)

        assert await pool.adoption.adopt([records(adopted)]) == 1

        assert await channel.get_message(timeout=0.05) is None
    row = await pool.client.hgetall(pool.keys.request(adopted))
    assert (row[b"state"], row.get(b"code"), row[b"body"]) == (b"completed", None, b"")
    assert await pool.adoption.adopt([records(adopted)]) == 0
    assert await pool.client.hgetall(pool.keys.request(adopted)) == row
    await pool.form([("free", 2)])
    assert [r.id for r in (await pool.claim_next()).requests] == [other]


async def test_a_running_request_leaves_its_batch(pool: Pool) -> None:
    """The outcome of its worker is stale; there is one end in the audit."""
    adopted, other = (r.id for r in (await pool.running(2)).requests)

    await pool.adoption.adopt([records(adopted, "failed", "deadline_exceeded")])

    assert await pool.inflight() == {"inflight:free:b1": [other]}
    assert await pool.batches.renew("b1", "token") is True
    assert await pool.batches.finish("b1", "token", [done(adopted), done(other)]) == 1
    assert await pool.states([adopted, other]) == ["failed", "completed"]
    _, ended = await pool.audit()
    assert [(e.id, e.error_code) for e in ended] == [(adopted, "deadline_exceeded"), (other, "")]


@pytest.mark.parametrize("how", ["finish", "claim", "reap"])
async def test_an_empty_batch_is_deleted(pool: Pool, how: str) -> None:
    """By its owner, by the next claim, or by the reaper."""
    ids = await pool.queue(2)
    await pool.form([("free", 2)])
    if how == "finish":
        await pool.claim_next()
    await pool.adoption.adopt([records(i) for i in ids])

    if how == "finish":
        assert await pool.batches.finish("b1", "token", [done(i) for i in ids]) == 2
    elif how == "claim":
        assert (await pool.claim_next()).requests == []
    else:
        await pool.expire_leases()
        assert await pool.terminations.reap(0) == Reaped(0, 0, 0, 0)

    assert await pool.client.exists(pool.keys.batch("b1"), pool.keys.leases) == 0


async def test_a_stored_end_is_not_overwritten(pool: Pool) -> None:
    """By a result that no client received: the first writer wins, and the auditor gets both records."""
    request_id = (await pool.running(1)).requests[0].id
    await pool.batches.finish("b1", "token", [done(request_id)])

    accepted, end = records(request_id, "failed", "deadline_exceeded")
    assert await pool.adoption.adopt([(accepted, msgspec.structs.replace(end, delivered=False))]) == 0

    assert await pool.states([request_id]) == ["completed"]
    _, ended = await pool.audit()
    assert [(e.state, e.delivered) for e in ended] == [("completed", False), ("failed", False)]


async def test_an_adopted_result_is_not_replayed(pool: Pool) -> None:
    """Its output is not in Redis: the next request with that Idempotency-Key runs."""
    first = keyed(pool)
    await pool.admit([first])
    await pool.adoption.adopt([records(first.id)])

    (verdict,) = await pool.admit([keyed(pool)])

    assert verdict.outcome is Admission.ACCEPTED


async def test_a_call_with_too_many_records_is_rejected(pool: Pool) -> None:
    """The error is raised before anything is sent."""
    with pytest.raises(ValueError, match="at most 256"):
        await pool.adoption.adopt([records("req_1")] * (MAX_PAIRS + 1))
    assert await pool.adoption.adopt([]) == 0
    assert await pool.client.llen(pool.keys.outbox) == 0


async def test_the_end_of_a_replayed_request_is_not_recorded_again(pool: Pool) -> None:
    """Regression: the row in the audit had the timeout of a suspended gateway, and its client the reply from another one."""
    first = keyed(pool)
    await pool.admit([first])
    await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [done(first.id)])
    (verdict,) = await pool.admit([keyed(pool)])
    assert verdict.outcome is Admission.REPLAYED

    assert await pool.adoption.adopt([records(first.id, "failed", "deadline_exceeded")]) == 0

    accepted, ended = await pool.audit()
    assert [end.state for end in ended] == await pool.states([first.id]) == ["completed"]
    assert [a.id for a in accepted] == [first.id] * 2
