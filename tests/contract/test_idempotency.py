"""Idempotency keys in `admit`: one answer for one key and body, whichever gateway is asked, for a day."""

from typing import Any

import pytest
from redis.asyncio import Redis

from pool import WIDE, Pool, done
from scheduler.admission import Submission, Verdict
from scheduler.batches import Outcome
from scheduler.errors import ErrorCode
from scheduler.states import Admission

DAY_MS = 86_400_000


def keyed(pool: Pool, value: str = "customer:k1", fingerprint: str = "f1", **changes: Any) -> Submission:
    """A submission whose client sent an Idempotency-Key."""
    return pool.submission(idempotency=value, fingerprint=fingerprint, **changes)


async def told(pool: Pool, submission: Submission) -> Verdict:
    (verdict,) = await pool.admit([submission])
    return verdict


async def ended(pool: Pool, submission: Submission, code: str) -> None:
    """Let it run to its end."""
    await pool.form([(submission.tier, 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(submission.id, code, 3.0, 0, "v1", "text")])


async def everything(client: Redis) -> dict[bytes, bytes]:
    return {key: await client.dump(key) async for key in client.scan_iter()}


async def test_the_first_one_takes_the_key(pool: Pool) -> None:
    """It is admitted as any other; key and request are kept for a day, to be replayed."""
    first = keyed(pool)

    assert (await told(pool, first)).outcome is Admission.ACCEPTED

    name = pool.keys.idempotency("customer:k1")
    assert await pool.client.hgetall(name) == {b"id": first.id.encode(), b"fp": b"f1"}
    for key in (name, pool.keys.request(first.id)):
        assert DAY_MS - 5000 < await pool.client.pttl(key) <= DAY_MS


async def test_nothing_shortens_the_life_of_the_answer(pool: Pool) -> None:
    """Through claim, loss, retry and finish the request is kept for its day, with its key."""
    first = keyed(pool)
    await told(pool, first)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)
    batch = await pool.claim_next()
    await pool.batches.renew(batch.batch_id, batch.token)
    await pool.batches.finish(batch.batch_id, batch.token, [done(first.id)])
    await pool.endings.cancel([(first.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert await pool.client.pttl(pool.keys.request(first.id)) > DAY_MS - 5000
    assert await pool.client.hget(pool.keys.request(first.id), "idem") == b"customer:k1"


async def test_a_completed_one_is_replayed(pool: Pool) -> None:
    """The second is told whose answer to give; it is neither stored, nor queued, nor noted, nor paid for."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, "")
    before = await everything(pool.client)

    verdict = await told(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, first.id)
    assert await everything(pool.client) == before
    (reply,) = await pool.results.fetch([verdict.stored_id])
    assert reply is not None
    assert reply.output == "text"


@pytest.mark.parametrize("code", [ErrorCode.POISON_REQUEST, ErrorCode.INVALID_REQUEST])
async def test_a_failure_that_would_come_again_is_replayed(pool: Pool, code: ErrorCode) -> None:
    """The input is at fault: another run would cost a worker and end the same."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, code)

    verdict = await told(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, first.id)


@pytest.mark.parametrize("code", [ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT, ErrorCode.GATEWAY_LOST])
async def test_after_any_other_failure_the_next_one_takes_over(pool: Pool, code: ErrorCode) -> None:
    """The client does right to try again: it runs, and from now on the key is its own."""
    first, second = keyed(pool), keyed(pool)
    await told(pool, first)
    await ended(pool, first, code)

    assert (await told(pool, second)).outcome is Admission.ACCEPTED

    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()
    assert (await told(pool, keyed(pool))).outcome is Admission.IN_PROGRESS


@pytest.mark.parametrize("running", [False, True])
async def test_one_under_way_is_told_so(pool: Pool, *, running: bool) -> None:
    """Queued or in a worker's hands: the second client waits with its retry, and nothing changes."""
    first = keyed(pool)
    await told(pool, first)
    if running:
        await pool.form([("free", 1)])
        await pool.claim_next()
    before = await everything(pool.client)

    verdict = await told(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.IN_PROGRESS, first.id)
    assert await everything(pool.client) == before


async def test_two_in_one_call_are_one_request(pool: Pool) -> None:
    """Two connections sent the same at the same moment, and shared a flush."""
    verdicts = await pool.admit([keyed(pool), keyed(pool), keyed(pool, "customer:k2")])

    assert [v.outcome for v in verdicts] == [Admission.ACCEPTED, Admission.IN_PROGRESS, Admission.ACCEPTED]
    assert await pool.depth("free") == 2


@pytest.mark.parametrize("code", ["", ErrorCode.WORKER_LOST, None])
async def test_another_body_is_refused(pool: Pool, code: str | None) -> None:
    """A key stands for one body, whether its request completed, failed, or waits (None)."""
    first = keyed(pool)
    await told(pool, first)
    if code is not None:
        await ended(pool, first, code)
    before = await everything(pool.client)

    assert (await told(pool, keyed(pool, fingerprint="f2"))).outcome is Admission.REUSED
    assert await everything(pool.client) == before


async def test_customers_do_not_share_keys(pool: Pool) -> None:
    """The value names the customer too, so the same key of another one is another key."""
    await told(pool, keyed(pool))

    assert (await told(pool, keyed(pool, "other:k1"))).outcome is Admission.ACCEPTED


async def test_a_call_sent_again_is_a_duplicate_not_a_replay(pool: Pool) -> None:
    """The reply of admit was lost: the same id is told `duplicate`, or its gateway would refuse its own request."""
    first = keyed(pool)
    await told(pool, first)
    assert (await told(pool, first)).outcome is Admission.DUPLICATE
    await ended(pool, first, "")
    assert (await told(pool, first)).outcome is Admission.DUPLICATE


async def test_a_rejected_one_leaves_the_key_free(pool: Pool) -> None:
    """It changed no key, so the retry that the client was told to make is admitted."""
    before = await everything(pool.client)
    assert (await told(pool, keyed(pool, rate=0.0, burst=0.0))).outcome is Admission.CUSTOMER_LIMIT
    assert await everything(pool.client) == before

    assert (await told(pool, keyed(pool))).outcome is Admission.ACCEPTED


async def test_a_limit_does_not_hide_an_answer(pool: Pool) -> None:
    """What is replayed asks for no capacity, so an empty bucket or a full queue is no reason to refuse it."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, "")

    assert (await told(pool, keyed(pool, rate=0.0, burst=0.0))).outcome is Admission.REPLAYED


async def test_a_forgotten_request_frees_its_key(pool: Pool) -> None:
    """Redis lost the request but not the key: nobody could ever answer for it."""
    first, second = keyed(pool), keyed(pool)
    await told(pool, first)
    await pool.client.delete(pool.keys.request(first.id))

    assert (await told(pool, second)).outcome is Admission.ACCEPTED
    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()


async def test_the_key_of_a_request_whose_gateway_died(pool: Pool) -> None:
    """The client comes back by another gateway: in progress until the pool has noticed, then it runs."""
    first = keyed(pool)
    await told(pool, first)
    assert (await told(pool, keyed(pool))).outcome is Admission.IN_PROGRESS
    await pool.aged([first.id], 2100)
    await pool.presence.gateway_gone("g1")
    await pool.form([("free", 1)])

    assert (await pool.admit([keyed(pool)], WIDE, gateway="g2"))[0].outcome is Admission.ACCEPTED
