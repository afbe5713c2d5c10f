"""`claim` and `finish`: one owner at a time, each request ends once; large bodies and outputs need several calls."""

import asyncio
from typing import cast

import msgspec
import pytest

from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, decode_payload, encode_payload
from scheduler.protocol.batches import _split_outcomes
from scheduler.protocol.replies import Reply, decode_replies
from scheduler.redis_client.scripts import MAX_CALL_BYTES


async def test_a_claim_returns_bodies_and_the_time_left(pool: Pool) -> None:
    """The requests are oldest first, and the attempt is counted. Of several claims at once, one succeeds."""
    ids = await pool.queue(2)
    batch_id = await pool.form([("free", 2)])

    claims = await asyncio.gather(*(pool.batches.claim(batch_id, f"w{i}", f"t{i}") for i in range(4)))

    (claimed,) = [claim for claim in claims if claim]
    assert [(r.id, r.attempt) for r in claimed.requests] == [(i, 1) for i in ids]
    assert all(0 < r.ms_left <= 4000 for r in claimed.requests)
    assert decode_payload(claimed.requests[0].body).input == "hello"


@pytest.mark.parametrize("code", ["gateway_lost", "deadline_exceeded"])
async def test_requests_without_a_client_are_not_run(pool: Pool, code: str) -> None:
    """The gateway was lost, or the deadline passed, after the batch was formed: its requests end, and the empty batch is
    closed.
    """
    ids = await pool.queue(1)
    batch_id = await pool.form([("free", 1)])
    if code == "gateway_lost":
        await pool.aged(ids, 2100)
        await pool.client.delete(pool.keys.gateway("g1"))
    else:
        await pool.overdue(ids, "dl")

    claimed = await pool.batches.claim(batch_id, "w1", "token")

    assert claimed is not None
    assert claimed.requests == []
    assert [(r.error_code, r.attempts) for r in await pool.results.fetch(ids) if r] == [(code, 0)]
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_finish_stores_records_publishes_and_deletes_the_batch(pool: Pool) -> None:
    """One finish: replies stored and published in one message, audit records, batch deleted, scheduler woken."""
    claimed = await pool.running(3)
    ids = [r.id for r in claimed.requests]
    async with pool.client.pubsub() as channel:
        await channel.subscribe(pool.keys.responses("g1"))
        await channel.get_message(timeout=1)
        await pool.client.delete(pool.keys.wake)

        assert await pool.batches.finish("b1", "token", [done(i, f"out-{n}") for n, i in enumerate(ids)]) == 0

        message = await channel.get_message(timeout=1)
    assert message is not None
    replies = decode_replies(message["data"])
    assert replies == await pool.results.fetch(ids)
    first, queue_ms = replies[0], replies[0].queue_ms
    run = ("b1", 3, "w1", 50.0, 5, "v1", "out-0")
    assert first == Reply(ids[0], "customer", "0123456789abcdef", "completed", "", 1, queue_ms, *run, cost_ms=0.0)
    assert await pool.inflight() == {}
    assert await pool.client.exists(pool.keys.batch("b1"), pool.keys.leases) == 0
    _, ended = await pool.audit()
    records = [(e.id, e.state, e.batch_size, e.output_bytes, e.attempts) for e in ended]
    assert records == [(i, "completed", 3, 5, 1) for i in ids]
    assert await pool.client.llen(pool.keys.wake) == 1
    assert await pool.client.hget(pool.keys.request(ids[0]), "body") == b""
    assert await pool.client.pttl(pool.keys.request(ids[0])) >= 30_000  # pub/sub may lose the message


async def test_a_request_without_an_outcome_fails(pool: Pool) -> None:
    """A worker that omits a request has a bug, but the request still gets its reply."""
    first, second = (r.id for r in (await pool.running(2)).requests)

    await pool.batches.finish("b1", "token", [done(first)])

    assert [r.error_code for r in await pool.results.fetch([first, second]) if r] == ["", "invalid_output"]


async def test_an_unreadable_reply_does_not_affect_others(pool: Pool) -> None:
    """For example a stored reply of a newer version."""
    first, second = (r.id for r in (await pool.running(2)).requests)
    await pool.batches.finish("b1", "token", [done(first), done(second)])
    await pool.client.hset(pool.keys.request(first), "reply", b"\xc1")

    assert [r.id if r else None for r in await pool.results.fetch([first, second])] == [None, second]


LARGE = 700_000


async def large_batch(pool: Pool, count: int = 8) -> dict[str, bytes]:
    """A ready batch with more bytes of bodies than one call returns."""
    bodies = {}
    for i in range(count):
        submission = pool.submission(body=encode_payload(Payload("tiny", f"{i} " + "x" * LARGE, {})))
        await pool.admit([submission])
        bodies[submission.id] = submission.body
    await pool.form([("free", count)])
    return bodies


async def test_large_bodies_are_read_in_several_calls(pool: Pool) -> None:
    """The worker gets all of them in order, and no call returns much more than 2 MB."""
    bodies = await large_batch(pool)
    first = await pool.batches._claim((await pool.pop()) or "", "w1", "token", 600, 2000, MAX_CALL_BYTES)
    more = await pool.batches._bodies(msgspec.msgpack.encode(list(bodies)), MAX_CALL_BYTES)
    assert len(first) < MAX_CALL_BYTES + 2 * LARGE
    assert [len(body) > LARGE for body in more] == [True] * 3
    await pool.batches.release("b1", "token")
    await pool.form([("free", 8)])

    claimed = await pool.claim_next()

    assert [(each.id, each.body) for each in claimed.requests] == list(bodies.items())


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_claim_of_several_calls_renews_its_lease(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """Each call may be slow, so each renews the lease. A batch that was lost meanwhile is not claimed."""
    bodies = await large_batch(pool)
    read_bodies = pool.batches._bodies

    async def slow(ids: bytes, size: int) -> list[bytes]:
        await pool.client.zadd(pool.keys.leases, {"b1": await pool.now_ms()})  # the lease is about to expire
        if is_lost:
            await pool.client.hset(pool.keys.batch("b1"), "token", "other")
        return cast("list[bytes]", await read_bodies(ids, size))

    monkeypatch.setattr(pool.batches, "_bodies", slow)
    claimed = await pool.batches.claim((await pool.pop()) or "", "w1", "token")

    if is_lost:
        assert claimed is None
        return
    assert claimed is not None
    assert {each.id: each.body for each in claimed.requests} == bodies
    assert await pool.client.zscore(pool.keys.leases, "b1") > await pool.now_ms()


async def test_a_request_that_ends_before_its_body_is_read_is_left_out(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client left between two calls of the claim; the others run."""
    bodies = await large_batch(pool)
    last = list(bodies)[-1]
    read_bodies = pool.batches._bodies

    async def late(ids: bytes, size: int) -> list[bytes]:
        await pool.terminations.cancel([(last, ErrorCode.DEADLINE_EXCEEDED)])
        return cast("list[bytes]", await read_bodies(ids, size))

    monkeypatch.setattr(pool.batches, "_bodies", late)
    claimed = await pool.claim_next()

    assert [each.id for each in claimed.requests] == list(bodies)[:-1]


async def test_large_outputs_are_sent_in_several_calls(pool: Pool) -> None:
    """The last call closes the batch; when all are sent again, they are stale."""
    batch = await pool.running(8)
    outcomes = [done(each.id, f"{i}" + "x" * LARGE) for i, each in enumerate(batch.requests)]

    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0

    stored = await pool.results.fetch([each.id for each in batch.requests])
    assert [reply.output[0] for reply in stored if reply] == [str(i) for i in range(8)]
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 8


async def test_an_interrupted_finish_can_be_sent_again(pool: Pool) -> None:
    """The worker owns the batch until the last call, and each request ends once."""
    batch = await pool.running(4)
    ids = [each.id for each in batch.requests]
    heads, tails = _split_outcomes([done(i) for i in ids[:2]])
    first = await pool.batches._finish(batch.batch_id, batch.token, msgspec.msgpack.encode(heads), b"".join(tails), 1)

    assert first[0] == 0
    assert await pool.states(ids) == ["completed"] * 2 + ["processing"] * 2
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(i) for i in ids]) == 2
    assert await pool.states(ids) == ["completed"] * 4
    assert sorted(each.id for each in (await pool.audit())[1]) == sorted(ids)
