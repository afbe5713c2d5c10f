"""A worker whose GPU is no more to be trusted, by what stands for NVML: it says so, and takes nothing more."""

import sys

import pytest

from eventually import eventually
from fake_nvml import FakeNvml
from gpu_pool.worker.gpu import ECC
from integration.gpu_pool_direct import DirectClient, StartHere, item, start_here, told
from integration.gpu_pool_fixtures import batch, faulty_models, replies
from pool import Pool
from scheduler.protocol.pool_view import WorkerView

__all__ = ["faulty_models", "start_here"]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver that is asked once a second."""
    nvml = FakeNvml()
    nvml.failing["nvmlEventSetCreate"] = nvml.NVML_ERROR_NOT_SUPPORTED
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


@pytest.mark.usefixtures("faulty_models")
async def test_a_gpu_with_broken_memory_gets_no_more_work(
    pool: Pool, redis_url: str, start_here: StartHere, nvml: FakeNvml
) -> None:
    """Its reading is in the heartbeat; with the first uncorrectable error it is down, and what waits is for others."""

    async def seen() -> WorkerView | None:
        found = next(iter((await pool.presence.observe(["free"])).workers), None)
        return found if found and found.gpu else None

    worker = await start_here("faulty_models:reverse", redis_url=redis_url)
    healthy = await eventually(seen, "the GPU is in the heartbeat")
    assert (healthy.healthy, healthy.gpu and healthy.gpu.temperature_c) == (True, 61)
    assert [reply.output for reply in await replies(pool, await batch(pool, "abc"))] == ["cba"]

    nvml.ecc = 1
    await eventually(lambda: not worker._gpu.well.is_set(), "the error is read")

    async def down() -> WorkerView | None:
        found = await seen()
        return found if found and found.status == "down" else None

    out = await eventually(down, "the worker is down")
    assert (out.healthy, out.gpu and out.gpu.fault) == (False, ECC)
    runs = worker._execution.batches
    waiting = await batch(pool, "xyz")
    await start_here("faulty_models:reverse", redis_url=redis_url, worker_id="w2", device="cpu")
    assert [reply.output for reply in await replies(pool, waiting)] == ["zyx"]
    assert worker._execution.batches == runs  # It was waiting for a batch when its GPU broke, and gave it back.
    assert worker._supervisor.status == "ready"  # The model is well; it is the GPU that is not.
    client = await DirectClient.welcomed(worker)
    assert not hasattr(await client.ask(item("b")), "outcomes")


@pytest.mark.usefixtures("nvml", "faulty_models")
async def test_a_well_gpu_changes_nothing_for_direct_calls(start_here: StartHere) -> None:
    """It is looked at beside the work."""
    worker = await start_here("faulty_models:reverse")
    client = await DirectClient.welcomed(worker)

    assert told(await client.outcomes(item("abc"))) == {"abc": "cba"}
    await eventually(lambda: worker._gpu.reading, "it was looked at")
