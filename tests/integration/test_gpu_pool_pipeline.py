"""A worker in the test's process: prefetch, faulty models and devices, and faults of Redis."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from configs import worker_config
from eventually import eventually
from fake_nvml import FakeNvml
from gpu_pool.model_process import quarantine, respawn
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.model_process.watchdog import ModelHung
from gpu_pool.worker import prefetch
from gpu_pool.worker.execution import Execution, NotStarted
from gpu_pool.worker.gpu_faults import ECC
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_direct import DirectClient, StartHere, item, start_here
from integration.gpu_pool_fixtures import batch, ended, faulty_models, replies, running
from pool import TIERS, Pool
from scheduler.errors import RedisUnavailable, StartError
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import Batches, ClaimedBatch, ClaimedRequest
from scheduler.protocol.direct import DirectBusy
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.ready_batches import ReadyBatches
from scheduler.protocol.replies import Reply
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["faulty_models", "start_here"]


async def view(pool: Pool, status: str) -> WorkerView:
    """The first worker's heartbeat, once it has this status."""

    async def reported() -> WorkerView | None:
        found = next(iter((await pool.presence.observe(TIERS)).workers), None)
        return found if found and found.status == status else None

    return await eventually(reported, f"the worker is {status}", 30.0)


def model_pid(worker: Worker) -> int:
    assert worker._supervisor.model is not None
    return worker._supervisor.model.pid


async def run(pool: Pool, *texts: str) -> list[Reply]:
    return await replies(pool, await batch(pool, *texts))


@pytest.mark.parametrize("ends", ["drain", "lost model"])
async def test_prefetched_batch_is_handed_back_uncounted(
    pool: Pool, redis_url: str, start_here: StartHere, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """When the worker drains, or its model is lost; only the running batch is affected."""
    monkeypatch.setattr(prefetch, "AHEAD_MS", 10_000.0)
    worker = await start_here("simulated:400", redis_url=redis_url)
    await run(pool, "measured")
    (first,), (ahead,) = await batch(pool, "runs"), await batch(pool, "waits")
    await eventually(lambda: running(pool, ahead), "the second batch is claimed")
    assert await running(pool, first)

    if ends == "drain":
        worker.drain()
        await eventually(lambda: pool.depth("free"), "it is queued again")
        assert await pool.attempts(ahead) == 0
        await eventually(lambda: pool.results.fetch([first]), "the first has its reply")
    else:
        os.kill(model_pid(worker), signal.SIGKILL)
        results = await replies(pool, [first, ahead])
        assert [(r.output, r.attempts) for r in results] == [("snur", 2), ("stiaw", 1)]


async def test_model_with_invalid_output_is_quarantined(
    pool: Pool, redis_url: str, start_here: StartHere, faulty_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three batches its process ends, and queued and direct batches wait or are rejected; one more bad batch on
    probation quarantines it again; a good one ends that.
    """
    monkeypatch.setattr(quarantine, "FIRST_QUARANTINE_S", 2.0)
    worker = await start_here("faulty_models:sick", redis_url=redis_url)
    before, client = model_pid(worker), await DirectClient.connected(worker)
    (faulty_models / "sick").touch()
    assert [(r.error_code, r.attempts) for r in await run(pool, "a", "b")] == [("invalid_output", 1)] * 2
    assert await client.outputs(item("a")) == {"a": "invalid_output"}
    assert [r.error_code for r in await run(pool, "a")] == ["invalid_output"]

    began = time.monotonic()
    assert not (await view(pool, "quarantined")).healthy
    await eventually(lambda: ended(before), "the model process is gone")
    assert isinstance(await client.run(item("b")), DirectBusy)
    waiting = await batch(pool, "c")
    assert await pool.attempts(waiting[0]) == 0
    assert [r.error_code for r in await replies(pool, waiting)] == ["invalid_output"]
    assert time.monotonic() - began > 2.0
    await view(pool, "quarantined")

    (faulty_models / "sick").unlink()
    assert [r.output for r in await run(pool, "abc")] == ["cba"]
    assert (await view(pool, "ready")).healthy


@pytest.mark.usefixtures("faulty_models")
async def test_model_that_does_not_load_is_failed(
    pool: Pool, redis_url: str, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five attempts; nothing is claimed. Where a restart cannot help the worker does not start."""
    monkeypatch.setattr(respawn, "FIRST_RESPAWN_S", 0.01)
    ids = await batch(pool, "hello")
    await start_here("faulty_models:DiesWhileLoading", redis_url=redis_url, loads=False)

    await view(pool, "down")
    assert not (await view(pool, "failed")).healthy
    assert await pool.attempts(ids[0]) == 0
    with pytest.raises(StartError, match="the module 'surely_not_there' is not found"):
        await start_here("surely_not_there:f")


async def test_measurements_follow_the_model(start_here: StartHere, faulty_models: Path) -> None:
    """Out-of-memory lowers the reported rate; padding is reported; a stale p95 rejects once and is then measured again."""
    worker = await start_here("faulty_models:holds_three", max_batch_size=8)
    client = await DirectClient.connected(worker)
    for _ in range(20):
        worker._execution.service.record(8, 20.0)
    assert worker._execution.rate_rps == pytest.approx(400)
    for _ in range(3):
        assert await client.outputs(*map(item, "abcdefgh")) == {text: text for text in "abcdefgh"}
    assert 0 < worker._beat(worker._link).rps < 120
    for _ in range(20):
        worker._execution.service.record(1, 500.0)
    assert await client.outputs(item("ab", 400)) == {"ab": "deadline_exceeded"}
    assert await client.outputs(item("ab", 400)) == {"ab": "ba"}

    tiny = await start_here("tiny", worker_id="w2")
    await (await DirectClient.connected(tiny)).outputs(item("a" * 300), *map(item, "bcd"))
    assert 0.0 < tiny._beat(tiny._link).padding_waste < 1.0


async def test_killed_model_process_gets_no_other_batch() -> None:
    """Regression: a batch sent to a process that was just killed cost its requests an attempt.

    Killed for its usual duration, before the whole cap, it does not show that the model is slow. If the model is slow, a
    batch is handed back at once, also while a trial batch has the model.
    """
    body = encode_payload(Payload("simulated", "abc", {}))
    requests = [ClaimedRequest("r", 4000, 1, body)]
    model_supervisor = ModelSupervisor(ModelLaunch("simulated:10"), 10.0, lambda: None)
    model_supervisor.start()
    await eventually(model_supervisor.ready.is_set, "the model is ready")
    execution = Execution(worker_config("unix://none"), model_supervisor)
    for _ in range(20):
        execution.service.record(1, 10.0)
    assert model_supervisor.model is not None
    os.kill(model_supervisor.model.pid, signal.SIGSTOP)

    with pytest.raises(ModelHung):
        await execution.run(requests, time.monotonic(), lambda: True)
    assert (model_supervisor.status, model_supervisor.model, model_supervisor.ready.is_set()) == ("down", None, False)
    with pytest.raises(NotStarted):
        await execution.run(requests, time.monotonic(), lambda: True)

    assert execution.slow_model.model_ms == 0

    await eventually(model_supervisor.ready.is_set, "another one is ready")
    execution.slow_model.slow = True
    async with asyncio.timeout(5), execution._limit:
        with pytest.raises(NotStarted):
            await execution.run(requests, time.monotonic(), lambda: True)
    await model_supervisor.close()


async def test_gpu_with_a_memory_error_gets_no_work(
    pool: Pool, redis_url: str, start_here: StartHere, monkeypatch: pytest.MonkeyPatch, faulty_models: Path
) -> None:
    """The worker is down though its model is ready; queued and direct batches run elsewhere."""
    nvml = FakeNvml()
    nvml.failing["nvmlEventSetCreate"] = nvml.NVML_ERROR_NOT_SUPPORTED
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    worker = await start_here("faulty_models:reverse", redis_url=redis_url)
    assert [reply.output for reply in await run(pool, "abc")] == ["cba"]
    await eventually(lambda: worker._gpu.reading, "the GPU was read")
    runs = worker._execution.batches

    nvml.ecc = 1
    await eventually(lambda: not worker._gpu.usable.is_set(), "the error is read")

    worker_view = await view(pool, "down")
    assert (worker_view.healthy, worker_view.gpu and (worker_view.gpu.temperature_c, worker_view.gpu.fault)) == (
        False,
        (61, ECC),
    )
    waiting = await batch(pool, "xyz")
    await start_here("faulty_models:reverse", redis_url=redis_url, worker_id="w2", device="cpu")
    assert [reply.output for reply in await replies(pool, waiting)] == ["zyx"]
    assert (worker._execution.batches, worker._supervisor.status) == (runs, "ready")
    assert isinstance(await (await DirectClient.connected(worker)).run(item("b")), DirectBusy)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    """A Redis that the test stops and kills."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def own(server: EmbeddedRedis) -> AsyncIterator[Pool]:
    """The pool in that Redis."""
    client = command_client(server.url)
    yield Pool(client, Keys())
    await client.aclose()


async def form(pool: Pool) -> list[str]:
    await pool.gateway_lives("g1")
    ids = await pool.queue(2)
    await pool.form([("free", 2)])
    return ids


async def assert_first_attempt(pool: Pool, ids: list[str]) -> None:
    """Both requests complete in their first attempt."""

    async def completed() -> bool:
        found = await pool.results.fetch(ids)
        return [(r.output, r.attempts) for r in found if r] == [("olleh", 1)] * 2

    await eventually(completed, "both requests completed")


async def test_redis_restarts_empty(
    server: EmbeddedRedis, own: Pool, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Redis is down the worker does not poll the queue; afterwards it registers again and serves."""
    pops: list[None] = []
    pop = ReadyBatches.pop

    async def counted(ready: ReadyBatches) -> str | None:
        pops.append(None)
        return await pop(ready)

    monkeypatch.setattr(ReadyBatches, "pop", counted)
    worker = await start_here("simulated:300", redis_url=server.url)
    await view(own, "ready")
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: not worker._link.heartbeat.working.is_set(), "a heartbeat failed")
    before, until = len(pops), time.monotonic() + 1.0
    await eventually(lambda: time.monotonic() > until, "a second has passed")
    assert len(pops) - before <= 1

    await server.start()

    await view(own, "ready")
    await assert_first_attempt(own, await form(own))


async def test_redis_hangs_while_a_batch_ends(server: EmbeddedRedis, own: Pool, start_here: StartHere) -> None:
    """The results are sent again until Redis answers."""
    worker = await start_here("simulated:300", redis_url=server.url)
    await view(own, "ready")
    ids = await form(own)
    await eventually(lambda: worker._execution.running, "the batch runs")

    os.kill(server.pid, signal.SIGSTOP)
    await eventually(lambda: not worker._execution.running, "the model is done")
    until = time.monotonic() + 0.6
    await eventually(lambda: time.monotonic() > until, "a finish and its retry timed out")
    assert worker._link.pipeline.in_flight == 2
    os.kill(server.pid, signal.SIGCONT)

    await assert_first_attempt(own, ids)


async def test_redis_hangs_during_a_pop(
    server: EmbeddedRedis, own: Pool, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pop is ended once heartbeats fail, long before its own deadline, so the next batch runs at once."""
    ended_pops: list[None] = []
    hang_up = ReadyBatches.hang_up

    def counted(ready: ReadyBatches) -> None:
        ended_pops.append(None)
        hang_up(ready)

    monkeypatch.setattr(ReadyBatches, "hang_up", counted)
    worker = await start_here("simulated:300", redis_url=server.url)
    await view(own, "ready")
    os.kill(server.pid, signal.SIGSTOP)
    await eventually(lambda: ended_pops, "the pop is ended")
    assert not worker._link.heartbeat.working.is_set()
    os.kill(server.pid, signal.SIGCONT)

    await eventually(worker._link.heartbeat.working.is_set, "a heartbeat arrived")
    await assert_first_attempt(own, await form(own))


async def test_lost_reply_to_a_claim_costs_no_attempt(
    server: EmbeddedRedis, own: Pool, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker hands back a batch that it may own."""
    claim, lost = Batches.claim, list[None]()

    async def claim_without_reply(batches: Batches, batch_id: str, worker_id: str, token: str) -> ClaimedBatch | None:
        claimed = await claim(batches, batch_id, worker_id, token)
        if not lost:
            lost.append(None)
            raise RedisUnavailable("the reply was lost")
        return claimed

    monkeypatch.setattr(Batches, "claim", claim_without_reply)
    await start_here("simulated:300", redis_url=server.url)
    ids = await form(own)

    async def queued() -> bool:
        return await own.states(ids) == ["queued", "queued"]

    await eventually(queued, "the batch was handed back")
    await own.form([("free", 2)])
    await assert_first_attempt(own, ids)
