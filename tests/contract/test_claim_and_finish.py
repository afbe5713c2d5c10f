"""`claim`, `renew`, `finish`: one owner at a time, each request ends once, a late word changes nothing."""

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, decode_payload, encode_payload
from scheduler.protocol.batches import ReadyBatches, _split_outcomes
from scheduler.protocol.replies import Reply, decode_replies
from scheduler.redis_client.connections import blocking_client
from scheduler.redis_client.scripts import MAX_CALL_BYTES


async def test_a_claim_returns_bodies_and_time_left(pool: Pool) -> None:
    """The worker learns everything it needs in one call, oldest first, and the attempt is counted."""
    ids = await pool.queue(2)
    batch_id = await pool.form([("free", 2)])

    claimed = await pool.batches.claim(batch_id, "w1", "token")

    assert claimed is not None
    assert [(r.id, r.attempt) for r in claimed.requests] == [(i, 1) for i in ids]
    assert all(0 < r.ms_left <= 4000 for r in claimed.requests)
    assert decode_payload(claimed.requests[0].body).input == "hello"


async def test_two_claimers_one_winner(pool: Pool) -> None:
    """A batch has one owner."""
    await pool.queue(1)
    batch_id = await pool.form([("free", 1)])

    claims = await asyncio.gather(*(pool.batches.claim(batch_id, f"w{i}", f"t{i}") for i in range(4)))

    assert sum(c is not None for c in claims) == 1


async def test_members_out_of_time_end_at_the_claim(pool: Pool) -> None:
    """What cannot finish is never started; a batch that is left empty is closed."""
    (request_id,) = await pool.queue(1)
    batch_id = await pool.form([("free", 1)])
    await pool.overdue([request_id], "dl")

    claimed = await pool.batches.claim(batch_id, "w1", "token")

    assert claimed is not None
    assert claimed.requests == []
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert reply.error_code == "deadline_exceeded"
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_batch_of_a_dead_gateway_is_not_run(pool: Pool) -> None:
    """The owner died after the batch was formed: nobody would read the answer."""
    ids = await pool.queue(1)
    batch_id = await pool.form([("free", 1)])
    await pool.aged(ids, 2100)
    await pool.client.delete(pool.keys.gateway("g1"))

    claimed = await pool.batches.claim(batch_id, "w1", "token")

    assert claimed is not None
    assert claimed.requests == []
    assert [r.error_code for r in await pool.results.fetch(ids) if r] == ["gateway_lost"]


async def test_finish_stores_notes_clears_and_publishes(pool: Pool) -> None:
    """One finish: results stored, audit noted, batch gone, one message to the gateway, the scheduler woken."""
    claimed = await pool.running(3)
    async with pool.client.pubsub() as channel:
        await channel.subscribe(pool.keys.responses("g1"))
        await channel.get_message(timeout=1)
        await pool.client.delete(pool.keys.wake)

        stale = await pool.batches.finish(
            "b1", "token", [done(r.id, f"out-{i}") for i, r in enumerate(claimed.requests)]
        )

        message = await channel.get_message(timeout=1)
    assert stale == 0
    ids = [r.id for r in claimed.requests]
    assert message is not None
    told = decode_replies(message["data"])
    assert told == await pool.results.fetch(ids)
    first = told[0]
    assert first == Reply(
        ids[0],
        "customer",
        "0123456789abcdef",
        "completed",
        "",
        1,
        first.queue_ms,
        "b1",
        3,
        "w1",
        50.0,
        5,
        "v1",
        "out-0",
    )
    assert await pool.inflight() == {}
    assert await pool.client.exists(pool.keys.batch("b1")) == 0
    assert await pool.client.zcard(pool.keys.leases) == 0
    _, ended = await pool.audit()
    assert [(e.id, e.state, e.batch_size, e.output_bytes, e.attempts) for e in ended] == [
        (i, "completed", 3, 5, 1) for i in ids
    ]
    assert await pool.client.llen(pool.keys.wake) == 1
    assert await pool.client.hget(pool.keys.request(ids[0]), "body") == b""


async def test_a_result_outlives_its_message(pool: Pool) -> None:
    """Pub/sub may lose the message: the result stays readable for at least 30 s."""
    claimed = await pool.running(1)
    await pool.batches.finish("b1", "token", [done(claimed.requests[0].id)])

    assert await pool.client.pttl(pool.keys.request(claimed.requests[0].id)) >= 30_000


async def test_a_finish_with_a_foreign_token_is_stale(pool: Pool) -> None:
    """Somebody who does not own the batch changes nothing and is told so."""
    claimed = await pool.running(2)
    outcomes = [done(r.id) for r in claimed.requests]

    assert await pool.batches.finish("b1", "other", outcomes) == 2
    assert await pool.states([r.id for r in claimed.requests]) == ["processing"] * 2
    assert await pool.batches.finish("b1", "token", outcomes) == 0
    assert await pool.batches.finish("b1", "token", outcomes) == 2
    _, ended = await pool.audit()
    assert len(ended) == 2


async def test_a_member_that_ended_meanwhile_stays_as_it_ended(pool: Pool) -> None:
    """The first terminal writer wins: a deadline that was answered is not overwritten by a late result."""
    claimed = await pool.running(2)
    first, second = (r.id for r in claimed.requests)
    await pool.terminations.cancel([(first, ErrorCode.DEADLINE_EXCEEDED)])

    stale = await pool.batches.finish("b1", "token", [done(first), done(second)])

    assert stale == 1
    replies = await pool.results.fetch([first, second])
    assert [r.error_code for r in replies if r] == ["deadline_exceeded", ""]


async def test_a_member_without_an_outcome_fails_and_is_not_lost(pool: Pool) -> None:
    """A worker that forgets one is wrong, and the request still gets its one answer."""
    claimed = await pool.running(2)
    first, second = (r.id for r in claimed.requests)

    await pool.batches.finish("b1", "token", [done(first)])

    replies = await pool.results.fetch([first, second])
    assert [r.error_code for r in replies if r] == ["", "invalid_output"]


async def test_renew_moves_the_lease_of_the_owner_only(pool: Pool) -> None:
    """A worker that lost its batch learns it from the renewal."""
    await pool.running(1)
    await pool.expire_leases()

    assert await pool.batches.renew("b1", "other") is False
    assert await pool.client.zscore(pool.keys.leases, "b1") == 1
    assert await pool.batches.renew("b1", "token") is True
    assert await pool.client.zscore(pool.keys.leases, "b1") > 1
    assert await pool.batches.renew("gone", "token") is False


async def test_the_blocking_read_takes_the_head_or_comes_back_empty(pool: Pool, redis_url: str) -> None:
    """BLPOP has a client of its own and an end."""
    blocking = blocking_client(redis_url)
    ready = ReadyBatches(blocking, pool.keys, block_s=0.05)
    try:
        assert await ready.pop() is None
        await pool.queue(1)
        batch_id = await pool.form([("free", 1)])
        assert await ready.pop() == batch_id
    finally:
        await blocking.aclose()


LARGE = 700_000


async def large_batch(pool: Pool, count: int = 8) -> dict[str, bytes]:
    """A ready batch whose bodies are too many bytes for one call; each body is another one."""
    bodies = {}
    for i in range(count):
        asked = pool.submission(body=encode_payload(Payload("tiny", f"{i} " + "x" * LARGE, {})))
        await pool.admit([asked])
        bodies[asked.id] = asked.body
    await pool.form([("free", count)])
    return bodies


async def test_bodies_that_are_too_many_for_one_call_come_in_several(pool: Pool) -> None:
    """The worker has all of them, in order; no call holds Redis for longer than 2 MB take."""
    bodies = await large_batch(pool)

    claimed = await pool.claim_next()

    assert {each.id: each.body for each in claimed.requests} == bodies
    assert [each.id for each in claimed.requests] == list(bodies)


async def test_no_call_of_a_claim_carries_more_than_its_bytes(pool: Pool) -> None:
    """By what the scripts answer."""
    bodies = await large_batch(pool)
    batch_id = await pool.pop()
    assert batch_id is not None

    first = await pool.batches._claim(batch_id, "w1", "token", 600, 2000, MAX_CALL_BYTES)
    more = await pool.batches._bodies(msgspec.msgpack.encode(list(bodies)), MAX_CALL_BYTES)

    assert len(first) < MAX_CALL_BYTES + 2 * LARGE
    assert [len(body) > LARGE for body in more] == [True] * 3


async def test_a_claim_of_several_calls_keeps_its_lease(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call may take long where the network is slow, and the worker renews only what it has whole."""
    bodies = await large_batch(pool)
    fetched = pool.batches._bodies

    async def slow(ids: bytes, size: int) -> list[bytes]:
        await pool.client.zadd(pool.keys.leases, {"b1": await pool.now_ms()})  # As long after the claim.
        return cast("list[bytes]", await fetched(ids, size))

    monkeypatch.setattr(pool.batches, "_bodies", slow)
    claimed = await pool.claim_next()

    assert {each.id: each.body for each in claimed.requests} == bodies
    (score,) = [score for _, score in await pool.client.zrange(pool.keys.leases, 0, -1, withscores=True)]
    assert score > await pool.now_ms()


async def test_a_batch_that_is_lost_while_its_bodies_come_is_not_claimed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has it by then."""
    await large_batch(pool)
    fetched = pool.batches._bodies

    async def slow(ids: bytes, size: int) -> list[bytes]:
        await pool.client.hset(pool.keys.batch("b1"), "token", "another's")
        return cast("list[bytes]", await fetched(ids, size))

    monkeypatch.setattr(pool.batches, "_bodies", slow)
    batch_id = await pool.pop()
    assert batch_id is not None

    assert await pool.batches.claim(batch_id, "w1", "token") is None


async def test_a_request_that_ends_before_its_body_comes_is_left_out(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client left between two calls of the claim; the others run."""
    bodies = await large_batch(pool)
    last = list(bodies)[-1]
    fetched = pool.batches._fetched

    async def late(batch_id: str, token: str, ids: Sequence[str]) -> dict[str, bytes] | None:
        await pool.terminations.cancel([(last, ErrorCode.DEADLINE_EXCEEDED)])
        return await fetched(batch_id, token, ids)

    monkeypatch.setattr(pool.batches, "_fetched", late)
    claimed = await pool.claim_next()

    assert [each.id for each in claimed.requests] == list(bodies)[:-1]


async def test_outputs_that_are_too_many_for_one_call_end_their_requests_all_the_same(pool: Pool) -> None:
    """The last call closes the batch; sent again, what ended before is stale."""
    batch = await pool.running(8)
    outcomes = [done(each.id, f"{i}" + "x" * LARGE) for i, each in enumerate(batch.requests)]

    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0

    stored = await pool.results.fetch([each.id for each in batch.requests])
    assert [reply.output[0] for reply in stored if reply] == [str(i) for i in range(8)]
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 8


async def test_a_finish_that_is_cut_short_is_sent_again(pool: Pool) -> None:
    """The batch stays its worker's until the last piece: what was not told can be told, and what was is not told twice."""
    batch = await pool.running(4)
    heads, tails = _split_outcomes([done(each.id) for each in batch.requests[:2]])
    late = await pool.batches._finish(batch.batch_id, batch.token, msgspec.msgpack.encode(heads), b"".join(tails), 1)

    assert late[0] == 0
    assert await pool.states([each.id for each in batch.requests]) == ["completed"] * 2 + ["processing"] * 2
    outcomes = [done(each.id) for each in batch.requests]
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 2
    assert await pool.states([each.id for each in batch.requests]) == ["completed"] * 4
    _, ended = await pool.audit()
    assert sorted(each.id for each in ended) == sorted(each.id for each in batch.requests)
