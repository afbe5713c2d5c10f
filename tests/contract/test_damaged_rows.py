"""Rows that a script cannot read: each is set aside, and no verb stops, or writes half of what it should, because of one."""

import msgspec
import pytest

from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import ClaimedBatch

DAMAGES = ("another type", "no env", "short env", "words for times", "no who", "short who")


async def damage(pool: Pool, request_id: str, how: str) -> None:
    """As if another version had written the row, or a person."""
    key = pool.keys.request(request_id)
    match how:
        case "another type":
            await pool.client.delete(key)
            await pool.client.rpush(key, "x")
        case "no env":
            await pool.client.hdel(key, "env")
        case "short env":
            await pool.client.hset(key, "env", "1234567890123 1234567890123")
        case "words for times":
            env = await pool.client.hget(key, "env")
            await pool.client.hset(key, "env", b"then".rjust(13) + env[13:])
        case "no who":
            await pool.client.hdel(key, "who")
        case "short who":
            await pool.client.hset(key, "who", "g1 customer")


async def noted(pool: Pool) -> list[str]:
    """The ids of the rows that were set aside, newest first."""
    return [msgspec.msgpack.decode(each)[0] for each in await pool.client.lrange(pool.keys.damaged, 0, -1)]


async def check_aside(pool: Pool, request_id: str, how: str) -> None:
    """It is noted once, is no open request any more, and the audit has its end."""
    assert await noted(pool) == [request_id]
    state = await pool.client.type(pool.keys.request(request_id))
    assert state == (b"none" if how == "another type" else b"hash")
    if state == b"hash":
        assert await pool.states([request_id]) == ["failed"]
    _, ended = await pool.audit()
    assert [each.error_code for each in ended if each.id == request_id] == ["internal_error"]


@pytest.mark.parametrize("how", DAMAGES)
async def test_expire_goes_on(pool: Pool, how: str) -> None:
    """What is overdue before and behind it ends, pass by pass."""
    ids = await pool.overdue(await pool.queue(3))
    await damage(pool, ids[1], how)

    assert (await pool.terminations.expire(TIERS))[0] == 2
    assert await pool.depth("free") == 0
    assert await pool.terminations.expire(TIERS) == (0, 0)
    await check_aside(pool, ids[1], how)


@pytest.mark.parametrize("how", DAMAGES)
async def test_form_batch_goes_on(pool: Pool, how: str) -> None:
    """Its neighbours are members of the batch; it is counted as dropped."""
    ids = await pool.queue(3)
    await damage(pool, ids[1], how)
    await pool.batches.look(TIERS)

    formed = await pool.batches.form("b1", [("free", 3)], 1, TIERS)

    assert (formed.size, formed.dropped) == (2, 1)
    assert await pool.inflight() == {"inflight:free:b1": [ids[0], ids[2]]}
    await check_aside(pool, ids[1], how)


@pytest.mark.parametrize("how", DAMAGES)
async def test_claim_gives_the_others(pool: Pool, how: str) -> None:
    """A batch with such a member is run without it, and finishes whole."""
    ids = await pool.queue(3)
    await pool.form([("free", 3)])
    await damage(pool, ids[1], how)
    unseen = "who" in how  # A worker does not need to know whose it is; the end does.

    claimed = await pool.claim_next()
    assert [each.id for each in claimed.requests] == (ids if unseen else [ids[0], ids[2]])

    outcomes = [done(each.id) for each in claimed.requests]
    assert await pool.batches.finish(claimed.batch_id, claimed.token, outcomes) == int(unseen)
    assert [await pool.client.hget(pool.keys.request(i), "state") for i in (ids[0], ids[2])] == [b"completed"] * 2
    assert await pool.client.zcard(pool.keys.leases) == 0
    await check_aside(pool, ids[1], how)


async def gives_up(pool: Pool, batch: ClaimedBatch) -> None:
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)


async def hands_back(pool: Pool, batch: ClaimedBatch) -> None:
    await pool.batches.release(batch.batch_id, batch.token)


async def is_lost(pool: Pool, batch: ClaimedBatch) -> None:
    assert batch.requests
    await pool.reaped()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("end", [gives_up, hands_back, is_lost])
async def test_whoever_ends_a_batch_goes_on(pool: Pool, how: str, end: object) -> None:
    """fail, release and reap: the other members run again."""
    batch = await pool.running(3)
    ids = [each.id for each in batch.requests]
    await damage(pool, ids[1], how)

    await end(pool, batch)  # type: ignore[operator]

    if end is hands_back:
        await pool.form([("free", 3)])
    left = []
    while (batch_id := await pool.pop()) is not None:
        claimed = await pool.batches.claim(batch_id, "w2", "token")
        assert claimed is not None
        left += [each.id for each in claimed.requests]
    assert left == [ids[0], ids[2]]
    await check_aside(pool, ids[1], how)


@pytest.mark.parametrize("how", DAMAGES)
async def test_cancel_ends_the_others(pool: Pool, how: str) -> None:
    """A gateway that ends some of its requests hears of each of those that can be read."""
    ids = await pool.queue(3)
    await damage(pool, ids[1], how)

    replies = await pool.terminations.cancel([(i, ErrorCode.DEADLINE_EXCEEDED) for i in ids])

    assert [reply.id if reply else None for reply in replies] == [ids[0], None, ids[2]]
    assert await noted(pool) == [ids[1]]


@pytest.mark.parametrize("how", DAMAGES)
async def test_admit_takes_no_damaged_leader(pool: Pool, how: str) -> None:
    """A request that is equal to it runs by itself."""
    leader = pool.submission(same="s")
    await pool.admit([leader])
    await damage(pool, leader.id, how)

    (verdict,) = await pool.admit([equal := pool.submission(same="s")])

    assert verdict.outcome == "accepted"
    assert await pool.states([equal.id]) == ["queued"]
    await pool.form([("free", 2)])
    await check_aside(pool, leader.id, how)


async def test_admit_takes_no_damaged_holder_of_a_key(pool: Pool) -> None:
    """Where the row of the request that has an Idempotency-Key is of another type, the next one gets the key, and nobody fails."""
    holder = pool.submission(idempotency="i", fingerprint="f")
    await pool.admit([holder])
    await damage(pool, holder.id, "another type")

    verdicts = await pool.admit([pool.submission(), pool.submission(idempotency="i", fingerprint="f")])

    assert [verdict.outcome for verdict in verdicts] == ["accepted"] * 2
    await pool.client.delete(pool.keys.request(holder.id))


async def test_the_riders_of_a_damaged_leader_run(pool: Pool) -> None:
    """One of them in its place, and the others on it."""
    asked = [pool.submission(same="s") for _ in range(3)]
    await pool.admit(asked)
    await damage(pool, asked[0].id, "short env")

    await pool.form([("free", 3)])
    await pool.form([("free", 3)])
    claimed = await pool.claim_next()
    await pool.batches.finish(claimed.batch_id, claimed.token, [done(each.id) for each in claimed.requests])

    assert await pool.states([each.id for each in asked]) == ["failed", "completed", "completed"]


@pytest.mark.parametrize("end", [gives_up, hands_back, is_lost])
async def test_the_riders_of_a_damaged_leader_that_ran_run_too(pool: Pool, end: object) -> None:
    """Whoever ends its batch leaves them to the next of them."""
    asked = [pool.submission(same="s") for _ in range(3)]
    await pool.admit(asked)
    await pool.form([("free", 3)])
    batch = await pool.claim_next()
    await damage(pool, asked[0].id, "short env")

    await end(pool, batch)  # type: ignore[operator]

    assert await pool.states([each.id for each in asked]) == ["failed", "queued", "riding"]


async def test_a_gateway_is_told_where_the_row_says_whose_it_is(pool: Pool) -> None:
    """Its client has an answer at once; what it was charged comes back."""
    (request_id,) = await pool.queue(1, quotas=[("1day", 10)], max_concurrency=5)
    await pool.client.hset(pool.keys.request(request_id), "env", b"?" * 13 + b" " * 40 + b" 0123456789abcdef")
    async with pool.client.pubsub() as listening:
        await listening.subscribe(pool.keys.responses("g1"))
        await listening.get_message(timeout=5)
        await pool.form([("free", 1)])
        message = await listening.get_message(timeout=5)

    assert message is not None
    reply = msgspec.msgpack.decode(message["data"])[0]
    assert (reply[0], reply[1], reply[4]) == (request_id, "customer", "internal_error")
    assert (await pool.client.hget("rl:customer:customer", "q:1day")).split()[1] == b"0"
    assert await pool.client.zcard("rl:leases:customer") == 0


async def test_what_is_noted_has_a_bound_and_no_prompt(pool: Pool) -> None:
    """The newest thousand, with what says whose they were."""
    await pool.client.lpush(pool.keys.damaged, *("x" * 1000))
    (request_id,) = await pool.queue(1)
    await pool.form([("free", 1)])
    await damage(pool, request_id, "short env")
    await pool.claim_next()

    entries = await pool.client.lrange(pool.keys.damaged, 0, -1)
    assert len(entries) == 1000
    assert b"hello" not in entries[0]


@pytest.mark.parametrize("fields", [{}, {"size": "many"}, {"losses": "some"}])
async def test_a_damaged_batch_stops_nobody(pool: Pool, fields: dict[str, str]) -> None:
    """It is dropped, once; the others whose leases ran out are looked after."""
    first, second = await pool.running(1), await pool.running(1, token="other")
    key = pool.keys.batch(first.batch_id)
    if fields:
        await pool.client.hset(key, mapping=fields)
    else:
        await pool.client.delete(key)
        await pool.client.set(key, "x")

    await pool.reaped()

    assert await pool.client.exists(key) == 0
    assert await pool.pop() == second.batch_id
    assert await pool.batches.renew(first.batch_id, first.token) is False
