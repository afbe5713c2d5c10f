"""`fail`, `reap`, `release`, `push_back`: a lost worker costs an attempt, a graceful one does not, nothing is lost."""

import asyncio

import pytest

from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import LEASE_MS, RETRY_BUDGET
from scheduler.protocol.cancellation import Reaped


async def test_a_failed_batch_goes_to_the_head_of_the_line(pool: Pool) -> None:
    """The supervisor saw its model process die: the next worker that is free takes this batch first."""
    claimed = await pool.running(2)
    await pool.queue(1)
    await pool.form([("free", 1)])

    assert await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0) is True

    again = await pool.claim_next("w2")
    assert [(r.id, r.attempt) for r in again.requests] == [(claimed.requests[0].id, 2)]
    assert (
        await pool.batches.finish("b1", "token", [done(r.id) for r in claimed.requests]) == 2
    )  # the old owner is stale
    assert await pool.batches.finish(again.batch_id, again.token, [done(again.requests[0].id)]) == 0


async def test_a_retried_batch_stands_in_line_once(pool: Pool) -> None:
    """The reaper pushed it again before its slow claim came: the entry that was left there is not doubled."""
    await pool.running(1)
    await pool.client.rpush(pool.keys.batch_queue, "b1")

    await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)

    assert [await pool.pop(), await pool.pop()] == ["b1", None]


async def test_a_split_batch_stands_in_line_no_more(pool: Pool) -> None:
    """The same, where halves of it go on: the id that was left there leads to nothing, and would hold a place."""
    await pool.running(2)
    await pool.client.rpush(pool.keys.batch_queue, "b1")

    await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)

    assert [await pool.pop(), await pool.pop(), await pool.pop()] == ["b1.1", "b1.2", None]


async def test_only_the_owner_can_fail_a_batch(pool: Pool) -> None:
    """A supervisor that lost its batch cannot give it away a second time."""
    await pool.running(1)

    assert await pool.batches.fail("b1", "other", ErrorCode.WORKER_LOST, 0) is False
    assert await pool.pop() is None


async def lose(pool: Pool, batch_id: str, times: int) -> None:
    """Let a claimed batch be lost and claimed again, `times` times."""
    for i in range(times):
        await pool.expire_leases()
        await pool.terminations.reap(0)
        if i < times - 1:
            assert await pool.pop() == batch_id
            assert await pool.batches.claim(batch_id, "w", f"t{i}") is not None


async def test_the_budget_is_two_retries(pool: Pool) -> None:
    """The third lost worker ends the request as worker_lost and leaves a dead letter."""
    claimed = await pool.running(1)
    request_id = claimed.requests[0].id

    await lose(pool, "b1", RETRY_BUDGET + 1)

    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.state, reply.error_code, reply.attempts) == ("failed", "worker_lost", 3)
    assert await pool.client.llen(pool.keys.dlq) == 1
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0


@pytest.mark.parametrize(
    ("cause", "code"),
    [(ErrorCode.WORKER_LOST, "deadline_exceeded"), (ErrorCode.GPU_TIMEOUT, "gpu_timeout")],
)
async def test_without_time_for_a_retry_it_ends_at_once(pool: Pool, cause: ErrorCode, code: str) -> None:
    """A retry that could not finish is not started."""
    claimed = await pool.running(1)

    await pool.batches.fail("b1", "token", cause, 10_000)

    (reply,) = await pool.results.fetch([claimed.requests[0].id])
    assert reply is not None
    assert reply.error_code == code
    assert await pool.pop() is None


async def test_an_unclaimed_batch_in_line_is_renewed(pool: Pool) -> None:
    """Waiting behind busy workers is nobody's fault: no attempt, no second entry."""
    ids = await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.expire_leases()

    assert await pool.terminations.reap(0) == Reaped(1, 0, 0, 0)

    assert [await pool.pop(), await pool.pop()] == ["b1", None]
    claimed = await pool.batches.claim("b1", "w", "t")
    assert claimed is not None
    assert [(r.id, r.attempt) for r in claimed.requests] == [(ids[0], 1)]


async def test_a_batch_popped_and_never_claimed_is_pushed_again(pool: Pool) -> None:
    """The worker died between the pop and the claim: it costs a lease, no attempt."""
    await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.pop()
    await pool.expire_leases()

    assert await pool.terminations.reap(0) == Reaped(0, 1, 0, 0)

    assert await pool.pop() == "b1"
    claimed = await pool.batches.claim("b1", "w", "t")
    assert claimed is not None
    assert claimed.requests[0].attempt == 1


async def test_a_standstill_is_nobodys_fault(pool: Pool) -> None:
    """After Redis stood still no worker could renew: running batches get one more lease instead of a lost attempt."""
    await pool.terminations.reap(0)
    await pool.running(2)
    await pool.expire_leases()
    await pool.client.decrby(pool.keys.reaped_at, 700)

    assert await pool.terminations.reap(0) == Reaped(1, 0, 0, 0)

    await pool.expire_leases()
    assert await pool.terminations.reap(0) == Reaped(0, 0, 1, 0)


async def test_a_batch_that_nobody_will_claim_ends_in_time(pool: Pool) -> None:
    """Every worker is gone: the members of a formed batch end with their deadline instead of waiting for ever."""
    ids = await pool.queue(2)
    await pool.form([("free", 2)])
    await pool.overdue(ids, "dl")
    await pool.expire_leases()

    await pool.terminations.reap(0)

    assert [r.error_code for r in await pool.results.fetch(ids) if r] == ["deadline_exceeded"] * 2
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_released_request_was_picked_in_time(pool: Pool) -> None:
    """The time in a worker's hands does not count as waiting: a hand-back never dies of queue age."""
    claimed = await pool.running(1)
    ids = await pool.overdue([r.id for r in claimed.requests])
    await pool.batches.release(claimed.batch_id, "token")

    again = await pool.form([("free", 1)])

    assert await pool.inflight() == {f"inflight:free:{again}": ids}


async def test_two_reapers_at_once_are_harmless(pool: Pool) -> None:
    """Every batch is retried once, whoever comes first."""
    claimed = [(await pool.running(2, token=f"t{i}")) for i in range(5)]
    await pool.expire_leases()

    passes = await asyncio.gather(*(pool.terminations.reap(0) for _ in range(4)))

    assert sum(p.retried for p in passes) == 5
    assert sorted([await pool.pop() for _ in range(6)], key=str) == sorted(
        [c.batch_id for c in claimed] + [None], key=str
    )


async def test_a_lease_without_a_batch_is_forgotten(pool: Pool) -> None:
    """A trace that leads nowhere is counted and removed."""
    await pool.client.zadd(pool.keys.leases, {"ghost": 1})

    assert await pool.terminations.reap(0) == Reaped(0, 0, 0, 1)
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_release_returns_ids_in_order_without_an_attempt(pool: Pool) -> None:
    """A graceful stop hands its batch back to the head of the tier queue as if it had never been formed."""
    claimed = await pool.running(3)
    later = await pool.queue(1)
    await pool.client.delete(pool.keys.wake)

    assert await pool.batches.release("b1", "token") is True

    ids = [r.id for r in claimed.requests]
    assert await pool.states(ids) == ["queued"] * 3
    assert [i.decode() for i in reversed(await pool.client.lrange(pool.keys.queue("free"), 0, -1))] == [*ids, *later]
    assert await pool.client.llen(pool.keys.wake) == 1
    assert await pool.inflight() == {}
    await pool.form([("free", 3)])
    again = await pool.batches.claim((await pool.pop()) or "", "w2", "t2")
    assert again is not None
    assert [(r.id, r.attempt) for r in again.requests] == [(i, 1) for i in ids]
    assert await pool.batches.release("b1", "token") is False


async def test_a_popped_batch_can_be_pushed_back(pool: Pool) -> None:
    """A stopping worker returns what its last blocking read gave it; twice is once."""
    await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.pop()

    await pool.batches.push_back("b1")
    await pool.batches.push_back("b1")
    await pool.batches.push_back("unknown")

    assert [await pool.pop(), await pool.pop()] == ["b1", None]


async def test_a_clock_that_went_back_makes_no_lease_longer(pool: Pool) -> None:
    """A lease of an hour ahead was written before Redis TIME went back: from the next pass it lasts as long as any other."""
    claimed = await pool.running(1)
    ahead_ms = await pool.now_ms() + 3_600_000
    await pool.client.zadd(pool.keys.leases, {claimed.batch_id: ahead_ms})
    await pool.client.set(pool.keys.reaped_at, ahead_ms)

    assert await pool.terminations.reap(0) == Reaped(0, 0, 0, 0)
    assert await pool.client.zscore(pool.keys.leases, claimed.batch_id) <= await pool.now_ms() + LEASE_MS

    await pool.reaped()
    assert (await pool.claim_next("w2")).requests[0].attempt == 2
