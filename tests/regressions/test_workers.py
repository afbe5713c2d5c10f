"""Bugs of workers: hangs with heartbeats, fast failures, leases that expire during a shutdown."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from configs import PASS_MS, worker_config
from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.model_process.batch_runner import SUSPICIOUS_BATCHES, BatchRunner
from gpu_pool.model_process.device_errors import DeviceLost
from gpu_pool.model_process.handle import ModelLost, ModelProcess
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, running, start_worker
from pool import TIERS, Pool
from regressions.bad_line import BadLine
from scheduler.batching.reaper import Reaper
from scheduler.payload import Payload, encode_payload

__all__ = ["faulty_models", "start_worker"]

KILLER = """
import os
def dies_on_bad(texts):
    if "bad" in texts: os._exit(9)
    return [text[::-1] for text in texts]
"""


@asynccontextmanager
async def reaping(pool: Pool) -> AsyncIterator[None]:
    """Run the reaper of a scheduler."""
    reaper = Reaper(pool.terminations, pool.presence, lambda: TIERS, lambda: 50, PASS_MS)
    task = asyncio.create_task(reaper.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_bug_12_a_claim_before_the_first_heartbeat(pool: Pool, line: BadLine) -> None:
    """A worker that claims work before it is registered counts as lost at once (GitLab). Here it registers first."""
    line.refuse = True
    config = worker_config(line.url, backend="simulated:10", heartbeat_ms=50)
    worker = Worker(config)
    task = asyncio.create_task(worker.run())
    await eventually(worker._supervisor.ready.is_set, "the model is ready")
    attempts = line.accepted
    await eventually(lambda: line.accepted >= attempts + 3, "three more heartbeats fail")
    line.refuse = False

    await eventually(lambda: line.sent(b"BLPOP"), "the worker waits for a batch")

    assert await pool.client.exists(pool.keys.gpu("w1"))
    sent = b"".join(line.requests).upper()
    assert sent.index(b"EVALSHA") < sent.index(b"BLPOP")
    worker.drain()
    assert await task == 0


async def test_bug_13_a_hung_model_with_heartbeats(pool: Pool, start_worker: StartWorker) -> None:
    """The heartbeat of another process keeps the work of a hung model. Here the model's progress counts: it is killed."""
    worker = await start_worker(backend="simulated:100", gpu_timeout_ms=500)
    await worker.reaches("ready")
    hung = worker.model_pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    ids = await batch(pool, "abc")

    async with reaping(pool):
        (reply,) = await replies(pool, ids)

    assert (reply.output, reply.attempts) == ("cba", 2)
    view = await worker.view()
    assert view is not None
    assert view.healthy
    assert worker.model_pid not in {None, hung}


def test_bug_13_a_model_process_that_was_just_killed_is_lost() -> None:
    """A batch that is sent before the supervisor notices the loss raises ModelLost."""

    async def run_at_once() -> None:
        model = await ModelProcess.spawn(ModelLaunch("simulated:10"))
        await model.ready()
        assert model._line._transport is not None
        model._line._transport.abort()  # Closed, but not noticed yet.
        assert not model.lost.is_set()
        with pytest.raises(ModelLost):
            await model.run([encode_payload(Payload("m", "x", {}))], 1000.0)
        await model.close()

    uvloop.run(run_at_once())


async def test_bug_14_a_lease_is_renewed_during_a_shutdown(pool: Pool, start_worker: StartWorker) -> None:
    """Locks expired while the last job ran (BullMQ #2259). Here the lease is renewed until the last batch has ended."""
    worker = await start_worker(backend="simulated:1300")
    await worker.reaches("ready")
    async with reaping(pool):
        ids = await batch(pool, "abc")
        await eventually(lambda: running(pool, ids[0]), "the request runs")

        stopped = await worker.stop()

        (reply,) = await replies(pool, ids)
    assert (stopped, reply.output, reply.attempts) == (0, "cba", 1)


async def test_bug_37_a_poison_request_ends_alone(pool: Pool, start_worker: StartWorker, tmp_path: Path) -> None:
    """One bad request fails its whole batch, again and again. Here lost batches are retried in smaller parts."""
    (tmp_path / "killer.py").write_text(KILLER)
    worker = await start_worker(backend="killer:dies_on_bad")
    await worker.reaches("ready")
    texts = ["a1", "a2", "a3", "bad", "a5", "a6"]

    by_text = dict(zip(texts, await replies(pool, await batch(pool, *texts, total_ms=30_000)), strict=True))

    assert (by_text["bad"].error_code, by_text["bad"].attempts) == ("worker_lost", 3)
    del by_text["bad"]
    assert {text: reply.output for text, reply in by_text.items()} == {text: text[::-1] for text in by_text}
    assert max(reply.attempts for reply in by_text.values()) <= 3
    assert await pool.client.llen(pool.keys.dlq) == 1


async def test_bug_39_only_a_loaded_model_is_healthy(pool: Pool, start_worker: StartWorker) -> None:
    """A dead engine reported "healthy" (vLLM #24897). Here only a model that is loaded and warm counts."""
    worker = await start_worker(backend="simulated:20")
    view = await eventually(worker.view, "the first heartbeat")
    assert view.status == "starting" or view.healthy
    await worker.reaches("ready")
    assert await pool.presence.census() == (1, 1)
    assert worker.model_pid is not None
    os.kill(worker.model_pid, signal.SIGKILL)
    began = time.monotonic()

    async def is_lost() -> bool:
        return await pool.presence.census() == (0, 1)

    await eventually(is_lost, "the worker does not count")
    assert time.monotonic() - began < 1.0
    await worker.reaches("ready")
    assert await pool.presence.census() == (1, 1)


class FastFailer:
    """Every batch fails at once."""

    version = "broken"

    def __init__(self) -> None:
        self.batches = 0

    def load(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def warmup(self) -> None:
        """Nothing."""

    def health(self) -> None:
        raise RuntimeError

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        self.batches += 1
        raise RuntimeError


def test_bug_40_a_backend_that_only_fails_ends() -> None:
    """A worker that fails fast claims most of the work (AWS). Here it must pass its health check, or end."""
    failer = FastFailer()
    runner = BatchRunner(failer, lambda: None)
    for _ in range(SUSPICIOUS_BATCHES - 1):
        assert [result.error_code for result in runner.run([Item("x")], 1000.0)] == ["poison_request"]

    with pytest.raises(DeviceLost):
        runner.run([Item("x")], 1000.0)

    assert failer.batches == SUSPICIOUS_BATCHES <= 3
