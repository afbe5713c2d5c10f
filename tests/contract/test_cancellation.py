"""`cancel`, `expire`, `stored`: requests that end without a worker. The first writer wins, unless the client got an error.

If a gateway sent an error to its client while the request ended otherwise in Redis, the error is authoritative: row,
reply, audit and limits are changed to match. Delivered tokens of a stream are charged.
"""

import asyncio
from typing import Any

import pytest

from contract.builders import CUSTOMER
from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.batches import Outcome
from scheduler.protocol.cancellation import STORED_KEEP_MS, Cancellation


async def test_a_queued_request_is_cancelled(pool: Pool) -> None:
    """It fails, its end is recorded, and its reply is returned. The queue is not searched for it, which would be O(length)."""
    request_id, _ = await pool.queue(2)
    await pool.client.config_resetstat()

    (reply,) = await pool.terminations.cancel([(request_id, ErrorCode.CANCELLED)])

    assert reply is not None
    assert (reply.state, reply.error_code) == ("failed", "cancelled")
    _, ended = await pool.audit()
    assert [(e.id, e.error_code, e.queue_ms) for e in ended] == [(request_id, "cancelled", -1)]
    assert "cmdstat_lrem" not in await pool.client.info("commandstats")


async def test_a_request_that_was_never_started_has_a_queue_timeout_at_its_deadline(pool: Pool) -> None:
    """If it waits for longer than its queue timeout, as without a scheduler; before that, it is the deadline."""
    (aged,) = await pool.overdue(await pool.queue(1))
    (young,) = await pool.queue(1)

    replies = await pool.terminations.cancel([(each, ErrorCode.DEADLINE_EXCEEDED) for each in (aged, young)])

    assert [reply.error_code for reply in replies if reply] == ["queue_timeout", "deadline_exceeded"]


async def test_a_running_request_is_not_cancelled(pool: Pool) -> None:
    """The batch is finished, and the gateway discards the result."""
    (member,) = (await pool.running(1)).requests

    assert await pool.terminations.cancel([(member.id, ErrorCode.CANCELLED)]) == [None]
    assert await pool.batches.finish("b1", "token", [done(member.id)]) == 0


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED])
async def test_a_running_request_can_be_ended(pool: Pool, code: ErrorCode) -> None:
    """At its deadline, or as a cancelled stream: its worker gets the ids that are left with its next renewal, and its own
    outcome of the ended request is stale.
    """
    first, second, third = (r.id for r in (await pool.running(3)).requests)
    assert await pool.batches.renew("b1", "token", 3) is True

    (reply,) = await pool.terminations.cancel([Cancellation(second, code, running=True)])

    assert reply is not None
    assert reply.error_code == code
    assert await pool.inflight() == {"inflight:free:b1": [first, third]}
    assert await pool.batches.renew("b1", "token", 3) == {first, third}
    assert await pool.batches.renew("b1", "token", 2) is True
    assert await pool.batches.renew("b1", "token") is True
    assert await pool.batches.renew("b1", "other", 2) is False
    assert await pool.batches.finish("b1", "token", [done(i) for i in (first, second, third)]) == 1
    assert await pool.states([first, second, third]) == ["completed", "failed", "completed"]
    _, ended = await pool.audit()
    assert [(each.id, each.error_code) for each in ended if each.error_code] == [(second, code)]


async def test_an_ended_request_is_not_retried(pool: Pool) -> None:
    """The worker of its batch is lost: only the other requests are retried."""
    gone, stays = (r.id for r in (await pool.running(2)).requests)
    await pool.terminations.cancel([(gone, ErrorCode.CANCELLED, True)])

    await pool.reaped()

    assert [request.id for request in (await pool.claim_next(token="again")).requests] == [stays]


async def test_a_stored_result_wins_over_a_deadline_that_was_not_sent(pool: Pool) -> None:
    """The gateway reads the result before it would send a timeout."""
    (member,) = (await pool.running(1)).requests
    await pool.batches.finish("b1", "token", [done(member.id, "there")])

    (reply,) = await pool.terminations.cancel([Cancellation(member.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert (reply.state, reply.output) == ("completed", "there")


@pytest.mark.parametrize("again", [False, True])
async def test_an_unknown_request_has_no_reply_and_is_not_admitted_later(pool: Pool, *, again: bool) -> None:
    """The client got an error while the call of admit was pending: when it arrives, the request must not run."""
    submission = pool.submission(again=again)
    assert await pool.terminations.cancel([(submission.id, ErrorCode.NO_CAPACITY)]) == [None]

    (verdict,) = await pool.admit([submission])

    assert verdict.outcome == "duplicate"
    assert await pool.depth("free") == 0
    assert await pool.audit() == ([], [])


async def test_expire_ends_overdue_requests_wherever_they_are_in_the_queue(pool: Pool) -> None:
    """Customers may have different queue timeouts; entries behind a waiting request stay until they are the oldest."""
    old = await pool.overdue(await pool.queue(2))
    (patient,) = await pool.queue(1)
    hasty = await pool.overdue(await pool.queue(2))

    assert await pool.terminations.expire(TIERS) == (4, 0)

    assert await pool.states([*old, patient, *hasty]) == ["failed", "failed", "queued", "failed", "failed"]
    assert await pool.depth("free") == 3


async def test_expire_removes_dead_entries(pool: Pool) -> None:
    """A cancelled id at the head of the queue is removed, and does not end twice."""
    ids = await pool.queue(2)
    await pool.terminations.cancel([(ids[0], ErrorCode.CANCELLED)])

    assert await pool.terminations.expire(TIERS) == (0, 1)
    assert len((await pool.audit())[1]) == 1


async def test_concurrent_ends_make_one_end(pool: Pool) -> None:
    """Cancel, deadline, expiry and forming race for the same requests."""
    ids = await pool.queue(20)
    await pool.overdue(ids[::2])

    await asyncio.gather(
        *(pool.terminations.cancel([(i, ErrorCode.CANCELLED)]) for i in ids),
        *(pool.terminations.cancel([(i, ErrorCode.DEADLINE_EXCEEDED)]) for i in ids),
        *(pool.terminations.expire(TIERS) for _ in range(5)),
        *(pool.form([("free", 5)]) for _ in range(5)),
    )

    _, ended = await pool.audit()
    assert sorted(e.id for e in ended) == sorted(ids)
    assert await pool.depth("free") == 0


async def test_stored_shortens_only_rows_that_have_ended(pool: Pool) -> None:
    """Queued and unknown requests, and keys of a wrong type, are not changed."""
    queued, damaged, ended = await pool.queue(3, total_ms=600_000)
    await pool.terminations.cancel([(ended, ErrorCode.CANCELLED)])
    await pool.client.set(pool.keys.request(damaged), "text", px=600_000)

    assert await pool.terminations.stored([queued, damaged, ended, "req_unknown"]) == 1

    ttls = [await pool.client.pttl(pool.keys.request(each)) for each in (queued, damaged, ended)]
    assert min(ttls[:2]) > 590_000
    assert 0 < ttls[2] <= STORED_KEEP_MS


# Revoked ends and partly delivered streams

LIMITS: dict[str, Any] = {
    "quotas": [("1day", 5)],
    "tokens": 40,
    "tokens_per_minute": 1000.0,
    "rate": 0.001,
    "burst": 9.0,
}


async def left(pool: Pool) -> tuple[int, int, int]:
    """What is left of the bucket of 9 requests, of 1000 tokens per minute, and of the quota of 5, rounded."""
    tokens, budget, quota = await pool.client.hmget(CUSTOMER, "tokens", "budget", "q:1day")
    return round(float(tokens)), round(float(budget), -1).__trunc__(), 5 - int((quota or b"0 0").split()[1])


async def running(pool: Pool) -> str:
    """A running request, batch `b1`, that was charged to full buckets."""
    at_us = await pool.now_ms() * 1000
    await pool.client.hset(CUSTOMER, mapping={"tokens": 9, "at": at_us, "rate": 0.001, "budget": 1000, "pace": 1000})
    await pool.client.expire(CUSTOMER, 3600)
    (request_id,) = await pool.queue(1, **LIMITS)
    await pool.form([("free", 1)])
    await pool.claim_next()
    return request_id


async def finish(pool: Pool, request_id: str, code: str = "", used: int = 30) -> None:
    await pool.batches.finish("b1", "token", [Outcome(request_id, code, 50.0, used, "v1", "text")])


async def last_end(pool: Pool, request_id: str) -> EndedRecord:
    """The newest audit record of its end."""
    return [end for end in (await pool.audit())[1] if end.id == request_id][-1]


@pytest.mark.parametrize(
    ("code", "after"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, (9, 1000, 5)),
        (ErrorCode.WORKER_LOST, (9, 1000, 5)),
        (ErrorCode.POISON_REQUEST, (8, 1000, 4)),  # caused by the client: the request is charged
    ],
)
async def test_a_result_that_the_client_did_not_get_is_revoked(
    pool: Pool, code: ErrorCode, after: tuple[int, int, int]
) -> None:
    """The client got an error while the finish arrived, or its list failed because of another member."""
    request_id = await running(pool)
    await finish(pool, request_id)
    assert await left(pool) == (8, 970, 4)

    await pool.terminations.cancel([Cancellation(request_id, code, delivered=True)])

    assert await left(pool) == after
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.state, reply.error_code, reply.tokens_used, reply.output) == ("failed", code, 0, "")
    assert await pool.states([request_id]) == ["failed"]
    end = await last_end(pool, request_id)
    assert (end.state, end.error_code, end.tokens_used, end.delivered) == ("failed", code, 0, True)
    assert (end.batch_id, end.worker_id, end.attempts, end.batch_size) == ("b1", "w1", 1, 1)


async def test_refunds_of_one_call_are_separate(pool: Pool) -> None:
    """Regression: the refund of another request of the customer in the same call changed that of a revoked one."""
    request_id = await running(pool)
    await finish(pool, request_id)
    (other,) = await pool.queue(1, **LIMITS)
    assert await left(pool) == (7, 930, 3)

    await pool.terminations.cancel(
        [
            Cancellation(other, ErrorCode.WORKER_LOST, delivered=True),
            Cancellation(request_id, ErrorCode.POISON_REQUEST, delivered=True),
        ]
    )

    assert await left(pool) == (8, 1000, 4)


async def test_what_was_delivered_of_a_failure_is_charged(pool: Pool) -> None:
    """It was refunded when it ended, but its client has received a part, or more than was counted."""
    request_id = await running(pool)
    await finish(pool, request_id, "gpu_timeout", 0)
    assert await left(pool) == (9, 1000, 5)

    for code, used, budget in ((ErrorCode.DEADLINE_EXCEEDED, 20, 980), (ErrorCode.WORKER_LOST, 50, 950)):
        await pool.terminations.cancel([Cancellation(request_id, code, delivered=True, used=used)])
        assert await left(pool) == (8, budget, 4)
        assert (await last_end(pool, request_id)).tokens_used == used


async def test_a_failure_is_refunded_once(pool: Pool) -> None:
    """It was refunded when it ended; the other code that the client got is recorded only."""
    request_id = await running(pool)
    await finish(pool, request_id, "invalid_output", 0)
    assert await left(pool) == (9, 1000, 5)

    await pool.terminations.cancel([Cancellation(request_id, ErrorCode.DEADLINE_EXCEEDED, delivered=True)])

    assert await left(pool) == (9, 1000, 5)
    assert (await last_end(pool, request_id)).error_code == "deadline_exceeded"


async def test_an_adopted_failure_revokes_too(pool: Pool) -> None:
    """After an outage of Redis: the client got a failure in direct mode, and Redis has the result of its own run."""
    request_id = await running(pool)
    await finish(pool, request_id)
    accepted = AcceptedRecord(request_id, "customer", "key", "free", "tiny", "g1", 5, "")
    end = EndedRecord(request_id, "failed", "no_capacity", 1, 1, -1, -1, "", 0, "", 0, 0, 0, "direct", delivered=True)

    for _ in range(2):
        await pool.adoption.adopt([(accepted, end)])

    assert await left(pool) == (9, 1000, 5)
    assert await pool.states([request_id]) == ["failed"]


@pytest.mark.parametrize(
    ("code", "used", "after"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, 20, (8, 980, 4)),  # delivered tokens are charged
        (ErrorCode.CANCELLED, 20, (8, 980, 4)),
        (ErrorCode.WORKER_LOST, 0, (9, 1000, 5)),
        (ErrorCode.DEADLINE_EXCEEDED, 0, (9, 1000, 5)),  # before the first increment
    ],
)
async def test_the_delivered_part_of_a_stream_is_charged(
    pool: Pool, code: ErrorCode, used: int, after: tuple[int, int, int]
) -> None:
    """The gateway ends the stream while it runs."""
    request_id = await running(pool)

    await pool.terminations.cancel([Cancellation(request_id, code, running=True, delivered=True, used=used)])

    assert await left(pool) == after
    end = await last_end(pool, request_id)
    assert (end.error_code, end.tokens_used) == (code, used)


async def test_a_stream_that_its_model_process_ended_at_the_deadline_is_charged(pool: Pool) -> None:
    """With the tokens that it used."""
    request_id = await running(pool)

    await finish(pool, request_id, "deadline_exceeded", 20)

    assert await left(pool) == (8, 980, 4)
    assert (await last_end(pool, request_id)).tokens_used == 20
