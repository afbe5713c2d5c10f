"""Faults of a real GPU: a device-side assert, an allocation that does not fit, a kernel that never ends."""

from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_direct import StartHere, start_here
from integration.gpu_pool_fixtures import batch, replies
from pool import Pool
from scheduler.protocol.replies import Reply

__all__ = ["start_here"]

pytestmark = pytest.mark.gpu

BACK_WITHIN_S = 30.0
MODELS = """
import torch

def reverse(texts): return [t[::-1] for t in texts]
def asserts_on_bad(texts):
    if "bad" in texts:
        torch.zeros(2, device="cuda")[torch.tensor([9], device="cuda")]
        torch.cuda.synchronize()
    return reverse(texts)
def holds_three(texts):
    _, total = torch.cuda.mem_get_info()
    torch.empty(total // 4 * len(texts) + 1, dtype=torch.uint8, device="cuda")
    return reverse(texts)
def spins_on_bad(texts):
    if "bad" in texts:
        torch.cuda._sleep(1 << 50)
        torch.cuda.synchronize()
    return reverse(texts)
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only model processes import."""
    (tmp_path / "gpu_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def run(pool: Pool, *texts: str) -> list[Reply]:
    return await replies(pool, await batch(pool, *texts), BACK_WITHIN_S)


def pid(worker: Worker) -> int:
    assert worker._supervisor.model is not None
    return worker._supervisor.model.pid


async def test_device_side_assert_ends_the_process(pool: Pool, redis_url: str, start_here: StartHere) -> None:
    """The other requests of the batch complete in the next process."""
    worker = await start_here("gpu_models:asserts_on_bad", redis_url=redis_url, device="cuda")
    first = pid(worker)

    assert [reply.error_code for reply in await run(pool, "one", "bad", "three")] == ["", "worker_lost", ""]
    await eventually(lambda: worker._supervisor.model, "a model is ready", BACK_WITHIN_S)
    assert pid(worker) != first


async def test_out_of_memory_halves_the_batch(pool: Pool, redis_url: str, start_here: StartHere) -> None:
    """The process goes on, with smaller batches."""
    worker = await start_here("gpu_models:holds_three", redis_url=redis_url, device="cuda")
    first = pid(worker)

    for _ in range(2):
        assert [reply.output for reply in await run(pool, *"abcdefgh")] == list("abcdefgh")

    assert pid(worker) == first
    assert 0 < worker._execution._largest < 8


async def test_endless_kernel_is_killed_with_its_process(pool: Pool, redis_url: str, start_here: StartHere) -> None:
    """At the cap; the next process can use the GPU."""
    worker = await start_here("gpu_models:spins_on_bad", redis_url=redis_url, device="cuda", gpu_timeout_ms=1000)
    first = pid(worker)

    ids = await batch(pool, "bad")
    await eventually(lambda: worker._supervisor.model is None, "its process is gone", BACK_WITHIN_S)
    await eventually(lambda: worker._supervisor.model, "another is ready", BACK_WITHIN_S)

    assert pid(worker) != first
    assert [reply.error_code for reply in await replies(pool, ids, 3 * BACK_WITHIN_S)] != [""]
    assert [reply.output for reply in await run(pool, "next")] == ["txen"]
