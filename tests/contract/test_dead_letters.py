"""Dead letters: what was given up for good is noted with its body and with the workers that it cost."""

import msgspec
import pytest

from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, decode_payload, encode_payload
from scheduler.protocol.audit_outbox import DeadLetterRecord, EndedRecord, decode_entry
from scheduler.protocol.batches import Outcome
from scheduler.redis_client.scripts import inner


async def lost(pool: Pool, times: int, **changes: object) -> str:
    """A request that so many workers were lost with, w0 first."""
    (request_id,) = await pool.queue(1, "paid", **changes)
    await pool.form([("paid", 1)])
    for i in range(times):
        await pool.claim_next(f"w{i}")
        await pool.reaped()
    return request_id


async def test_a_third_loss_leaves_a_letter(pool: Pool) -> None:
    """It names the request, its customer, why, how often it ran, who lost it, and holds the body to send it again."""
    body = encode_payload(Payload("tiny", "grüße " * 20, {"n": 1}))

    request_id = await lost(pool, 3, body=body)

    (letter,) = await pool.letters()
    assert (letter.id, letter.customer_id, letter.tier) == (request_id, "customer", "paid")
    assert (letter.error_code, letter.attempts, letter.worker_ids) == ("worker_lost", 3, ["w0", "w1", "w2"])
    assert inner(bytes(letter.body)) == body
    assert decode_payload(inner(bytes(letter.body))).input.startswith("grüße")
    assert await pool.client.lrange(pool.keys.dlq, 0, -1) == [request_id.encode()]
    assert await pool.client.hget(pool.keys.request(request_id), "body") == b""


async def test_two_losses_leave_none(pool: Pool) -> None:
    """It may still complete."""
    request_id = await lost(pool, 2)
    batch = await pool.claim_next()

    await pool.batches.finish(batch.batch_id, batch.token, [done(request_id)])

    assert await pool.letters() == []
    assert await pool.client.llen(pool.keys.dlq) == 0


async def test_an_input_that_breaks_the_model_leaves_a_letter(pool: Pool) -> None:
    """The bisection found it: it alone is dead, and the answer is stored as ever."""
    claimed = await pool.running(2)
    bad, good = (r.id for r in claimed.requests)

    stale = await pool.batches.finish(
        "b1", "token", [Outcome(bad, "poison_request", 3.0, 0, "v1", "It broke."), done(good)]
    )

    assert stale == 0
    (letter,) = await pool.letters()
    assert (letter.id, letter.error_code, letter.attempts, letter.worker_ids) == (bad, "poison_request", 1, ["w1"])
    assert inner(bytes(letter.body)) == claimed.requests[0].body
    replies = await pool.results.fetch([bad, good])
    assert [(r.error_code, r.output) for r in replies if r] == [("poison_request", "It broke."), ("", "olleh")]


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.INVALID_OUTPUT, ErrorCode.REQUEST_TOO_LARGE])
async def test_other_failures_leave_none(pool: Pool, code: ErrorCode) -> None:
    """Only what would break again is kept for a look."""
    claimed = await pool.running(1)

    await pool.batches.finish("b1", "token", [Outcome(claimed.requests[0].id, code, 3.0, 0, "v1", "")])

    assert await pool.letters() == []


async def test_a_request_that_ended_meanwhile_leaves_none(pool: Pool) -> None:
    """The first terminal writer wins here as well."""
    claimed = await pool.running(1)
    request_id = claimed.requests[0].id
    await pool.terminations.cancel([(request_id, ErrorCode.DEADLINE_EXCEEDED)])

    await pool.batches.finish("b1", "token", [Outcome(request_id, "poison_request", 3.0, 0, "v1", "")])

    assert await pool.letters() == []
    assert await pool.client.llen(pool.keys.dlq) == 0


async def test_each_letter_is_an_entry_of_its_own(pool: Pool) -> None:
    """A batch of large bodies in one entry could never be read in a call's time, and would stop the audit for ever."""
    claimed = await pool.running(3)
    await pool.client.delete(pool.keys.outbox)
    await pool.batches.finish(
        "b1", "token", [Outcome(r.id, "poison_request", 3.0, 0, "v1", "") for r in claimed.requests]
    )

    entries = await pool.client.lrange(pool.keys.outbox, 0, -1)

    assert [[type(r) for r in decode_entry(e)[0]] for e in reversed(entries)] == [[EndedRecord] * 3] + [
        [DeadLetterRecord]
    ] * 3


async def test_the_list_of_dead_letters_is_bounded(pool: Pool) -> None:
    """A flood of bad inputs cannot fill Redis: the oldest ids go."""
    await pool.client.rpush(pool.keys.dlq, *range(10_000))

    request_id = await lost(pool, 3)

    assert await pool.client.llen(pool.keys.dlq) == 10_000
    assert await pool.client.lindex(pool.keys.dlq, 0) == request_id.encode()


async def test_a_letter_without_a_body_can_be_read(pool: Pool) -> None:
    """Somebody deleted the field: the letter is still one."""
    claimed = await pool.running(1)
    await pool.client.hdel(pool.keys.request(claimed.requests[0].id), "body")

    await pool.batches.finish("b1", "token", [Outcome(claimed.requests[0].id, "poison_request", 3.0, 0, "v1", "")])

    (letter,) = await pool.letters()
    assert letter.body == msgspec.Raw(b"\xa0")
