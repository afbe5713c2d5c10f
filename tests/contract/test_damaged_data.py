"""Rows that a script cannot read, and indexes of a wrong type: each is set aside, and no other request is affected."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
import pytest
from redis.asyncio import Redis

from configs import LEASE_MS
from contract.builders import CUSTOMER, LEASES, outcomes, spent
from eventually import eventually
from pool import TIERS, Pool, done
from scheduler.batching.reaper import Reaper
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.batches import ClaimedBatch, Outcome
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.index_repair import IndexRepair
from scheduler.redis_client.keys import Keys

DAMAGES = ("another type", "no env", "short env", "words for times", "no who", "short who")

each_damage = pytest.mark.parametrize("how", DAMAGES)


async def damage(pool: Pool, request_id: str, how: str) -> None:
    """Change a row as another version, or a person, might have written it."""
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


async def check_quarantined(pool: Pool, request_id: str, how: str) -> None:
    """The row is recorded once, is not an open request any more, and its end is audited."""
    entries = await pool.client.lrange(pool.keys.damaged, 0, -1)
    assert [msgspec.msgpack.decode(entry)[0] for entry in entries] == [request_id]
    kind = await pool.client.type(pool.keys.request(request_id))
    assert kind == (b"none" if how == "another type" else b"hash")
    if kind == b"hash":
        assert await pool.states([request_id]) == ["failed"]
    _, ended = await pool.audit()
    assert [each.error_code for each in ended if each.id == request_id] == ["internal_error"]


@each_damage
async def test_expire_continues(pool: Pool, how: str) -> None:
    """Overdue requests before and behind the damaged one end."""
    ids = await pool.overdue(await pool.queue(3))
    await damage(pool, ids[1], how)

    assert (await pool.terminations.expire(TIERS))[0] == 2
    assert await pool.depth("free") == 0
    assert await pool.terminations.expire(TIERS) == (0, 0)
    await check_quarantined(pool, ids[1], how)


async def test_an_error_of_expire_loses_no_end(pool: Pool) -> None:
    """Requests that it ended before the error have their record and their reply."""
    ids = await pool.overdue(await pool.queue(3))
    await pool.client.set(pool.keys.waiting("free"), 1, ex=60)
    await pool.client.set(pool.keys.backlogs("free"), "x", ex=60)

    with pytest.raises(RedisUnavailable):
        await pool.terminations.expire(TIERS)

    assert [each.id for each in (await pool.audit())[1]] == ids
    assert [reply.id for reply in await pool.results.fetch(ids) if reply] == ids


@each_damage
async def test_form_batch_continues(pool: Pool, how: str) -> None:
    """The other requests are members of the batch; the damaged one is counted as dropped."""
    ids = await pool.queue(3)
    await damage(pool, ids[1], how)
    await pool.batches.look(TIERS)

    formed = await pool.batches.form("b1", [("free", 3)], 1, TIERS)

    assert (formed.size, formed.dropped) == (2, 1)
    assert await pool.inflight() == {"inflight:free:b1": [ids[0], ids[2]]}
    await check_quarantined(pool, ids[1], how)


@each_damage
async def test_claim_returns_the_others(pool: Pool, how: str) -> None:
    """The batch runs without the damaged request. A damaged `who` is noticed only when the request ends."""
    ids = await pool.queue(3)
    await pool.form([("free", 3)])
    await damage(pool, ids[1], how)
    is_claimed = "who" in how

    claimed = await pool.claim_next()
    assert [each.id for each in claimed.requests] == (ids if is_claimed else [ids[0], ids[2]])

    outcomes = [done(each.id) for each in claimed.requests]
    assert await pool.batches.finish(claimed.batch_id, claimed.token, outcomes) == int(is_claimed)
    assert await pool.states([ids[0], ids[2]]) == ["completed"] * 2
    assert await pool.client.zcard(pool.keys.leases) == 0
    await check_quarantined(pool, ids[1], how)


async def fail(pool: Pool, batch: ClaimedBatch) -> None:
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)


async def release(pool: Pool, batch: ClaimedBatch) -> None:
    await pool.batches.release(batch.batch_id, batch.token)


async def reap(pool: Pool, batch: ClaimedBatch) -> None:
    assert batch.requests
    await pool.reaped()


End = Callable[[Pool, ClaimedBatch], Awaitable[None]]
each_end = pytest.mark.parametrize("end", [fail, release, reap])


@each_damage
@each_end
async def test_the_other_requests_of_a_returned_batch_run_again(pool: Pool, how: str, end: End) -> None:
    """`fail`, `release` and `reap` continue."""
    batch = await pool.running(3)
    ids = [each.id for each in batch.requests]
    await damage(pool, ids[1], how)

    await end(pool, batch)

    if end is release:
        await pool.form([("free", 3)])
    claimed = []
    while (batch_id := await pool.pop()) is not None:
        part = await pool.batches.claim(batch_id, "w2", "token")
        assert part is not None
        claimed += [each.id for each in part.requests]
    assert claimed == [ids[0], ids[2]]
    await check_quarantined(pool, ids[1], how)


@each_damage
async def test_cancel_ends_the_others(pool: Pool, how: str) -> None:
    """The gateway gets the replies of all readable requests."""
    ids = await pool.queue(3)
    await damage(pool, ids[1], how)

    replies = await pool.terminations.cancel([(i, ErrorCode.DEADLINE_EXCEEDED) for i in ids])

    assert [reply.id if reply else None for reply in replies] == [ids[0], None, ids[2]]
    assert await pool.client.llen(pool.keys.damaged) == 1


@each_damage
async def test_admit_ignores_a_damaged_primary(pool: Pool, how: str) -> None:
    """An equal request runs by itself."""
    primary, equal = pool.submission(same="s"), pool.submission(same="s")
    await pool.admit([primary])
    await damage(pool, primary.id, how)

    (verdict,) = await pool.admit([equal])

    assert verdict.outcome == "accepted"
    assert await pool.states([equal.id]) == ["queued"]
    await pool.form([("free", 2)])
    await check_quarantined(pool, primary.id, how)


async def test_admit_ignores_a_damaged_request_of_an_idempotency_key(pool: Pool) -> None:
    """If its row has a wrong type, the next request claims the key."""
    first = pool.submission(idempotency="i", fingerprint="f")
    await pool.admit([first])
    await damage(pool, first.id, "another type")

    verdicts = await pool.admit([pool.submission(), pool.submission(idempotency="i", fingerprint="f")])

    assert [verdict.outcome for verdict in verdicts] == ["accepted"] * 2
    await pool.client.delete(pool.keys.request(first.id))


@each_end
async def test_a_follower_of_a_damaged_primary_runs(pool: Pool, end: End) -> None:
    """However the batch of the primary ends; the other followers follow the new primary."""
    submissions = [pool.submission(same="s") for _ in range(3)]
    await pool.admit(submissions)
    await pool.form([("free", 3)])
    batch = await pool.claim_next()
    await damage(pool, submissions[0].id, "short env")

    await end(pool, batch)

    assert await pool.states([each.id for each in submissions]) == ["failed", "queued", "riding"]


async def test_the_gateway_gets_a_reply_if_the_row_names_it(pool: Pool) -> None:
    """Its client gets an error at once, and what it was charged is refunded."""
    (request_id,) = await pool.queue(1, quotas=[("1day", 10)], max_concurrency=5)
    await pool.client.hset(pool.keys.request(request_id), "env", b"?" * 13 + b" " * 40 + b" 0123456789abcdef")
    async with pool.client.pubsub() as channel:
        await channel.subscribe(pool.keys.responses("g1"))
        await channel.get_message(timeout=5)
        await pool.form([("free", 1)])
        message = await channel.get_message(timeout=5)

    assert message is not None
    reply = msgspec.msgpack.decode(message["data"])[0]
    assert (reply[0], reply[1], reply[4]) == (request_id, "customer", "internal_error")
    assert await spent(pool, "1day") == b"0"
    assert await pool.client.zcard(LEASES) == 0


async def test_the_record_of_damaged_rows_is_bounded_and_has_no_input(pool: Pool) -> None:
    """The newest thousand."""
    await pool.client.lpush(pool.keys.damaged, *("x" * 1000))
    (request_id,) = await pool.queue(1)
    await damage(pool, request_id, "short env")
    await pool.form([("free", 1)])

    entries = await pool.client.lrange(pool.keys.damaged, 0, -1)
    assert len(entries) == 1000
    assert request_id.encode() in entries[0]
    assert b"hello" not in entries[0]


@pytest.mark.parametrize("fields", [{}, {"size": "many"}, {"losses": "some"}])
async def test_a_damaged_batch_is_deleted(pool: Pool, fields: dict[str, str]) -> None:
    """Other batches whose leases expired are processed."""
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


async def test_unknown_ids_are_skipped(pool: Pool) -> None:
    """At the head of a queue, in the list of ready batches and among the leases (Sidekiq #4053)."""
    (request_id,) = await pool.queue(1)
    await pool.client.rpush(pool.keys.queue("free"), "nonsense", b"\xff\xfe")
    await pool.client.rpush(pool.keys.batch_queue, "no-such-batch")
    await pool.client.zadd(pool.keys.leases, {"no-such-lease": 1})

    await pool.form([("free", 1)])
    assert (await pool.terminations.reap(0)).unknown == 1
    await pool.terminations.expire(TIERS)

    assert await pool.batches.claim((await pool.pop()) or "", "w1", "token") is None
    assert [member.id for member in (await pool.claim_next()).requests] == [request_id]


# Indexes

SHORT_LEASE_MS = 40


def reaper_of(pool: Pool) -> Reaper:
    """A reaper that repairs indexes."""
    terminations = Terminations(pool.client, pool.keys, lease_ms=SHORT_LEASE_MS)
    repair = IndexRepair(pool.client, pool.keys, lease_ms=SHORT_LEASE_MS)
    return Reaper(terminations, pool.presence, lambda: TIERS, lambda: 0, 100, repair=repair)


async def break_index(pool: Pool, name: str) -> None:
    """Replace an index by a key of another type."""
    key = pool.keys.prefix + name
    await pool.client.delete(key)
    await (pool.client.rpush(key, "x") if name == "epoch" else pool.client.set(key, "x"))


async def renamed(pool: Pool) -> list[str]:
    """The names of the keys that were renamed."""
    prefix = pool.keys.prefix + "bad:"
    names = [key.decode() async for key in pool.client.scan_iter("*bad:*")]
    return sorted(name.removeprefix(prefix).rsplit(":", 1)[0] for name in names)


async def test_lost_leases_are_rebuilt(pool: Pool) -> None:
    """Of a running batch, of a ready one, and of one whose forming failed half-way; all requests complete."""
    ids = [(await pool.queue(1))[0] for _ in range(3)]
    await pool.form([("free", 1)])
    running = await pool.claim_next()
    await pool.form([("free", 1)])
    await break_index(pool, "leases")
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await pool.form([("free", 1)])
    reaper = reaper_of(pool)
    await reaper.run_once()

    assert await pool.client.zrange(pool.keys.leases, 0, -1) == [b"b1", b"b2", b"b3"]
    assert await renamed(pool) == ["leases"]
    assert await pool.client.scard(pool.keys.repairs) == 0
    assert len((await pool.presence.observe(TIERS)).notices) == 1
    await pool.batches.finish(running.batch_id, running.token, [done(running.requests[0].id)])

    async def ready() -> int:
        await reaper.run_once()
        return await pool.client.llen(pool.keys.batch_queue)

    for _ in range(2):
        await eventually(ready, "a batch is ready")
        claimed = await pool.claim_next()
        await pool.batches.finish(claimed.batch_id, claimed.token, [done(claimed.requests[0].id)])
    assert [reply.state for reply in await pool.results.fetch(ids) if reply] == ["completed"] * 3


async def test_a_finish_that_fails_half_way_can_be_sent_again(pool: Pool) -> None:
    """The replies are stored before the index is used, and each end is audited once."""
    batch = await pool.running(1)
    (request_id,) = (each.id for each in batch.requests)
    await break_index(pool, "leases")
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await pool.batches.finish(batch.batch_id, batch.token, [done(request_id)])
    await reaper_of(pool).run_once()
    await pool.batches.finish(batch.batch_id, batch.token, [done(request_id)])

    assert [reply.state for reply in await pool.results.fetch([request_id]) if reply] == ["completed"]
    assert [each.id for each in (await pool.audit())[1]] == [request_id]
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_lost_queue_is_rebuilt_in_order(pool: Pool) -> None:
    """With queued requests, oldest first; damaged rows end, since no other script would read them."""
    ids = [(await pool.queue(1))[0] for _ in range(5)]
    await pool.form([("free", 1)])
    paid = await pool.queue(1, "paid")
    await damage(pool, ids[1], "short env")
    await break_index(pool, "queue:free")
    await reaper_of(pool).run_once()

    queued = [each.decode() for each in await pool.client.lrange(pool.keys.queue("free"), 0, -1)]
    assert list(reversed(queued)) == ids[2:]
    assert [each.decode() for each in await pool.client.lrange(pool.keys.queue("paid"), 0, -1)] == paid
    assert await renamed(pool) == ["queue:free"]
    assert [(each.id, each.error_code) for each in (await pool.audit())[1]] == [(ids[1], "internal_error")]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "of another type") for name in ("backlogs:free", "waiting:free", "fair:free")),
        *((name, "of another type") for name in ("backlog:free:customer", "flow:free:customer")),
        *((name, "deleted") for name in ("backlogs:free", "waiting:free", "fair:free", "flow:free:customer")),
    ],
)
async def test_damaged_backlogs_lose_no_request(client: Redis, name: str, how: str) -> None:
    """Whatever key is damaged: after the next passes all requests run once, and others are admitted meanwhile."""
    pool = Pool(client, Keys(), places=2)
    await pool.gateway_lives("g1")
    ids = await pool.queue(9)
    await pool.form([("free", 4)])
    batch = await pool.claim_next()
    await (break_index(pool, name) if how == "of another type" else pool.client.delete(name))
    await pool.batches.finish(batch.batch_id, batch.token, [done(r.id) for r in batch.requests])
    await reaper_of(pool).run_once()
    ids += await pool.queue(1)
    for _ in range(3):
        await pool.form([("free", 9)])
        await reaper_of(pool).run_once()

    ran = (await pool.inflight()).values()
    assert sorted(i for members in ran for i in members) == sorted(ids[4:])
    assert await pool.depth("free") == 0


async def test_an_interrupted_repair_is_continued(pool: Pool) -> None:
    """The script that renames an index records it; the next pass rebuilds it."""
    (first,) = await pool.queue(1)
    await break_index(pool, "queue:free")
    await IndexRepair(pool.client, pool.keys, lease_ms=LEASE_MS)._repair(b"\x91\xa4free", 60_000, 60_000)
    assert await pool.client.llen(pool.keys.queue("free")) == 0

    await reaper_of(pool).run_once()

    assert await pool.client.lrange(pool.keys.queue("free"), 0, -1) == [first.encode()]


@pytest.mark.parametrize(
    "name",
    [
        *("batch_queue", "gpus", "gateways", "wake", "dlq", "outbox", "cordoned", "retry_budget", "auditors"),
        *("epoch", "damaged", "repairs", "slots", "unclaimed"),
    ],
)
async def test_every_index_is_repaired(pool: Pool, name: str) -> None:
    """By the next pass; then heartbeats, dispatchers and admission work as before. A lost outbox begins a new epoch, so that
    gateways send their recent records again.
    """
    before = (await pool.gateway_lives("g1")).epoch_us
    await break_index(pool, name)
    await reaper_of(pool).run_once()
    after = (await pool.gateway_lives("g1")).epoch_us
    await pool.queue(1)
    await pool.form([("free", 1)])

    assert await renamed(pool) == [name]
    assert (await pool.claim_next()).requests
    assert (after > before) == (name in {"outbox", "epoch"})


async def test_intact_indexes_are_not_changed(pool: Pool) -> None:
    """Nothing is renamed or reported."""
    await pool.queue(3)
    await pool.form([("free", 2)])
    await reaper_of(pool).run_once()

    assert await renamed(pool) == []
    assert (await pool.presence.observe(TIERS)).notices == []


async def test_a_customer_key_of_a_wrong_type_blocks_no_reply(pool: Pool) -> None:
    """Regression: all requests of the batch end and are audited, although nothing can be refunded."""
    requests = [pool.submission(tokens=10, tokens_per_minute=1e6, quotas=[("1year", 9)]) for _ in range(2)]
    assert outcomes(await pool.admit(requests)) == ["accepted"] * 2
    await pool.client.delete(CUSTOMER, LEASES)
    for key in (CUSTOMER, LEASES):
        await pool.client.set(key, "nonsense", px=60_000)

    await pool.form([("free", 2)])
    batch = await pool.claim_next()
    failed = Outcome(requests[1].id, "invalid_output", 50.0, 0, "v1", "")
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(requests[0].id), failed]) == 0

    assert await pool.states([s.id for s in requests]) == ["completed", "failed"]
    assert len((await pool.audit())[1]) == 2


async def test_an_error_inside_a_script_names_the_line_of_its_file(pool: Pool) -> None:
    """The text that Redis has is joined and shortened, so its own line numbers are those of no file."""
    await pool.client.delete(pool.keys.epoch)
    await pool.client.hset(pool.keys.epoch, "not", "a string")
    lines = files("ratelimit").joinpath("lua", "bucket.lua").read_text("utf-8").split("\n")
    number = next(number for number, line in enumerate(lines, 1) if line.startswith("local epoch_us"))

    with pytest.raises(
        RedisUnavailable, match=rf"^The script admit failed: ratelimit/lua/bucket.lua:{number}: WRONGTYPE "
    ):
        await pool.admit([pool.submission()])
