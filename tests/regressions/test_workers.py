"""Bugs of workers: the hung that look alive, the fast that only fail, the stopping that lose their lease."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.batch_runner import SUSPICIOUS_BATCHES, BatchRunner, DeviceLost
from gpu_pool.model_process.handle import ModelLaunch, ModelLost, ModelProcess
from gpu_pool.worker.execution import make_plan
from gpu_pool.worker.worker import BLOCK_S, Worker
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, running, start_worker
from pool import TIERS, Pool
from regressions.bad_line import BadLine
from scheduler.batching.reaper import Reaper
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import Batches, ClaimedRequest, ReadyBatches
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import IncrementChannel
from scheduler.redis_client.connections import blocking_client, command_client
from scheduler.redis_client.keys import Keys

__all__ = ["faulty_models", "start_worker"]

KILLER = """
import os
def dies_on_bad(texts):
    if "bad" in texts: os._exit(9)
    return [text[::-1] for text in texts]
"""


@asynccontextmanager
async def cared_for(pool: Pool) -> AsyncIterator[None]:
    """A caretaker passes every 100 ms, as a scheduler's does."""
    reaper = Reaper(pool.terminations, pool.presence, lambda: TIERS, lambda: 50)
    task = asyncio.create_task(reaper.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_bug_12_a_fetch_before_the_first_heartbeat(pool: Pool, line: BadLine) -> None:
    """A worker that takes work before it is known is taken for dead at once (GitLab); here it registers first."""
    commands, blocking, keys = command_client(line.url), blocking_client(line.url), Keys()
    line.refuse = True
    parts = Batches(commands, keys), ReadyBatches(blocking, keys, BLOCK_S), Presence(commands, keys)
    config = WorkerConfig(line.url, "w1", "simulated:10", heartbeat_ms=50)
    worker = Worker(config, *parts, IncrementChannel(commands, keys))
    task = asyncio.create_task(worker.run())
    await eventually(worker._supervisor.ready.is_set, "the model is ready")
    tries = line.accepted
    await eventually(lambda: line.accepted >= tries + 3, "three more heartbeats fail")
    line.refuse = False

    await eventually(lambda: line.sent(b"BLPOP"), "it asks for work")

    assert await pool.client.exists(keys.gpu("w1"))
    seen = b"".join(line.requests).upper()
    assert seen.index(b"EVALSHA") < seen.index(b"BLPOP")
    worker.drain()
    assert await task == 0
    await commands.aclose()
    await blocking.aclose()


async def test_bug_13_a_hung_worker_that_keeps_beating(pool: Pool, start_worker: StartWorker) -> None:
    """A heartbeat beside a hung model holds its work for ever; here the model's progress counts: it is killed at its cap."""
    worker = await start_worker(backend="simulated:100", gpu_timeout_ms=500)
    await worker.reaches("ready")
    hung = worker.model_pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    ids = await batch(pool, "abc")

    async with cared_for(pool):
        (reply,) = await replies(pool, ids)

    assert (reply.output, reply.attempts) == ("cba", 2)
    view = await worker.view()
    assert view is not None
    assert view.healthy
    assert worker.model_pid not in {None, hung}


def test_bug_13_a_model_that_was_killed_a_moment_ago_is_lost() -> None:
    """The next batch came before the supervisor had heard of its own kill, and a closed line passed for a bug of ours."""

    async def ask_at_once() -> None:
        model = await ModelProcess.spawn(ModelLaunch("simulated:10"))
        await model.ready()
        assert model._line._transport is not None
        model._line._transport.abort()  # The line is closed, and nobody has had a turn to see it.
        assert not model.lost.is_set()
        with pytest.raises(ModelLost):
            await model.run([encode_payload(Payload("m", "x", {}))], 1000.0)
        await model.close()

    uvloop.run(ask_at_once())


async def test_bug_14_a_shutdown_that_stops_renewing_first(pool: Pool, start_worker: StartWorker) -> None:
    """Locks ran out while the last job still ran (BullMQ #2259); here the lease is renewed until the last batch is settled."""
    worker = await start_worker(backend="simulated:1300")
    await worker.reaches("ready")
    async with cared_for(pool):
        ids = await batch(pool, "abc")
        await eventually(lambda: running(pool, ids[0]), "it runs")

        stopped = await worker.stop()

        (reply,) = await replies(pool, ids)
    assert (stopped, reply.output, reply.attempts) == (0, "cba", 1)


@pytest.mark.parametrize("moment", ["forming", "claim", "launch"])
async def test_bug_17_work_for_whoever_has_gone(pool: Pool, moment: str) -> None:
    """Servers compute answers that nobody waits for any more; here the time left is asked before each step."""
    (request_id,) = await pool.queue(1)
    if moment == "launch":
        late = ClaimedRequest(request_id, 40, 1, encode_payload(Payload("m", "x", {})))
        plan = make_plan([late], needed_ms=30.0, gone_ms=15.0)
        assert (plan.bodies, [outcome.error_code for outcome in plan.early]) == ([], [ErrorCode.DEADLINE_EXCEEDED])
        return
    if moment == "forming":
        await pool.overdue([request_id], "dl")
    await pool.form([("free", 1)])
    await pool.overdue([request_id], "dl")

    batch_id = await pool.pop()
    claimed = await pool.batches.claim(batch_id, "w1", "token") if batch_id else None

    assert (claimed is None) == (moment == "forming")
    assert claimed is None or claimed.requests == []
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.error_code, reply.attempts) == ("deadline_exceeded", 0)


async def test_bug_37_a_poison_batch_kills_worker_after_worker(
    pool: Pool, start_worker: StartWorker, tmp_path: Path
) -> None:
    """One bad request took its whole batch down with it, three times; here parts get smaller and it ends alone."""
    (tmp_path / "killer.py").write_text(KILLER)
    worker = await start_worker(backend="killer:dies_on_bad")
    await worker.reaches("ready")
    texts = ["a1", "a2", "a3", "bad", "a5", "a6"]

    found = dict(zip(texts, await replies(pool, await batch(pool, *texts, total_ms=30_000)), strict=True))

    assert (found["bad"].error_code, found["bad"].attempts) == ("worker_lost", 3)
    del found["bad"]
    assert {text: reply.output for text, reply in found.items()} == {text: text[::-1] for text in found}
    assert max(reply.attempts for reply in found.values()) <= 3
    assert await pool.client.llen(pool.keys.dlq) == 1


async def test_bug_39_health_that_lies(pool: Pool, start_worker: StartWorker) -> None:
    """An engine that is dead said "healthy" (vLLM #24897); here only a model that is loaded and warm counts."""
    worker = await start_worker(backend="simulated:20")
    view = await eventually(worker.view, "it has said something")
    assert view.status == "starting" or view.healthy
    await worker.reaches("ready")
    assert await pool.presence.census() == (1, 1)
    assert worker.model_pid is not None
    os.kill(worker.model_pid, signal.SIGKILL)
    began = time.monotonic()

    async def told() -> bool:
        return await pool.presence.census() == (0, 1)

    await eventually(told, "it does not count any more")
    assert time.monotonic() - began < 1.0
    await worker.reaches("ready")
    assert await pool.presence.census() == (1, 1)


class FastFailer:
    """Answers at once, and always wrongly."""

    version = "broken"

    def __init__(self) -> None:
        self.batches = 0

    def load(self) -> None:
        """There is nothing to load."""

    def close(self) -> None:
        """There is nothing to close."""

    def warmup(self) -> None:
        """There is nothing to warm."""

    def health(self) -> None:
        raise RuntimeError

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        self.batches += 1
        raise RuntimeError


def test_bug_40_a_fast_failer_is_a_black_hole() -> None:
    """Who fails fastest asks for work most often and gets it all (AWS); here it must pass its own canary, or end."""
    failer = FastFailer()
    runner = BatchRunner(failer, lambda: None)
    for _ in range(SUSPICIOUS_BATCHES - 1):
        assert [result.error_code for result in runner.run([Item("x")], 1000.0)] == ["poison_request"]

    with pytest.raises(DeviceLost):
        runner.run([Item("x")], 1000.0)

    assert failer.batches == SUSPICIOUS_BATCHES <= 3
