"""What hangs, stands still or is cut off: killed at its cap, run elsewhere, and refused when it comes late."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from eventually import eventually
from integration.gpu_pool_fixtures import (
    RunningWorker,
    StartWorker,
    batch,
    ended,
    faulty_models,
    replies,
    running,
    start_worker,
)
from pool import Pool
from tierlane.chaos.faults.proxy import FaultProxy, Weather

__all__ = ["faulty_models", "start_worker"]


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    """A network to Redis that can be cut, for one worker."""
    proxy = FaultProxy("w1", Path(redis_url.removeprefix("unix://")))
    await proxy.start()
    yield proxy
    await proxy.stop()


async def reaped(pool: Pool, request_id: str) -> None:
    """The reaper looks again and again until somebody ended the request."""

    async def over() -> bool:
        await pool.gateway_lives("g1")
        await pool.terminations.reap(0)
        return await pool.results.fetch([request_id]) != [None]

    await eventually(over, "the request ended under the reaper's eyes", 20.0)


async def owned(pool: Pool, worker: RunningWorker, text: str) -> str:
    """The id of a request whose batch this worker runs."""
    (request_id,) = await batch(pool, text)
    await eventually(lambda: running(pool, request_id), "the batch is claimed")
    await worker.reaches("busy")
    return request_id


async def test_a_stopped_model_process_is_killed_at_its_cap_and_its_batch_run_again(
    pool: Pool, start_worker: StartWorker
) -> None:
    """SIGSTOP, as a hang in a kernel looks from outside: no progress, so no more lease than the cap."""
    worker = await start_worker(backend="simulated:500", gpu_timeout_ms=900)
    await worker.reaches("ready")
    request_id = await owned(pool, worker, "hello")
    stopped = worker.model_pid
    assert stopped is not None

    os.kill(stopped, signal.SIGSTOP)

    (reply,) = await replies(pool, [request_id])
    assert (reply.output, reply.attempts) == ("olleh", 2)
    assert ended(stopped)


async def test_a_model_that_holds_the_interpreter_is_killed_and_its_batch_run_again(
    pool: Pool, start_worker: StartWorker
) -> None:
    """Busy inside a C call: none of its threads can run, and its supervisor does not need them."""
    worker = await start_worker(backend="faulty_models:holds_the_gil_once", gpu_timeout_ms=600)
    await worker.reaches("ready")

    (reply,) = await replies(pool, await batch(pool, "hello"))

    assert (reply.output, reply.attempts) == ("olleh", 2)


async def test_a_worker_that_stood_still_comes_too_late(pool: Pool, start_worker: StartWorker) -> None:
    """Its lease ran out, another worker answered; what it finishes after SIGCONT changes nothing, and it works on."""
    late = await start_worker("w1", "simulated:700")
    await late.reaches("ready")
    request_id = await owned(pool, late, "hello")
    os.kill(late.process.pid, signal.SIGSTOP)
    await start_worker("w2", "simulated:50")

    await reaped(pool, request_id)
    before = await pool.results.fetch([request_id])
    os.kill(late.process.pid, signal.SIGCONT)

    await late.reaches("ready")
    assert await pool.results.fetch([request_id]) == before
    assert before[0] is not None
    assert (before[0].output, before[0].worker_id, before[0].attempts) == ("olleh", "w2", 2)
    _, ends = await pool.audit()
    assert [end.id for end in ends] == [request_id]


async def test_a_worker_cut_off_from_redis_claims_nothing_and_comes_too_late(
    pool: Pool, proxy: FaultProxy, start_worker: StartWorker
) -> None:
    """It runs its batch to the end, but somebody else has it by then; healed, it takes work again."""
    alone = await start_worker("w1", "simulated:700", redis_url=f"redis://127.0.0.1:{proxy.port}")
    await alone.reaches("ready")
    request_id = await owned(pool, alone, "hello")

    with proxy.held(Weather(drop_requests=True, drop_replies=True)):
        rescuer = await start_worker("w2", "simulated:50")
        await reaped(pool, request_id)
        others = [(await replies(pool, await batch(pool, text)))[0] for text in ("ab", "cd")]
    await rescuer.stop()

    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.output, reply.worker_id, reply.attempts) == ("olleh", "w2", 2)
    assert [(other.worker_id, other.attempts) for other in others] == [("w2", 1)] * 2
    (later,) = await replies(pool, await batch(pool, "again"))
    assert (later.worker_id, later.output) == ("w1", "niaga")
    _, ends = await pool.audit()
    assert len(ends) == len({end.id for end in ends}) == 4


async def test_a_draining_worker_renews_until_its_batch_has_its_end(pool: Pool, start_worker: StartWorker) -> None:
    """1.5 s of batch under a lease of 600 ms after SIGTERM, with a reaper at work: no attempt is burnt."""
    worker = await start_worker(backend="simulated:1500")
    request_id = await owned(pool, worker, "hello")

    worker.process.send_signal(signal.SIGTERM)
    await worker.reaches("draining")
    await reaped(pool, request_id)

    (reply,) = await replies(pool, [request_id])
    assert (reply.output, reply.attempts) == ("olleh", 1)
    assert await worker.process.wait() == 0
