"""Batches for free slots: how many requests leave, what a claim returns, and whose slots count."""

import asyncio
from typing import Any

import msgspec
import pytest

from contract.slots import announce, claim_next, ended, finish, ids_of, in_slots, stored_slots
from pool import TIERS, WIDE, Pool
from scheduler.protocol.batches import WITHDRAWN, FreeSlots
from scheduler.protocol.pool_view import SlotView, with_background
from scheduler.protocol.wake_condition import FREE_SLOT, NEVER, WakeCondition


async def view(pool: Pool) -> SlotView | None:
    return (await pool.batches.look(TIERS)).slots


async def tokens(pool: Pool) -> int:
    return int(await pool.client.llen(pool.keys.wake))


# Forming


async def test_a_pool_without_slots_has_no_view_of_them(pool: Pool) -> None:
    """It runs batches, whatever the number of its workers."""
    await pool.worker_beats("w1")

    assert await view(pool) is None


async def test_a_view_of_the_free_slots(pool: Pool) -> None:
    """Of all workers, the fewest of one that has any; a worker over its number has none."""
    for worker, free in (("w1", 3), ("w2", 2), ("w3", 0)):
        await announce(pool, worker, free, 4)
    await pool.batches.finish_part("w3", [], FreeSlots(-1, 4))

    assert await stored_slots(pool) == {"w1": (3, 4), "w2": (2, 4), "w3": (-1, 4)}
    assert await view(pool) == SlotView(5, 12, 2)


async def test_no_more_leave_than_slots_are_free(pool: Pool) -> None:
    """Those of batches that wait for their claim are not free; a batch fits one worker."""
    await announce(pool, "w1", 3)
    await announce(pool, "w2", 4)
    await pool.queue(20)

    sizes = [(await pool.batches.form(f"b{n}", [("free", 20)], 1, TIERS)).size for n in range(4)]

    assert sizes == [3, 3, 1, 0]
    assert await view(pool) == SlotView(0, 8, 3)


async def test_two_dispatchers_form_no_more_than_one(pool: Pool) -> None:
    """Both observed the same free slots."""
    await announce(pool, "w1", 4)
    await pool.queue(20)

    formed = await asyncio.gather(*(pool.batches.form(f"b{n}", [("free", 4)], 99, TIERS) for n in range(2)))

    assert sorted(each.size for each in formed) == [0, 4]


async def test_the_highest_tiers_get_the_slots(pool: Pool) -> None:
    """Fewer are free than were observed: the last picks lose theirs; places that a queue does not fill go to the next."""
    await announce(pool, "w1", 4)
    enterprise, paid, free = await pool.queue(1, "enterprise"), await pool.queue(2, "paid"), await pool.queue(9, "free")

    await pool.form([("enterprise", 4), ("paid", 4), ("free", 4)])

    assert ids_of(await claim_next(pool)) == enterprise + paid + free[:1]


@pytest.mark.parametrize(("waiting", "kept", "size"), [(2, 0, 2), (4, 0, 4), (5, 0, 0), (2, 2, 2), (3, 2, 0)])
async def test_all_leave_at_once_if_they_fit(pool: Pool, waiting: int, kept: int, size: int) -> None:
    """In the call that reads the queues: in one worker, and without the slots that are kept free."""
    await announce(pool, "w1", 4)
    await pool.queue(waiting)

    formed = await pool.batches.form("b1", [("free", 32)], 1, TIERS, fewest=1, kept_free=kept)

    assert formed.size == size


async def test_lengths_do_not_matter(pool: Pool) -> None:
    """Nothing is padded: the limit of tokens is that of a batch."""
    await announce(pool, "w1", 4)
    ids = await pool.queue(4)

    await pool.batches.form("b1", [("free", 4)], 1, TIERS, max_tokens=1)

    assert ids_of(await claim_next(pool)) == ids


# Claims


async def test_a_claim_returns_the_queue_of_each_request(pool: Pool) -> None:
    """Also of a background queue, and whether the request was withdrawn."""
    batch = await in_slots(pool, 1)
    await finish(pool, [ended(batch, 0, WITHDRAWN)])
    job = pool.submission("paid.background")
    await pool.admit([job], [msgspec.structs.replace(WIDE[1], name=job.tier, ahead=(job.tier,))])
    await pool.batches.form("b2", [("free", 1), (job.tier, 1)], 1, with_background(TIERS))

    claimed = await claim_next(pool)

    assert [(r.queue, r.was_withdrawn, r.attempt) for r in claimed.requests] == [
        ("free", True, 1),
        ("paid.background", False, 1),
    ]


async def test_a_claim_without_slots_has_no_more_fields(pool: Pool) -> None:
    """Older workers decode it."""
    (member,) = (await pool.running(1)).requests

    assert (member.queue, member.was_withdrawn) == ("", False)


async def test_a_claim_takes_its_slots(pool: Pool) -> None:
    """Whether the batch is claimed or waits, its requests are counted once; those that ended before free theirs."""
    await announce(pool, "w1", 4)
    ids = await pool.queue(3)
    await pool.form([("free", 3)])
    assert await view(pool) == SlotView(1, 4, 4)
    await pool.overdue(ids[:1], "dl")

    await claim_next(pool)

    assert await stored_slots(pool) == {"w1": (2, 4)}
    assert await view(pool) == SlotView(2, 4, 2)


async def test_a_batch_whose_requests_all_ended_takes_no_slot(pool: Pool) -> None:
    """The claim closes it, and a dispatcher is woken."""
    await announce(pool, "w1", 4)
    ids = await pool.queue(2)
    await pool.form([("free", 2)])
    await pool.batches.look(TIERS, "d1", WakeCondition(0, FREE_SLOT), 2000)
    await pool.overdue(ids, "dl")

    assert ids_of(await claim_next(pool)) == []

    assert await view(pool) == SlotView(4, 4, 4)
    assert await tokens(pool) == 1
    assert await pool.client.zcard(pool.keys.leases) == 0


# Whose slots count


@pytest.mark.parametrize("status", ["draining", "paused", "loading"])
async def test_slots_of_a_worker_that_starts_nothing_do_not_count(pool: Pool, status: str) -> None:
    """Also after the ends of the requests that it still runs, until it is healthy again."""
    batch = await in_slots(pool, 2)
    await announce(pool, "w1", 2, status=status)
    await finish(pool, [ended(batch, 0)], 3)
    assert await view(pool) is None
    await finish(pool, [ended(batch, 1)], None)
    assert await view(pool) is None

    await announce(pool, "w1", 4)
    assert await view(pool) == SlotView(4, 4, 4)


@pytest.mark.parametrize("how", ["silent", "gone", "unhealthy"])
async def test_the_census_forgets_lost_workers(pool: Pool, how: str) -> None:
    """Without heartbeats, stopped, or not healthy any more; the others stay."""
    for worker in ("w1", "w2"):
        await announce(pool, worker)
    if how == "silent":
        await pool.client.zincrby(pool.keys.gpus, -60_000, "w1")
    elif how == "gone":
        await pool.presence.worker_gone("w1")
    else:
        await pool.client.hset(pool.keys.gpu("w1"), "status", "paused")

    await pool.presence.census()

    assert await stored_slots(pool) == {"w2": (4, 4)}


async def test_a_heartbeat_reports_free_slots(pool: Pool) -> None:
    """A number, or a change of the number of slots while a claim is in progress; nothing is free before a number is known."""
    await announce(pool, "w1", -1, 4)
    assert await view(pool) == SlotView(0, 4, 0)
    await announce(pool, "w1", 3, 4)
    await announce(pool, "w1", -1, 6)
    assert await view(pool) == SlotView(5, 6, 5)
    await announce(pool, "w1", -1, 2)
    assert await view(pool) == SlotView(1, 2, 1)
    await announce(pool, "w1", 0, 2)
    assert await view(pool) == SlotView(0, 2, 0)


# Wake tokens


@pytest.mark.parametrize(
    ("condition", "woken"), [(WakeCondition(0, FREE_SLOT), 1), (WakeCondition(5, FREE_SLOT), 1), (NEVER, 0), (None, 1)]
)
@pytest.mark.parametrize("event", ["heartbeat", "end"])
async def test_a_free_slot_wakes(pool: Pool, condition: WakeCondition | None, woken: int, event: str) -> None:
    """The end of a request, or a heartbeat with more slots; a dispatcher that waits for something else sleeps on."""
    batch = await in_slots(pool, 2)
    await pool.client.delete(pool.keys.wake, pool.keys.wake_at)
    if condition is not None:
        await pool.batches.look(TIERS, "d1", condition, 2000)

    await (announce(pool, "w1", 3) if event == "heartbeat" else finish(pool, [ended(batch, 0)], 3))

    assert await tokens(pool) == woken


async def test_a_heartbeat_without_news_wakes_nobody(pool: Pool) -> None:
    """Nor does one with fewer free slots."""
    await announce(pool, "w1", 3)
    await pool.batches.look(TIERS, "d1", WakeCondition(0, FREE_SLOT), 2000)

    for free in (3, 2):
        await announce(pool, "w1", free)

    assert await tokens(pool) == 0


async def test_a_claim_or_an_idle_worker_wakes_nobody_that_waits_for_a_slot(pool: Pool) -> None:
    """The free slots are the same before and after the claim."""
    await announce(pool, "w1", 4)
    await pool.queue(2)
    await pool.form([("free", 2)])
    await pool.batches.look(TIERS, "d1", WakeCondition(0, FREE_SLOT), 2000)

    await claim_next(pool)

    assert await tokens(pool) == 0


async def test_requests_that_are_handed_back_wake(pool: Pool) -> None:
    """A dispatcher that sleeps because its queues were empty."""
    batch = await in_slots(pool, 1)
    await pool.batches.look(TIERS, "d1", WakeCondition(1), 2000)

    await finish(pool, [ended(batch, 0, WITHDRAWN)])

    assert await tokens(pool) == 1


@pytest.mark.parametrize("condition", [WakeCondition(1, FREE_SLOT), WakeCondition(1)])
async def test_an_admission_wakes_while_slots_are_free(pool: Pool, condition: WakeCondition) -> None:
    """Without free slots the condition has no number of requests."""
    await pool.batches.look(TIERS, "d1", condition, 2000)
    await pool.queue(1)
    assert await tokens(pool) == 1

    await pool.batches.look(TIERS, "d1", WakeCondition(0, FREE_SLOT), 2000)
    await pool.queue(1)
    assert await tokens(pool) == 0


# Damaged keys


@pytest.mark.parametrize("value", ["", "4", "four 4", "4 4 4", "-"])
async def test_a_value_that_cannot_be_read_is_no_slot(pool: Pool, value: str) -> None:
    """The next heartbeat writes it again."""
    batch = await in_slots(pool, 1)
    await announce(pool, "w2", 1)
    await pool.client.hset(pool.keys.prefix + "slots", "w1", value)
    assert await view(pool) == SlotView(1, 4, 1)
    await finish(pool, [ended(batch, 0)], None)
    assert await view(pool) == SlotView(1, 4, 1)

    await announce(pool, "w1", 2)
    assert await view(pool) == SlotView(3, 8, 1)


async def test_an_unclaimed_size_that_cannot_be_read_is_ignored(pool: Pool) -> None:
    """It expires."""
    await announce(pool, "w1", 4)
    await pool.client.hset(pool.keys.prefix + "unclaimed", "b9", "many")
    await pool.client.pexpire(pool.keys.prefix + "unclaimed", 1000)

    assert await view(pool) == SlotView(4, 4, 4)


@pytest.mark.parametrize("name", ["slots", "unclaimed"])
@pytest.mark.parametrize("step", ["beat", "form", "claim", "finish", "census", "observe", "reap"])
async def test_nothing_fails_with_a_key_of_a_wrong_type(pool: Pool, name: str, step: str) -> None:
    """Requests run to their ends: without `slots` as batches, without `unclaimed` with fewer slots known to be taken."""
    batch = await in_slots(pool, 2)
    await pool.queue(1)
    if step == "claim":
        await pool.form([("free", 1)])
    await pool.client.delete(pool.keys.prefix + name)
    await pool.client.set(pool.keys.prefix + name, "x", px=60_000)
    steps: dict[str, Any] = {
        "beat": lambda: announce(pool, "w1", 4),
        "form": lambda: pool.form([("free", 1)]),
        "claim": lambda: claim_next(pool),
        "finish": lambda: finish(pool, [ended(batch, 0), ended(batch, 1)]),
        "census": pool.presence.census,
        "observe": lambda: pool.presence.observe(TIERS),
        "reap": pool.reaped,
    }

    await steps[step]()

    if step == "finish":
        assert await pool.states(ids_of(batch)) == ["completed"] * 2


@pytest.mark.parametrize("how", ["damaged", "deleted", "over"])
async def test_a_batch_that_is_dropped_waits_for_no_claim(pool: Pool, how: str) -> None:
    """Otherwise its places would stay taken as long as other batches are formed."""
    await announce(pool, "w1", 4)
    ids = await pool.queue(3)
    await pool.form([("free", 3)])
    match how:
        case "damaged":
            await pool.client.hset(pool.keys.batch("b1"), "size", "many")
        case "deleted":
            await pool.client.delete(pool.keys.batch("b1"))
        case "over":
            await pool.overdue(ids, "dl")

    await pool.reaped()

    assert await view(pool) == SlotView(4, 4, 4)


# Lifetimes


async def test_the_lifetimes_of_the_keys_of_slots(pool: Pool) -> None:
    """`slots` stays; unclaimed sizes live for a minute after the last one; the batch lives as long as its requests."""
    await announce(pool, "w1", 4)
    await pool.queue(1, total_ms=600_000, queue_ms=600_000)
    await pool.form([("free", 1)])

    assert await pool.client.pttl(pool.keys.prefix + "slots") == -1
    assert 50_000 < await pool.client.pttl(pool.keys.prefix + "unclaimed") <= 60_000
    batch = await claim_next(pool)
    assert await pool.client.pttl(pool.keys.batch(batch.batch_id)) > 600_000
    assert await pool.batches.renew(batch.batch_id, batch.token)
    assert await pool.client.pttl(pool.keys.batch(batch.batch_id)) > 600_000
