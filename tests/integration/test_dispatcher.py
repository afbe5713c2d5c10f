"""Dispatcher and reaper with a real Redis: woken instead of polling; two of them are harmless."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from configs import BACKGROUND_SHARE, PASS_MS
from contract.slots import announce, claim_next, ended, ids_of, in_slots
from eventually import eventually
from pool import TIERS, Pool, done
from scheduler.batching.dispatcher import MAX_SLEEP_S, STANDBY_S, Dispatcher, ServiceWatch, Waker
from scheduler.batching.reaper import Reaper
from scheduler.batching.service import UNKNOWN, Service
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import HANDED_BACK, FreeSlots
from scheduler.protocol.pool_view import WorkerReport
from scheduler.redis_client.connections import blocking_client
from scheduler.tasks import end_all
from tierlane.roles.pool_policy import without_paused

POLICY = BatchPolicy(
    4, 40.0, 4, 1000.0, [TierPolicy(name, i + 1, 0.1) for i, name in enumerate(TIERS)], BACKGROUND_SHARE
)


@asynccontextmanager
async def running(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run endless loops during a block."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        await end_all(tasks)


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


async def test_a_single_request_leaves_at_once(pool: Pool, dispatcher: Dispatcher) -> None:
    """An admission wakes the dispatcher; with an idle worker and no other request expected, no window is waited for."""
    await workers_are_counted(pool, 1)
    began = time.monotonic()

    await pool.queue(1)
    batch_id = await eventually(pool.pop, "a batch is ready", timeout_s=MAX_SLEEP_S / 2)

    assert batch_id is not None
    assert time.monotonic() - began < MAX_SLEEP_S / 2  # without a token it would sleep longer


async def test_a_batch_needs_one_script_of_the_dispatcher(pool: Pool, dispatcher: Dispatcher) -> None:
    """Woken on its condition, it reads the queues and forms the batch in one call, and sleeps without another."""
    await workers_are_counted(pool, 9)
    scripts = []
    for _ in range(6):  # The first turns learn the condition, and a slow machine may store it again.
        await pool.client.config_resetstat()
        await pool.queue(1)
        await eventually(pool.pop, "a batch is ready")
        await eventually(lambda: _asleep(pool), "the dispatcher sleeps")
        scripts.append((await pool.client.info("commandstats"))["cmdstat_evalsha"]["calls"])

    assert min(scripts) == 2  # and the admission


async def test_no_batch_is_formed_of_a_paused_tier(pool: Pool, redis_url: str) -> None:
    """Its requests leave at once when it is resumed. With all tiers paused nothing leaves, and nothing fails."""
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


async def test_no_batch_is_formed_without_a_worker(pool: Pool, dispatcher: Dispatcher) -> None:
    """The first healthy worker wakes the dispatcher."""
    await pool.queue(3)
    assert await ready(pool) == 0

    await workers_are_counted(pool, 1)

    await eventually(lambda: ready(pool), "a batch is ready")


async def test_few_batches_are_formed_in_advance(pool: Pool, dispatcher: Dispatcher) -> None:
    """With a busy worker one batch is ready, and an enterprise request is in the next one that is formed."""
    await workers_are_counted(pool, 1)
    await pool.queue(40, "free")
    first = await eventually(pool.pop, "the first batch")
    assert await pool.batches.claim(first or "", "w0", "t") is not None
    await eventually(lambda: ready(pool), "one batch is ready")

    (urgent,) = await pool.queue(1, "enterprise")
    assert await ready(pool) == 1
    second = await pool.pop()
    assert await pool.batches.claim(second or "", "w0", "t2") is not None
    third = await eventually(pool.pop, "the next batch")
    claimed = await pool.batches.claim(third or "", "w0", "t3")

    assert claimed is not None
    assert claimed.requests[0].id == urgent


async def test_a_free_slot_is_filled_at_that_moment(pool: Pool, dispatcher: Dispatcher) -> None:
    """By the end of one request, and with the highest tier that waits then."""
    await announce(pool, "w1", 2, 2)
    await pool.queue(9, "free")
    batch_id = await eventually(pool.pop, "a batch for both slots", timeout_s=MAX_SLEEP_S / 2)
    batch = await pool.batches.claim(batch_id or "", "w1", "t", FreeSlots(2, 2))
    assert batch is not None
    assert len(batch.requests) == 2
    (urgent,) = await pool.queue(1, "enterprise")
    await eventually(lambda: _asleep(pool), "the dispatcher sleeps")
    assert await ready(pool) == 0

    began = time.monotonic()
    await pool.batches.finish_part("w1", [ended(batch, 0)], FreeSlots(1, 2))
    await eventually(lambda: ready(pool), "a batch for the free slot", timeout_s=MAX_SLEEP_S / 2)

    assert time.monotonic() - began < MAX_SLEEP_S / 2  # without a token it would sleep longer
    following = await claim_next(pool, "w1", "t2", 1, 2)
    assert ids_of(following) == [urgent]


async def test_no_more_is_formed_than_slots_are_free(pool: Pool, redis_url: str) -> None:
    """By two dispatchers at the same time, whatever each of them observed; a slot is kept free for the highest tier."""
    for worker in ("w1", "w2"):
        await announce(pool, worker, 16, 16)
    await pool.queue(60, "free")
    blocking = blocking_client(redis_url)
    policy = replace(POLICY, headroom=0.05)
    both = [Dispatcher(pool.batches, Waker(blocking, pool.keys), lambda: policy, time.monotonic) for _ in range(2)]

    await asyncio.gather(*(each.turn() for each in both))

    sizes = [len(ids) for ids in (await pool.inflight()).values()]
    assert sum(sizes) <= 32
    assert max(sizes) <= 16
    slots = (await pool.batches.look(TIERS)).slots
    assert slots is not None
    assert slots.free == 32 - sum(sizes)
    await blocking.aclose()


async def test_a_slot_is_kept_free_for_the_highest_tier(pool: Pool, dispatcher: Dispatcher) -> None:
    """Others wait, although it is free; a request of the highest tier gets it at once."""
    headroom = replace(POLICY, headroom=0.25)
    dispatcher._policy = lambda: headroom
    await announce(pool, "w1", 4, 4)
    await pool.queue(9, "free")
    await eventually(lambda: ready(pool), "a batch for the others")
    assert len(ids_of(await claim_next(pool))) == 3
    await eventually(lambda: _asleep(pool), "the dispatcher sleeps")
    assert await ready(pool) == 0

    (urgent,) = await pool.queue(1, "enterprise")

    await eventually(lambda: ready(pool), "a batch for the urgent one", timeout_s=MAX_SLEEP_S / 2)
    assert ids_of(await claim_next(pool, "w1", "t2", 1, 4)) == [urgent]


async def test_requests_that_are_handed_back_leave_again_at_once(pool: Pool, dispatcher: Dispatcher) -> None:
    """The queues were empty, so the dispatcher slept until an admission."""
    batch = await in_slots(pool, 2)
    await eventually(lambda: _asleep(pool), "the dispatcher sleeps")

    await pool.batches.finish_part("w1", [ended(batch, at, HANDED_BACK) for at in range(2)], FreeSlots(4, 4))

    await eventually(lambda: ready(pool), "they are ready again", timeout_s=MAX_SLEEP_S / 2)
    assert ids_of(await claim_next(pool, "w1", "t2")) == ids_of(batch)


async def test_service_times_are_read_from_the_workers(pool: Pool) -> None:
    """While no healthy worker has measurements, the previous values stay."""
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


async def test_two_dispatchers_form_no_request_twice(pool: Pool, redis_url: str) -> None:
    """Forming is one script, so a second scheduler needs no leader election."""
    blocking = [blocking_client(redis_url) for _ in range(2)]
    wakers = [Waker(b, pool.keys) for b in blocking]
    dispatchers = [Dispatcher(pool.batches, w, lambda: POLICY, time.monotonic) for w in wakers]
    await workers_are_counted(pool, 8)
    served: list[str] = []
    async with running(*(loop.run() for loop in (*wakers, *dispatchers))):
        ids = [i for _ in range(25) for i in await pool.queue(8)]

        async def serve() -> bool:
            batch_id = await pool.pop()
            if batch_id:
                claimed = await pool.batches.claim(batch_id, "w0", batch_id)
                assert claimed is not None
                served.extend(r.id for r in claimed.requests)
                await pool.batches.finish(batch_id, batch_id, [done(r.id) for r in claimed.requests])
            return len(served) >= len(ids)

        await eventually(serve, "all requests are served")
    for client in blocking:
        await client.aclose()

    assert sorted(served) == sorted(ids)


async def test_of_two_dispatchers_with_a_timer_one_stands_by(pool: Pool, redis_url: str) -> None:
    """When another dispatcher has formed the batch that both waited for, the timer of the next one ends later."""
    blocking, now_s, service = blocking_client(redis_url), [0.0], Service(4000.0, 1.0, seen_batch=32.0, steady=True)
    policy = BatchPolicy(32, 8000.0, 4, 60_000.0, POLICY.tiers, BACKGROUND_SHARE, headroom=0.05)
    dispatcher = Dispatcher(pool.batches, Waker(blocking, pool.keys), lambda: policy, lambda: now_s[0], lambda: service)
    await workers_are_counted(pool, 8)
    for _ in range(4):
        await pool.running(1)
    await dispatcher.turn()
    await pool.queue(2)
    now_s[0] += 0.2
    alone_s = await dispatcher.turn()
    assert dispatcher.formed == 2
    assert alone_s == pytest.approx(0.5, abs=0.2)  # A run, divided by the workers.

    await pool.queue(2)
    await pool.form([("free", 1)])  # by another dispatcher
    now_s[0] += alone_s

    wait_s = await dispatcher.turn()
    passed_s = (await pool.batches.look(TIERS)).since_formed_ms / 1000
    assert alone_s + STANDBY_S - passed_s - 0.05 < wait_s < 1.0
    assert dispatcher.formed == 2
    await blocking.aclose()


async def test_the_reaper_returns_the_batch_of_a_silent_worker(pool: Pool) -> None:
    """Its lease expires, the batch is ready again, and the worker does not count any more."""
    quick = Pool(pool.client, pool.keys, lease_ms=100, gone_ms=100)
    await quick.worker_beats("w1")
    claimed = await quick.running(2)
    async with running(reaper_of(quick).run()):
        await eventually(lambda: ready(quick), "the batch is ready again", timeout_s=3)
        await eventually(lambda: _count_is(quick, b"0"), "the worker does not count", timeout_s=3)

    assert await pool.pop() == claimed.batch_id


async def _count_is(pool: Pool, count: bytes) -> bool:
    return bool(await pool.client.get(pool.keys.healthy_gpu_count) == count)


async def test_a_request_becomes_a_dead_letter_before_its_deadline(pool: Pool) -> None:
    """Three leases expire within a deadline of 4 s. With leases of 1 s every poison request ended as a timeout."""
    (request_id,) = await pool.queue(1)
    await pool.form([("free", 1)])

    async def is_lost_again() -> bool:
        batch_id = await pool.pop()
        if batch_id:
            await pool.batches.claim(batch_id, "w1", "token")
        return await pool.states([request_id]) == ["failed"]

    async with running(Reaper(pool.terminations, pool.presence, lambda: TIERS, lambda: 50, PASS_MS).run()):
        await eventually(is_lost_again, "the request fails")

    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.error_code, reply.attempts) == ("worker_lost", 3)
    assert await pool.client.llen(pool.keys.dlq) == 1


async def test_a_pass_of_the_reaper_is_bounded(pool: Pool) -> None:
    """While Redis does not respond; the next pass works."""
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


async def test_an_unexpected_exception_ends_no_loop(pool: Pool, redis_url: str) -> None:
    """Policy and tiers come from a catalog that admins edit: after an exception the next turn and pass continue."""
    errors = iter([KeyError("tier"), ZeroDivisionError()])

    def policy() -> BatchPolicy:
        if (error := next(errors, None)) is not None:
            raise error
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
        await eventually(lambda: ready(pool), "a batch is formed")
    await blocking.aclose()
    assert next(errors, None) is None
