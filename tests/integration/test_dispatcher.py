"""The dispatcher and the caretaker over a real Redis: woken, not polling; two side by side are harmless."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from eventually import eventually
from pool import TIERS, Pool, done
from scheduler.batching.dispatcher import MAX_SLEEP_S, Dispatcher, ServiceWatch, Waker
from scheduler.batching.policy import BatchPolicy, TierPolicy
from scheduler.batching.reaper import Reaper
from scheduler.batching.timing import UNKNOWN, Service
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.pool_view import WorkerReport
from scheduler.redis_client.connections import blocking_client
from tierlane.roles.scheduler import without_paused

POLICY = BatchPolicy(4, 40.0, 4, 1000.0, [TierPolicy(name, i + 1, 0.1) for i, name in enumerate(TIERS)])


@asynccontextmanager
async def running(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Endless loops for the length of a block; they have ended when it ends."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reaper_of(pool: Pool) -> Reaper:
    return Reaper(pool.terminations, pool.presence, lambda: TIERS, lambda: 0, 100)


@pytest.fixture
async def dispatcher(pool: Pool, redis_url: str) -> AsyncIterator[Dispatcher]:
    """A running dispatcher with its waker."""
    blocking = blocking_client(redis_url)
    waker = Waker(blocking, pool.keys)
    dispatcher = Dispatcher(pool.batches, waker, lambda: POLICY, time.monotonic)
    async with running(waker.run(), dispatcher.run()):
        yield dispatcher
    await blocking.aclose()


async def workers_are_counted(pool: Pool, count: int) -> None:
    for i in range(count):
        await pool.worker_beats(f"w{i}")
    await pool.presence.census()


async def ready(pool: Pool) -> int:
    return int(await pool.client.llen(pool.keys.batch_queue))


async def test_a_lone_request_leaves_as_soon_as_it_comes(pool: Pool, dispatcher: Dispatcher) -> None:
    """An admission wakes the dispatcher; with an idle worker and nobody else coming there is no window to wait out."""
    await workers_are_counted(pool, 1)
    began = time.monotonic()

    await pool.queue(1)
    batch_id = await eventually(pool.pop, "a batch is ready", timeout_s=MAX_SLEEP_S / 2)

    assert batch_id is not None
    assert time.monotonic() - began < MAX_SLEEP_S / 2  # it was woken: a look by the clock would come later


async def test_a_batch_costs_the_dispatcher_one_script(pool: Pool, dispatcher: Dispatcher) -> None:
    """Woken by what it wished for, it looks and forms in one call, and goes to sleep without another."""
    await workers_are_counted(pool, 9)
    scripts = []
    for _ in range(6):  # The first turns learn what to be woken for, and a slow machine may tell a wish anew.
        await pool.client.config_resetstat()
        await pool.queue(1)
        await eventually(pool.pop, "a batch is ready")
        await eventually(lambda: _asleep(pool), "it waits for a token")
        scripts.append((await pool.client.info("commandstats"))["cmdstat_evalsha"]["calls"])

    assert min(scripts) == 2  # The admission is the other.


async def test_a_paused_tier_waits_while_the_others_leave(pool: Pool, redis_url: str) -> None:
    """However much of it waits, and at once when it is resumed; with all of them paused nothing leaves, and nothing fails."""
    paused = {"free"}

    def policy() -> BatchPolicy:
        return without_paused(
            replace(POLICY, tiers=[replace(tier, paused=tier.name in paused) for tier in POLICY.tiers])
        )

    await workers_are_counted(pool, 9)
    await pool.queue(9, "free")
    paid = await pool.queue(2, "paid")
    blocking = blocking_client(redis_url)
    dispatcher = Dispatcher(pool.batches, Waker(blocking, pool.keys), policy, time.monotonic)

    await dispatcher.turn()
    assert [request.id for request in (await pool.claim_next()).requests] == paid
    assert (await ready(pool), await pool.depth("free")) == (0, 9)

    paused.update(TIERS)
    await dispatcher.turn()
    assert await ready(pool) == 0
    paused.clear()
    await dispatcher.turn()
    assert await ready(pool) > 0
    await blocking.aclose()


async def _asleep(pool: Pool) -> bool:
    return bool((await pool.client.info("clients"))["blocked_clients"]) and not await pool.client.llen(pool.keys.wake)


async def test_no_worker_no_batch(pool: Pool, dispatcher: Dispatcher) -> None:
    """Without a healthy worker everything stays in the tier queues; the first worker that is counted wakes the dispatcher."""
    await pool.queue(3)
    assert await ready(pool) == 0

    await workers_are_counted(pool, 1)

    await eventually(lambda: ready(pool), "a batch is ready once a worker is there")


async def test_late_binding_keeps_the_line_short(pool: Pool, dispatcher: Dispatcher) -> None:
    """With a busy worker one batch stands ready, and an enterprise request goes into the very next one formed."""
    await workers_are_counted(pool, 1)
    await pool.queue(40, "free")
    first = await eventually(pool.pop, "the first batch")
    assert await pool.batches.claim(first or "", "w0", "t") is not None
    await eventually(lambda: ready(pool), "one batch stands ready")

    (urgent,) = await pool.queue(1, "enterprise")
    assert await ready(pool) == 1
    second = await pool.pop()
    assert await pool.batches.claim(second or "", "w0", "t2") is not None
    third = await eventually(pool.pop, "the next batch")
    claimed = await pool.batches.claim(third or "", "w0", "t3")

    assert claimed is not None
    assert claimed.requests[0].id == urgent


async def test_service_times_are_learnt_from_the_workers(pool: Pool) -> None:
    """What healthy workers measured is known after a look; while nobody has measured anything, what was known stands."""
    watch = ServiceWatch(pool.presence, lambda: TIERS)
    await pool.worker_beats("w0")
    await watch.update()
    assert watch.service == UNKNOWN

    heartbeat = WorkerReport(
        "w1", "busy", 0.5, 1, 100.0, 50.0, "simulated", "v1", base_ms=48.0, item_ms=0.25, seen_batch=9.0
    )
    await pool.presence.worker_beat(heartbeat)
    await watch.update()
    await pool.presence.worker_gone("w1")
    await watch.update()

    assert watch.service == Service(48.0, 0.25, seen_batch=9.0, steady=True)


async def test_two_dispatchers_put_no_id_into_two_batches(pool: Pool, redis_url: str) -> None:
    """Forming is one script, so a standby needs no leader."""
    blocking = [blocking_client(redis_url) for _ in range(2)]
    wakers = [Waker(b, pool.keys) for b in blocking]
    dispatchers = [Dispatcher(pool.batches, w, lambda: POLICY, time.monotonic) for w in wakers]
    await workers_are_counted(pool, 8)
    seen: list[str] = []
    async with running(*(loop.run() for loop in (*wakers, *dispatchers))):
        ids = [i for _ in range(25) for i in await pool.queue(8)]

        async def serve() -> bool:
            batch_id = await pool.pop()
            if batch_id:
                claimed = await pool.batches.claim(batch_id, "w0", batch_id)
                assert claimed is not None
                seen.extend(r.id for r in claimed.requests)
                await pool.batches.finish(batch_id, batch_id, [done(r.id) for r in claimed.requests])
            return len(seen) >= len(ids)

        await eventually(serve, "everything was served")
    for client in blocking:
        await client.aclose()

    assert sorted(seen) == sorted(ids)


async def test_the_caretaker_returns_what_a_silent_worker_held(pool: Pool) -> None:
    """No word from the worker, the lease runs out, and the batch stands at the head of the line again."""
    quick = Pool(pool.client, pool.keys, lease_ms=100, gone_ms=100)
    await quick.worker_beats("w1")
    claimed = await quick.running(2)
    async with running(reaper_of(quick).run()):
        await eventually(lambda: ready(quick), "the batch is back in line", timeout_s=3)
        await eventually(lambda: _count_is(quick, b"0"), "the silent worker no longer counts", timeout_s=3)

    assert await pool.pop() == claimed.batch_id


async def _count_is(pool: Pool, count: bytes) -> bool:
    return bool(await pool.client.get(pool.keys.healthy_gpu_count) == count)


async def test_the_caretaker_ends_what_waited_too_long(pool: Pool) -> None:
    """With every worker gone nothing waits past its queue age."""
    ids = await pool.overdue(await pool.queue(3))

    await reaper_of(pool).run_once()

    assert [r.error_code for r in await pool.results.fetch(ids) if r] == [ErrorCode.QUEUE_TIMEOUT] * 3


async def test_the_caretaker_outlives_a_redis_that_does_not_answer(pool: Pool) -> None:
    """A pass that finds Redis silent ends in bounded time, and the next one works."""
    reaper = reaper_of(pool)
    await pool.worker_beats("w1")
    await pool.client.client_pause(1000, all=True)
    began = time.monotonic()

    await reaper.run_once()

    assert time.monotonic() - began < 3 * 0.25 + 0.5
    await eventually(lambda: _counted(pool, reaper), "a later pass counts the worker")


async def _counted(pool: Pool, reaper: Reaper) -> bool:
    with suppress(RedisUnavailable):
        await pool.worker_beats("w1")
    await reaper.run_once()
    return reaper.healthy == 1


async def test_a_fault_that_nobody_thought_of_ends_no_loop(pool: Pool, redis_url: str) -> None:
    """Policy and tiers come from a catalog that admins edit: whatever is raised there, the next turn and pass go on."""
    faults = iter([KeyError("tier"), ZeroDivisionError()])

    def policy() -> BatchPolicy:
        if (fault := next(faults, None)) is not None:
            raise fault
        return POLICY

    def tiers() -> tuple[str, ...]:
        return tuple(tier.name for tier in policy().tiers)

    await workers_are_counted(pool, 1)
    await pool.queue(1)
    blocking = blocking_client(redis_url)
    waker = Waker(blocking, pool.keys)
    dispatcher = Dispatcher(pool.batches, waker, policy, time.monotonic)
    reaper = Reaper(pool.terminations, pool.presence, tiers, lambda: 0, 20)
    async with running(waker.run(), dispatcher.run(), reaper.run()):
        await eventually(lambda: ready(pool), "a batch is formed all the same")
    await blocking.aclose()
    assert next(faults, None) is None
