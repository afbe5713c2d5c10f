"""`form_batch`: ids leave their tier queues into one leased batch, in one step; what must not run ends instead."""

import pytest

from pool import TIERS, Pool
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import TierLimit

DEEP = [TierLimit(name, 1e6, 1e6, 1_000_000, TIERS[: i + 1]) for i, name in enumerate(TIERS)]


async def many_wait(pool: Pool, count: int) -> None:
    """`count` requests of free, which may wait for a minute."""
    for _ in range(count // 100):
        await pool.admit([pool.submission(total_ms=60_000, queue_ms=60_000) for _ in range(100)], DEEP)
        await pool.gateway_lives("g1")


async def some_are_busy(pool: Pool, workers: int, running: int) -> None:
    """So many healthy workers, of which `running` have a batch."""
    for number in range(workers):
        await pool.worker_beats(f"w{number}")
    await pool.presence.census()
    for _ in range(running):
        await pool.running(1)


async def test_ids_move_into_inflight_lists_under_a_lease(pool: Pool) -> None:
    """Members are processing, each in the inflight list of its tier, and the batch has a lease and stands ready."""
    paid, free = await pool.queue(2, "paid"), await pool.queue(3, "free")

    formed = await pool.batches.form("b1", [("paid", 2), ("free", 2)], 1, TIERS)

    assert formed.size == 4
    assert await pool.inflight() == {"inflight:paid:b1": paid, "inflight:free:b1": free[:2]}
    assert await pool.states([*paid, *free]) == ["processing"] * 4 + ["queued"]
    assert await pool.client.zscore(pool.keys.leases, "b1") > formed.queues.now_ms
    assert await pool.pop() == "b1"


async def test_the_reply_shows_what_still_waits(pool: Pool) -> None:
    """The scheduler needs no second look after forming."""
    await pool.queue(5, "free")

    formed = await pool.batches.form("b1", [("free", 2)], 1, TIERS)

    assert {t.name: t.depth for t in formed.queues.tiers} == {"enterprise": 0, "paid": 0, "free": 3}
    assert (formed.queues.ready_batches, formed.queues.leased_batches) == (1, 1)


async def test_refused_at_the_look_ahead(pool: Pool) -> None:
    """With enough batches ready nothing leaves the queue, so that it can still be overtaken."""
    await pool.queue(4)
    await pool.form([("free", 1)], lookahead=1)

    refused = await pool.batches.form("b2", [("free", 2)], 1, TIERS)

    assert refused.size == 0
    assert await pool.depth("free") == 3


async def test_new_batches_stand_behind_older_ones(pool: Pool) -> None:
    """Workers take the oldest batch first."""
    await pool.queue(3)

    formed = [await pool.form([("free", 1)]) for _ in range(3)]

    assert [await pool.pop() for _ in range(3)] == formed


async def test_what_waited_too_long_ends_instead(pool: Pool) -> None:
    """An id past its queue age or its deadline fails with that code and is noted; the rest of the batch is formed."""
    (aged,) = await pool.overdue(await pool.queue(1))
    (late,) = await pool.overdue(await pool.queue(1), "dl")
    (live,) = await pool.queue(1)

    formed = await pool.batches.form("b1", [("free", 3)], 1, TIERS)

    assert (formed.size, formed.dropped) == (1, 2)
    replies = await pool.results.fetch([aged, late, live])
    assert [r.error_code if r else None for r in replies] == ["queue_timeout", "deadline_exceeded", None]
    _, ended = await pool.audit()
    assert {e.id: e.error_code for e in ended} == {aged: "queue_timeout", late: "deadline_exceeded"}


async def test_work_of_a_dead_gateway_is_dropped(pool: Pool) -> None:
    """Nobody waits for it, so the GPU never sees it."""
    (request_id,) = await pool.queue(1)
    await pool.aged([request_id], 2100)
    await pool.client.delete(pool.keys.gateway("g1"))

    formed = await pool.batches.form("b1", [("free", 1)], 1, TIERS)

    assert (formed.size, formed.dropped) == (0, 1)
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert reply.error_code == "gateway_lost"


async def test_after_a_standstill_gateways_have_time_to_beat(pool: Pool) -> None:
    """Redis stood still and heartbeats ran out meanwhile: nobody counts as dead before, and a second after, it is noted."""
    ids = await pool.queue(3)
    await pool.aged(ids, 2500)
    await pool.terminations.reap(0)
    await pool.client.decrby(pool.keys.reaped_at, 2400)
    await pool.client.delete(pool.keys.gateway("g1"))

    assert (await pool.batches.form("b1", [("free", 1)], 9, TIERS)).dropped == 0
    await pool.terminations.reap(0)
    assert (await pool.batches.form("b2", [("free", 1)], 9, TIERS)).dropped == 0
    await pool.client.delete(pool.keys.resumed_at)
    assert (await pool.batches.form("b3", [("free", 1)], 9, TIERS)).dropped == 1


async def test_a_young_request_shows_that_its_gateway_lives(pool: Pool) -> None:
    """Redis came back empty and the next heartbeat is still to come: what was just admitted is not a dead gateway's."""
    (request_id,) = await pool.queue(1)
    await pool.client.delete(pool.keys.gateway("g1"))

    await pool.form([("free", 1)])

    assert await pool.inflight() == {"inflight:free:b1": [request_id]}


async def test_dead_entries_are_skipped(pool: Pool) -> None:
    """Cancelled ids that still stand in the list take no place in a batch."""
    ids = await pool.queue(3)
    await pool.terminations.cancel([(ids[0], ErrorCode.CANCELLED)])

    await pool.form([("free", 2)])

    assert await pool.inflight() == {"inflight:free:b1": ids[1:]}


async def test_an_unknown_id_in_the_queue_is_passed_over(pool: Pool) -> None:
    """Junk at the head of a queue costs one look, not the queue."""
    await pool.client.lpush(pool.keys.queue("free"), b"\xff\x00junk")
    (request_id,) = await pool.queue(1)

    await pool.form([("free", 1)])

    assert await pool.inflight() == {"inflight:free:b1": [request_id]}


async def test_an_empty_queue_makes_no_batch(pool: Pool) -> None:
    """Nothing is written when nothing waits."""
    formed = await pool.batches.form("b1", [("free", 4)], 1, TIERS)

    assert formed.size == 0
    assert await pool.pop() is None
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_late_enterprise_request_is_in_the_very_next_batch(pool: Pool) -> None:
    """Five thousand of free wait, and as many batches stand ready as may: it stands behind those alone."""
    await many_wait(pool, 5000)
    for number in range(12):
        await pool.batches.form(f"b{number}", [("free", 64)], 9, TIERS)
    assert await pool.client.llen(pool.keys.batch_queue) == 9
    (late,) = await pool.queue(1, "enterprise")

    await pool.pop()
    formed = await pool.batches.form("next", [("enterprise", 1), ("free", 63)], 9, TIERS)

    assert formed.size == 64
    assert (await pool.inflight())["inflight:enterprise:next"] == [late]


@pytest.mark.parametrize(
    ("workers", "running", "size", "joins"),
    [
        (2, 0, 40_000, False),
        (2, 0, 30_000, True),
        (1, 0, 40_000, True),  # no other worker could run it
        (2, 1, 40_000, True),
    ],
)
async def test_a_large_body_of_a_lower_tier_waits_for_an_idle_worker_of_its_own(
    pool: Pool, workers: int, running: int, size: int, joins: bool
) -> None:
    """The batch of the higher tier leaves without it, smaller requests behind it join, and it is first in the next batch."""
    await some_are_busy(pool, workers, running)
    body = encode_payload(Payload("tiny", "x" * size, {}))
    enterprise = await pool.queue(1, "enterprise", body=body)
    (large,) = await pool.queue(1, "free", body=body)
    small = await pool.queue(2, "free")

    await pool.batches.form("first", [("enterprise", 1), ("free", 2)], 9, TIERS)
    first = await pool.inflight()
    await pool.batches.form("second", [("free", 2)], 9, TIERS)
    second = await pool.inflight()

    assert first["inflight:enterprise:first"] == enterprise
    assert first["inflight:free:first"] == ([large, small[0]] if joins else small)
    assert second["inflight:free:second"] == ([small[1]] if joins else [large])


async def test_a_damaged_row_takes_nobody_with_it(pool: Pool) -> None:
    """Ids leave the queue many at a time: one whose row is nonsense is passed over and counted, its neighbours are members."""
    ids = await pool.queue(3)
    await pool.client.hdel(pool.keys.request(ids[1]), "dl", "qdl", "at", "env")

    formed = await pool.batches.form("b1", [("free", 3)], 1, TIERS)

    assert (formed.size, formed.dropped) == (2, 1)
    assert await pool.inflight() == {"inflight:free:b1": [ids[0], ids[2]]}


async def test_cost_does_not_grow_with_the_queue(pool: Pool) -> None:
    """Forming a batch makes as many calls inside Redis behind ten thousand requests as behind a hundred."""
    calls = []
    for depth in (100, 10_000):
        await many_wait(pool, depth)
        await pool.client.config_resetstat()
        assert (await pool.batches.form(f"b{depth}", [("free", 64)], 9, TIERS)).size == 64
        stats = await pool.client.info("commandstats")
        inner = ("cmdstat_hset", "cmdstat_hmget", "cmdstat_rpop", "cmdstat_lpush", "cmdstat_llen", "cmdstat_lindex")
        calls.append({name: stats[name]["calls"] for name in inner})

    assert calls[0] == calls[1]
    assert calls[0]["cmdstat_rpop"] == 1


@pytest.mark.parametrize(
    ("waiting", "fewest", "workers", "running", "members"),
    [
        (3, 1, 1, 0, 3),
        (3, 3, 2, 1, 3),
        (3, 4, 2, 0, 0),  # fewer than are worth it: the window goes on
        (8, 3, 2, 0, 8),  # a full batch
        (9, 3, 2, 0, 0),  # more than one batch: who goes first is the policy's to say
        (3, 1, 1, 1, 0),  # the worker is busy: waiting is free
        (3, 1, 0, 0, 0),  # there is none
        (0, 1, 1, 0, 0),
    ],
)
async def test_everything_leaves_or_nothing(
    pool: Pool, waiting: int, fewest: int, workers: int, running: int, members: int
) -> None:
    """A dispatcher that was woken at a depth looks and forms in one call, where there is nothing to choose."""
    await some_are_busy(pool, workers, running)
    for number in range(waiting):
        await pool.queue(1, TIERS[number % 3])

    formed = await pool.batches.form("b", [(tier, 8) for tier in TIERS], 9, TIERS, fewest=fewest)

    assert formed.size == members
    assert formed.queues.depth == waiting - members
