"""A key of another type in the place of an index: it is set aside, and no request is lost with it."""

import pytest

from eventually import eventually
from pool import TIERS, Pool, done
from scheduler.batching.reaper import Reaper
from scheduler.errors import RedisUnavailable
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.index_repair import IndexRepair

LEASE_MS = 40


def reaper_of(pool: Pool) -> Reaper:
    terminations = Terminations(pool.client, pool.keys, lease_ms=LEASE_MS)
    repair = IndexRepair(pool.client, pool.keys, lease_ms=LEASE_MS)
    return Reaper(terminations, pool.presence, lambda: TIERS, lambda: 0, 100, repair=repair)


async def told(pool: Pool) -> list[str]:
    return (await pool.presence.observe(TIERS)).notices


async def set_aside(pool: Pool) -> list[str]:
    start = pool.keys.prefix + "bad:"
    return sorted([key.decode().removeprefix(start).rsplit(":", 1)[0] async for key in pool.client.scan_iter("*bad:*")])


async def test_lost_leases_are_found_again(pool: Pool) -> None:
    """Of a batch that runs, whose worker goes on, of one that stands ready, and of one whose forming broke off half way."""
    await pool.gateway_lives("g1")
    ids = [(await pool.queue(1))[0] for _ in range(3)]
    await pool.form([("free", 1)])
    running = await pool.claim_next()
    await pool.form([("free", 1)])
    await pool.client.delete(pool.keys.leases)
    await pool.client.set(pool.keys.leases, "somebody else's")
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await pool.form([("free", 1)])
    reaper = reaper_of(pool)
    await reaper.run_once()

    assert await pool.client.zrange(pool.keys.leases, 0, -1) == [b"b1", b"b2", b"b3"]
    assert await set_aside(pool) == ["leases"]
    assert await pool.client.scard(pool.keys.repairs) == 0
    (notice,) = await told(pool)
    assert notice.startswith(f"Redis key {pool.keys.prefix}leases had a wrong type: it was renamed to ")
    await pool.batches.finish(running.batch_id, running.token, [done(running.requests[0].id)])
    for _ in range(2):
        await eventually(lambda: ready_after(pool, reaper), "a batch stands ready")
        claimed = await pool.claim_next()
        await pool.batches.finish(claimed.batch_id, claimed.token, [done(claimed.requests[0].id)])
    assert [reply.state for reply in await pool.results.fetch(ids) if reply] == ["completed"] * 3


async def ready_after(pool: Pool, reaper: Reaper) -> int:
    await reaper.run_once()
    return await pool.client.llen(pool.keys.batch_queue)


async def test_what_ended_meanwhile_is_told_and_audited_once(pool: Pool) -> None:
    """A finish that meets the broken index is an error to its worker, which sends it again; the ends were told all the same."""
    await pool.gateway_lives("g1")
    (request_id,) = await pool.queue(1)
    await pool.form([("free", 1)])
    claimed = await pool.claim_next()
    await pool.client.delete(pool.keys.leases)
    await pool.client.set(pool.keys.leases, "x")
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await pool.batches.finish(claimed.batch_id, claimed.token, [done(request_id)])
    await reaper_of(pool).run_once()
    await pool.batches.finish(claimed.batch_id, claimed.token, [done(request_id)])

    assert [reply.state for reply in await pool.results.fetch([request_id]) if reply] == ["completed"]
    _, ended = await pool.audit()
    assert [each.id for each in ended] == [request_id]
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_lost_queue_is_found_again_in_its_order(pool: Pool) -> None:
    """With what waited, oldest first, and not with what runs or has ended; others stay as they are."""
    await pool.gateway_lives("g1")
    ids = [(await pool.queue(1))[0] for _ in range(5)]
    await pool.form([("free", 1)])
    paid = await pool.queue(1, "paid")
    await pool.client.delete(pool.keys.queue("free"))
    await pool.client.hset(pool.keys.queue("free"), "a", "b")
    await reaper_of(pool).run_once()

    waiting = [each.decode() for each in await pool.client.lrange(pool.keys.queue("free"), 0, -1)]
    assert list(reversed(waiting)) == ids[1:]
    assert [each.decode() for each in await pool.client.lrange(pool.keys.queue("paid"), 0, -1)] == paid
    assert await set_aside(pool) == ["queue:free"]


async def test_a_damaged_row_ends_when_its_queue_is_lost(pool: Pool) -> None:
    """It stands in no queue any more, so nobody else would meet it: the audit has its end."""
    await pool.gateway_lives("g1")
    first, second = await pool.queue(2)
    await pool.client.hset(pool.keys.request(first), "env", "1234567890123 1234567890123")
    await pool.client.delete(pool.keys.queue("free"))
    await pool.client.set(pool.keys.queue("free"), "x")
    await reaper_of(pool).run_once()

    assert await pool.client.lrange(pool.keys.queue("free"), 0, -1) == [second.encode()]
    _, ended = await pool.audit()
    assert [(each.id, each.error_code) for each in ended] == [(first, "internal_error")]


async def test_who_is_killed_meanwhile_leaves_it_to_the_next(pool: Pool) -> None:
    """What is set aside is noted in the same script, and built again by whoever passes next."""
    await pool.gateway_lives("g1")
    (first,) = await pool.queue(1)
    await pool.client.delete(pool.keys.queue("free"))
    await pool.client.set(pool.keys.queue("free"), "x")
    repair = IndexRepair(pool.client, pool.keys)
    await repair._repair(b"\x91\xa4free", 60_000, 60_000)  # And then it dies.
    assert await pool.client.llen(pool.keys.queue("free")) == 0
    await reaper_of(pool).run_once()

    assert await pool.client.lrange(pool.keys.queue("free"), 0, -1) == [first.encode()]


@pytest.mark.parametrize(
    "name",
    [
        "batch_queue",
        "gpus",
        "gateways",
        "wake",
        "dlq",
        "outbox",
        "cordoned",
        "retry_budget",
        "auditors",
        "epoch",
        "damaged",
        "repairs",
    ],
)
async def test_every_index_is_repaired(pool: Pool, name: str) -> None:
    """The next pass sets it aside; then beats, looks and admission work as before."""
    await pool.gateway_lives("g1")
    key = pool.keys.prefix + name
    await pool.client.delete(key)
    await (pool.client.rpush(key, "x") if name == "epoch" else pool.client.set(key, "x"))
    await reaper_of(pool).run_once()
    await pool.gateway_lives("g1")
    await pool.queue(1)
    await pool.form([("free", 1)])

    assert await set_aside(pool) == [name]
    assert (await pool.claim_next()).requests


async def test_another_epoch_has_gateways_tell_a_lost_outbox_again(pool: Pool) -> None:
    """As after the loss of all of Redis: what waits is submitted again under its id, and what ended lately is told."""
    before = (await pool.gateway_lives("g1")).epoch_us
    await pool.client.delete(pool.keys.outbox)
    await pool.client.set(pool.keys.outbox, "x")
    await reaper_of(pool).run_once()

    assert (await pool.gateway_lives("g1")).epoch_us > before


async def test_what_is_well_is_left_alone(pool: Pool) -> None:
    """Nothing is set aside and nothing told."""
    await pool.gateway_lives("g1")
    await pool.queue(3)
    await pool.form([("free", 2)])
    await reaper_of(pool).run_once()

    assert await set_aside(pool) == []
    assert await told(pool) == []
