"""What a client was told decides over an end that was noted at the same moment, and what of a stream was delivered is
charged: the row, the reply, the audit and the limits say the same.
"""

from typing import Any

import pytest

from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord
from scheduler.protocol.batches import ClaimedBatch, Outcome
from scheduler.protocol.cancellation import Cancellation

LIMITS: dict[str, Any] = {
    "quotas": [("1day", 5)],
    "tokens": 40,
    "tokens_per_minute": 1000.0,
    "rate": 0.001,
    "burst": 9.0,
}
CUSTOMER = "rl:customer:customer"


async def full(pool: Pool) -> None:
    """The customer's buckets are full, so that a test sees what each end leaves of them."""
    micros = await pool.now_ms() * 1000
    await pool.client.hset(CUSTOMER, mapping={"tokens": 9, "at": micros, "rate": 0.001, "budget": 1000, "pace": 1000})
    await pool.client.expire(CUSTOMER, 3600)


async def left(pool: Pool) -> tuple[int, int, int]:
    """What is left of the bucket of 9 requests, of 1000 tokens a minute and of the quota of 5, within rounding."""
    tokens, budget, quota = await pool.client.hmget(CUSTOMER, "tokens", "budget", "q:1day")
    return round(float(tokens)), round(float(budget), -1).__trunc__(), 5 - int((quota or b"0 0").split()[1])


async def running(pool: Pool, count: int = 1) -> ClaimedBatch:
    """A claimed batch of requests that were charged."""
    await full(pool)
    await pool.queue(count, **LIMITS)
    await pool.form([("free", count)])
    return await pool.claim_next()


async def last_end(pool: Pool, request_id: str) -> EndedRecord:
    """The newest end of a request that the outbox holds."""
    return [end for end in (await pool.audit())[1] if end.id == request_id][-1]


async def told(pool: Pool, request_id: str, code: ErrorCode, used: int = 0) -> None:
    """Its gateway has sent this code to the client."""
    await pool.terminations.cancel([Cancellation(request_id, code, told=True, used=used)])


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.WORKER_LOST])
async def test_a_result_that_nobody_got_is_revoked(pool: Pool, code: ErrorCode) -> None:
    """504 was sent while the finish landed, or a list failed for another member: all is given back, the row says why."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(member.id, "", 50.0, 30, "v1", "text")])
    assert await left(pool) == (8, 970, 4)

    await told(pool, member.id, code)

    assert await left(pool) == (9, 1000, 5)
    (reply,) = await pool.results.fetch([member.id])
    assert reply is not None
    assert (reply.state, reply.error_code, reply.tokens_used, reply.output) == ("failed", code, 0, "")
    assert await pool.states([member.id]) == ["failed"]
    end = await last_end(pool, member.id)
    assert (end.state, end.error_code, end.tokens_used, end.delivered) == ("failed", code, 0, True)
    assert (end.batch_id, end.worker_id, end.attempts, end.batch_size) == (batch.batch_id, "w1", 1, 1)


async def test_revoked_once(pool: Pool) -> None:
    """A call that is sent again gives nothing back twice."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [done(member.id)])
    for _ in range(3):
        await told(pool, member.id, ErrorCode.DEADLINE_EXCEEDED)

    assert await left(pool) == (9, 1000, 5)
    assert len((await pool.audit())[1]) == 2


async def test_the_clients_own_fault_is_revoked_without_a_refund(pool: Pool) -> None:
    """A list that one bad input ended: its other members ran, and are charged; the client got no answer of theirs."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(member.id, "", 50.0, 30, "v1", "text")])

    await told(pool, member.id, ErrorCode.POISON_REQUEST)

    assert await left(pool) == (8, 970, 4)
    assert (await last_end(pool, member.id)).error_code == "poison_request"


async def test_no_refund_of_another_request_changes_that(pool: Pool) -> None:
    """One call of a gateway ends many requests: what one of them gets back says nothing of the others of its customer."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(member.id, "", 50.0, 30, "v1", "text")])
    (other,) = await pool.queue(1, **LIMITS)
    assert await left(pool) == (7, 930, 3)

    await pool.terminations.cancel(
        [
            Cancellation(other, ErrorCode.WORKER_LOST, told=True),
            Cancellation(member.id, ErrorCode.POISON_REQUEST, told=True),
        ]
    )

    assert await left(pool) == (8, 970, 4)


async def test_a_failure_of_ours_is_given_back_once(pool: Pool) -> None:
    """It was, when it ended; that the client was told another code is noted, and nothing more."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(member.id, "invalid_output", 1.0, 0, "v1", "")])
    assert await left(pool) == (9, 1000, 5)

    await told(pool, member.id, ErrorCode.DEADLINE_EXCEEDED)

    assert await left(pool) == (9, 1000, 5)
    assert (await last_end(pool, member.id)).error_code == "deadline_exceeded"


async def test_what_was_not_told_changes_nothing(pool: Pool) -> None:
    """A last look before 504 finds the result, and the client gets it."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [done(member.id)])

    (reply,) = await pool.terminations.cancel([Cancellation(member.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert reply.state == "completed"


async def test_an_end_that_a_gateway_tells_again_revokes_too(pool: Pool) -> None:
    """After Redis was away: the spool says that the client was told a failure, and Redis has a result of its own run."""
    batch = await running(pool)
    (member,) = batch.requests
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(member.id, "", 50.0, 30, "v1", "text")])
    begun = AcceptedRecord(member.id, "customer", "key", "free", "tiny", "g1", 5, "")
    end = EndedRecord(member.id, "failed", "no_capacity", 1, 1, -1, -1, "", 0, "", 0, 0, 0, "direct", delivered=True)

    for _ in range(2):
        await pool.adoption.adopt([(begun, end)])

    assert await left(pool) == (9, 1000, 5)
    assert await pool.states([member.id]) == ["failed"]


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED])
async def test_what_a_stream_delivered_is_charged(pool: Pool, code: ErrorCode) -> None:
    """Its gateway ended it at its deadline, or its client left: the request counts, and the tokens until then."""
    batch = await running(pool)
    (member,) = batch.requests

    await pool.terminations.cancel([Cancellation(member.id, code, running=True, used=20)])

    assert await left(pool) == (8, 980, 4)
    end = await last_end(pool, member.id)
    assert (end.error_code, end.tokens_used) == (code, 20)


async def test_a_stream_that_its_model_ended_in_time_is_charged(pool: Pool) -> None:
    """The model process ended it at its deadline, with the tokens that it had used."""
    batch = await running(pool)
    (member,) = batch.requests

    outcome = Outcome(member.id, "deadline_exceeded", 50.0, 20, "v1", "")
    await pool.batches.finish(batch.batch_id, batch.token, [outcome])

    assert await left(pool) == (8, 980, 4)
    assert (await last_end(pool, member.id)).tokens_used == 20


@pytest.mark.parametrize("code", [ErrorCode.WORKER_LOST, ErrorCode.DEADLINE_EXCEEDED])
async def test_a_stream_that_we_lost_is_free(pool: Pool, code: ErrorCode) -> None:
    """A lost run, or a deadline before the first piece: nothing is charged."""
    batch = await running(pool)
    (member,) = batch.requests

    await pool.terminations.cancel([Cancellation(member.id, code, told=True)])

    assert await left(pool) == (9, 1000, 5)
    assert (await last_end(pool, member.id)).tokens_used == 0
