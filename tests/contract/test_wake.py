"""Wake tokens: a sleeping dispatcher is woken for what it asked for, once, and never left asleep over work."""

import pytest

from pool import TIERS, Pool, done
from scheduler.batching.policy import NEVER, WakeCondition


async def tokens(pool: Pool) -> int:
    return int(await pool.client.llen(pool.keys.wake))


@pytest.mark.parametrize(
    ("asked", "admitted", "woken"),
    [
        (None, 1, 1),  # nobody asked (Redis came back empty, say): every admission wakes
        (1, 1, 1),
        (4, 3, 0),  # a part batch that waits out its window
        (4, 4, 1),  # now it is full
        (4, 9, 1),  # one token, however much comes
        (0, 9, 0),  # only a worker can change anything
    ],
)
async def test_an_admission_wakes_at_the_depth_asked_for(
    pool: Pool, asked: int | None, admitted: int, woken: int
) -> None:
    """The dispatcher sleeps through what would not change its mind."""
    if asked is not None:
        assert (await pool.batches.look(TIERS, "d1", WakeCondition(asked), 2000)).depth == 0

    await pool.queue(admitted)

    assert await tokens(pool) == woken


async def test_going_to_sleep_shows_what_came_meanwhile(pool: Pool) -> None:
    """An admission between the last look and the sleep pushed no token, so the sleeper must see it itself."""
    await pool.batches.look(TIERS, "d1", NEVER, 2000)
    await pool.queue(3)

    assert (await pool.batches.look(TIERS, "d1", WakeCondition(1), 2000)).depth == 3
    assert await tokens(pool) == 0


async def test_the_wish_ages_out(pool: Pool) -> None:
    """A dispatcher that died asleep does not keep the others from being woken."""
    await pool.batches.look(TIERS, "d1", NEVER, 2000)

    assert 0 < await pool.client.pttl(pool.keys.wake_at) <= 2000


async def test_a_worker_that_has_nothing_ready_wakes(pool: Pool) -> None:
    """A claim makes room in the line, a finish makes a worker idle: both wake, unless the next batch stands ready."""
    claimed = await pool.running(2)
    assert await tokens(pool) == 1
    await pool.client.delete(pool.keys.wake)

    await pool.batches.finish(claimed.batch_id, "token", [done(r.id) for r in claimed.requests])
    assert await tokens(pool) == 1

    second = await pool.running(1)
    await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.client.delete(pool.keys.wake)
    await pool.batches.finish(second.batch_id, "token", [done(r.id) for r in second.requests])
    assert await tokens(pool) == 0


async def test_each_dispatcher_has_a_wish_of_its_own(pool: Pool) -> None:
    """One that sleeps over a full line does not overwrite the wish of another that waits for the next request."""
    await pool.batches.look(TIERS, "d1", WakeCondition(1), 2000)
    await pool.batches.look(TIERS, "d2", NEVER, 2000)

    await pool.queue(1)

    assert await tokens(pool) == 1


async def test_a_refused_claim_wakes(pool: Pool) -> None:
    """A dead id in the line kept a finish from waking: whoever pops it must do so instead."""
    claimed = await pool.running(1)
    await pool.client.rpush(pool.keys.batch_queue, claimed.batch_id)
    await pool.client.delete(pool.keys.wake)
    await pool.batches.finish(claimed.batch_id, "token", [done(r.id) for r in claimed.requests])
    assert await tokens(pool) == 0

    assert await pool.batches.claim((await pool.pop()) or "", "w1", "t2") is None

    assert await tokens(pool) == 1


@pytest.mark.parametrize(
    ("wish", "ready", "running", "woken"),
    [
        (WakeCondition(0, 1), 2, 3, 0),  # the line is long enough
        (WakeCondition(0, 1), 1, 3, 1),
        (WakeCondition(8, -2), 0, 0, 0),  # idle workers there are enough: only what comes counts
        (WakeCondition(8, -1), 0, 2, 0),
        (WakeCondition(8, -1), 0, 0, 1),  # nothing runs any more: whoever waits for an answer is here
        (WakeCondition(32, 0), 0, 2, 1),  # there is an idle worker
    ],
)
async def test_a_worker_wakes_whom_it_helps(
    pool: Pool, wish: WakeCondition, ready: int, running: int, woken: int
) -> None:
    """A finish, with so many batches ready and running after it, wakes a dispatcher that asked for that."""
    claimed = [await pool.running(1) for _ in range(running + 1)]
    await pool.queue(ready)
    await pool.batches.look(TIERS, "d1", wish, 2000)
    for _ in range(ready):
        await pool.form([("free", 1)])
    last = claimed[-1]

    await pool.batches.finish(last.batch_id, last.token, [done(r.id) for r in last.requests])
    if ready:  # The finishing worker takes the next one, and that is what wakes.
        assert await tokens(pool) == 0
        await pool.queue(1)
        await pool.client.delete(pool.keys.wake)
        await pool.form([("free", 1)])
        await pool.claim_next()

    assert await tokens(pool) == woken


async def test_what_is_in_the_reply_wakes_nobody(pool: Pool) -> None:
    """Forming and going to sleep both show all there is: the token that was pushed for it is gone."""
    await pool.queue(2)
    assert await tokens(pool) == 1
    await pool.form([("free", 1)])
    assert await tokens(pool) == 0

    await pool.queue(1)
    await pool.batches.look(TIERS, "d1", WakeCondition(9), 2000)
    assert await tokens(pool) == 0
