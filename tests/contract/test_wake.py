"""Wake tokens: a sleeping dispatcher is woken once on its condition, and never sleeps while work is queued for it."""

import pytest

from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import ClaimedBatch
from scheduler.protocol.wake_condition import FIRST_IDLE, NEVER, NO_WORKER, WakeCondition


async def tokens(pool: Pool) -> int:
    return int(await pool.client.llen(pool.keys.wake))


async def finish(pool: Pool, batch: ClaimedBatch) -> None:
    await pool.batches.finish(batch.batch_id, batch.token, [done(r.id) for r in batch.requests])


@pytest.mark.parametrize(
    ("depth", "admitted", "woken"),
    [
        (None, 1, 1),  # no condition is stored: every admission wakes
        (1, 1, 1),
        (4, 3, 0),
        (4, 4, 1),
        (4, 9, 1),  # one token
        (0, 9, 0),  # woken only by a worker
    ],
)
async def test_an_admission_wakes_at_the_depth(pool: Pool, depth: int | None, admitted: int, woken: int) -> None:
    """Conditions of other dispatchers do not replace it, and an expired one (of a lost dispatcher) is ignored."""
    await pool.client.hset(pool.keys.wake_at, "lost", f"0 {await pool.now_ms() - 1} -2")
    await pool.client.pexpire(pool.keys.wake_at, 2000)
    if depth is not None:
        assert (await pool.batches.look(TIERS, "d1", WakeCondition(depth), 2000)).depth == 0
        await pool.batches.look(TIERS, "d2", NEVER, 2000)
        assert 0 < await pool.client.pttl(pool.keys.wake_at) <= 2000

    await pool.queue(admitted)

    assert await tokens(pool) == woken


async def test_requests_in_the_reply_wake_no_dispatcher(pool: Pool) -> None:
    """A dispatcher sees what was admitted before it stored its condition; forming and sleeping remove the token."""
    await pool.batches.look(TIERS, "d1", NEVER, 2000)
    await pool.queue(3)
    assert await tokens(pool) == 0
    assert (await pool.batches.look(TIERS, "d1", WakeCondition(1), 2000)).depth == 3

    await pool.queue(1)
    assert await tokens(pool) == 1
    await pool.form([("free", 1)])
    assert await tokens(pool) == 0
    await pool.queue(1)
    await pool.batches.look(TIERS, "d1", WakeCondition(9), 2000)
    assert await tokens(pool) == 0


async def test_a_claim_and_a_finish_wake_unless_a_batch_is_ready(pool: Pool) -> None:
    """With a ready batch, the worker claims it, and the claim wakes."""
    claimed = await pool.running(2)
    assert await tokens(pool) == 1
    await pool.client.delete(pool.keys.wake)

    await finish(pool, claimed)
    assert await tokens(pool) == 1

    second = await pool.running(1)
    await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.client.delete(pool.keys.wake)
    await finish(pool, second)
    assert await tokens(pool) == 0


@pytest.mark.parametrize("how", ["reap", "push", "release", "fail"])
async def test_a_returned_batch_wakes(pool: Pool, how: str) -> None:
    """Otherwise it would wait until the next admission (BullMQ #2384)."""
    if how == "push":
        await pool.queue(1)
        await pool.form([("free", 1)])
        await pool.pop()
    else:
        await pool.running(1)
    await pool.client.delete(pool.keys.wake)

    if how == "release":
        await pool.batches.release("b1", "token")
    elif how == "fail":
        await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)
    else:
        await pool.expire_leases()
        await pool.terminations.reap(0)

    assert await tokens(pool) == 1


async def test_a_rejected_claim_wakes(pool: Pool) -> None:
    """A dead id in the list of ready batches kept a finish from waking."""
    claimed = await pool.running(1)
    await pool.client.rpush(pool.keys.batch_queue, claimed.batch_id)
    await pool.client.delete(pool.keys.wake)
    await finish(pool, claimed)
    assert await tokens(pool) == 0

    assert await pool.batches.claim((await pool.pop()) or "", "w1", "t2") is None

    assert await tokens(pool) == 1


@pytest.mark.parametrize(
    ("condition", "ready", "running", "woken"),
    [
        (WakeCondition(0, 1), 2, 3, 0),  # enough batches are ready
        (WakeCondition(0, 1), 1, 3, 1),
        (WakeCondition(8, NO_WORKER), 0, 0, 0),  # woken only by requests
        (WakeCondition(8, FIRST_IDLE), 0, 3, 1),  # the first of four workers is idle
        (WakeCondition(8, FIRST_IDLE), 0, 2, 0),  # another one was idle before
        (WakeCondition(8, FIRST_IDLE), 0, 0, 1),  # nothing runs any more
        (WakeCondition(32, 0), 0, 2, 1),  # a worker is idle
    ],
)
async def test_a_finish_wakes_at_the_number_of_ready_batches(
    pool: Pool, condition: WakeCondition, ready: int, running: int, woken: int
) -> None:
    """With this many ready and running batches after it."""
    claimed = [await pool.running(1) for _ in range(running + 1)]
    await pool.client.set(pool.keys.healthy_gpu_count, 4, px=60_000)
    await pool.queue(ready)
    await pool.batches.look(TIERS, "d1", condition, 2000)
    for _ in range(ready):
        await pool.form([("free", 1)])

    await finish(pool, claimed[-1])
    if ready:  # the worker claims the next one, and the claim wakes
        assert await tokens(pool) == 0
        await pool.queue(1)
        await pool.client.delete(pool.keys.wake)
        await pool.form([("free", 1)])
        await pool.claim_next()

    assert await tokens(pool) == woken


async def test_a_finish_wakes_when_more_workers_are_idle_than_batches_are_ready(pool: Pool) -> None:
    """The worker claims the ready batch, and another one is idle then. The claim does not wake."""
    claimed = [await pool.running(1) for _ in range(3)]
    await pool.client.set(pool.keys.healthy_gpu_count, 4, px=60_000)
    await pool.queue(1)
    await pool.batches.look(TIERS, "d1", WakeCondition(8, FIRST_IDLE), 2000)
    await pool.form([("free", 1)])

    await finish(pool, claimed[-1])
    assert await tokens(pool) == 1

    await pool.client.delete(pool.keys.wake)
    await pool.claim_next()
    assert await tokens(pool) == 0


@pytest.mark.parametrize(("status", "woken"), [("ready", 1), ("busy", 0), ("paused", 1)])
async def test_a_worker_wakes_when_it_can_run_batches_or_no_longer(pool: Pool, status: str, woken: int) -> None:
    """Not when it is busy, or ready again: its claims and ends of batches wake."""
    if status != "ready":
        await pool.worker_beats("w1", "ready")
    await pool.client.delete(pool.keys.wake)

    await pool.worker_beats("w1", status)

    assert await tokens(pool) == woken
