"""`claim`, `renew`, `finish`: one owner at a time, each request ends once, a late word changes nothing."""

import asyncio

from pool import Pool, done
from scheduler.batches import ReadyBatches
from scheduler.connections import blocking_client
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.replies import Reply, decode_replies


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
    await pool.endings.cancel([(first, ErrorCode.DEADLINE_EXCEEDED)])

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
