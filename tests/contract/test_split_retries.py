"""Lost batches come back in smaller parts, so that a request which kills its worker is alone before it is given up."""

import pytest

from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import BATCH_KEEP_MS, ClaimedBatch


async def line(pool: Pool) -> list[str]:
    """The ready batches, the next first."""
    return [batch_id.decode() for batch_id in await pool.client.lrange(pool.keys.batch_queue, 0, -1)]


async def fail(pool: Pool, batch: ClaimedBatch) -> None:
    assert await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)


def ids_of(batch: ClaimedBatch) -> list[str]:
    return [r.id for r in batch.requests]


async def test_a_loss_that_was_seen_halves_the_batch(pool: Pool) -> None:
    """The process died under one of them: two batches stand first in line, older members in the first."""
    batch = await pool.running(5)
    await pool.queue(1)
    fresh = await pool.form([("free", 1)])

    await fail(pool, batch)

    assert await line(pool) == ["b1.1", "b1.2", fresh]
    first, second = await pool.claim_next(), await pool.claim_next()
    assert ids_of(first) + ids_of(second) == ids_of(batch)
    assert (len(first.requests), len(second.requests)) == (2, 3)


async def test_a_second_loss_leaves_each_alone(pool: Pool) -> None:
    """In its last attempt no request shares a batch with another."""
    batch = await pool.running(4)
    await fail(pool, batch)
    first = await pool.claim_next()

    await fail(pool, first)

    assert await line(pool) == ["b1.1.1", "b1.1.2", "b1.2"]
    assert [ids_of(await pool.claim_next()) for _ in range(2)] == [[i] for i in ids_of(first)]


async def test_a_lease_that_ran_out_leaves_the_batch_whole(pool: Pool) -> None:
    """A host or a network was lost, most likely: nothing speaks against the members yet."""
    batch = await pool.running(3)

    await pool.reaped()

    assert await line(pool) == ["b1"]
    assert ids_of(await pool.claim_next()) == ids_of(batch)


@pytest.mark.parametrize("first_seen", [True, False])
async def test_a_second_lease_that_ran_out_leaves_each_alone(pool: Pool, *, first_seen: bool) -> None:
    """Whatever the first loss was, after the second nobody waits with anybody else."""
    batch = await pool.running(2)
    await (fail(pool, batch) if first_seen else pool.reaped())
    while await line(pool):
        await pool.claim_next()

    await pool.reaped()

    batches = [await pool.claim_next() for _ in await line(pool)]
    assert sorted(ids_of(b) for b in batches) == sorted([i] for i in ids_of(batch))


async def test_a_killer_ends_alone(pool: Pool) -> None:
    """One request kills whatever runs it: it alone is given up after three losses, all others complete."""
    batch = await pool.running(8)
    killer = ids_of(batch)[3]
    await fail(pool, batch)

    while await line(pool):
        part = await pool.claim_next()
        if killer in ids_of(part):
            await fail(pool, part)
        else:
            await pool.batches.finish(part.batch_id, part.token, [done(i) for i in ids_of(part)])

    replies = await pool.results.fetch(ids_of(batch))
    assert [r.id for r in replies if r and r.error_code == "worker_lost"] == [killer]
    assert [r.state for r in replies if r].count("completed") == 7
    assert [letter.id for letter in await pool.letters()] == [killer]
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_parts_keep_their_tiers(pool: Pool) -> None:
    """Each part has an inflight list for each of its tiers, oldest first, under a lease and with an end of its own."""
    paid, free = await pool.queue(3, "paid"), await pool.queue(3, "free")
    await pool.form([("paid", 3), ("free", 3)])
    batch = await pool.claim_next()

    await fail(pool, batch)

    assert await pool.inflight() == {
        "inflight:paid:b1.1": paid,
        "inflight:free:b1.2": free,
    }
    leases = await pool.client.zrange(pool.keys.leases, 0, -1)
    assert sorted(leases) == [b"b1.1", b"b1.2"]
    for key in [*await pool.inflight(), pool.keys.batch("b1.1"), pool.keys.batch("b1.2")]:
        assert 0 < await pool.client.pttl(key) <= BATCH_KEEP_MS + 4000
    assert await pool.client.exists(pool.keys.batch("b1")) == 0


async def test_an_odd_batch_of_many_tiers_keeps_everybody(pool: Pool) -> None:
    """The cut goes through the middle of a tier."""
    for tier in TIERS:
        await pool.queue(3, tier)
    await pool.form([(tier, 3) for tier in TIERS])
    batch = await pool.claim_next()

    await fail(pool, batch)

    assert ids_of(await pool.claim_next()) + ids_of(await pool.claim_next()) == ids_of(batch)


async def test_a_part_burns_no_attempt_before_its_claim(pool: Pool) -> None:
    """A part that waits in line past its lease is renewed, and counts its attempt when a worker has it."""
    await fail(pool, await pool.running(2))

    await pool.reaped()

    assert await line(pool) == ["b1.1", "b1.2"]
    assert [r.attempt for r in (await pool.claim_next()).requests] == [2]


async def test_who_lost_the_batch_cannot_touch_its_parts(pool: Pool) -> None:
    """The old id is gone: finish, renew, release and fail with the old token are stale and change nothing."""
    batch = await pool.running(2)
    await fail(pool, batch)

    assert await pool.batches.finish("b1", "token", [done(i) for i in ids_of(batch)]) == 2
    assert await pool.batches.renew("b1", "token") is False
    assert await pool.batches.release("b1", "token") is False
    assert await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0) is False
    assert await pool.batches.claim("b1", "w2", "t2") is None
    assert await pool.states(ids_of(batch)) == ["processing"] * 2
    assert await line(pool) == ["b1.1", "b1.2"]


async def test_the_answer_names_the_part_that_ran(pool: Pool) -> None:
    """Audit and reply speak of the batch of the last run, and of its size."""
    await fail(pool, await pool.running(3))
    await pool.claim_next()
    part = await pool.claim_next()

    await pool.batches.finish(part.batch_id, part.token, [done(i) for i in ids_of(part)])

    _, ended = await pool.audit()
    assert [(e.id, e.batch_id, e.batch_size, e.attempts) for e in ended] == [(i, "b1.2", 2, 2) for i in ids_of(part)]


async def test_a_suspect_batch_is_handed_back_whole(pool: Pool) -> None:
    """A graceful stop does not mix what may kill a worker with fresh work, and counts nothing."""
    await fail(pool, await pool.running(2))
    part = await pool.claim_next()
    await pool.queue(1)

    assert await pool.batches.release(part.batch_id, part.token) is True

    assert await line(pool) == ["b1.1", "b1.2"]
    again = await pool.claim_next("w2", "t2")
    assert [(r.id, r.attempt) for r in again.requests] == [(i, 2) for i in ids_of(part)]
    assert await pool.batches.release(part.batch_id, part.token) is False
