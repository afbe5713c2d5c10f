"""What breaks on a GPU, for real: an assert on the device, an allocation that does not fit, a kernel that never ends."""

import time
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
    """A module of models that only model processes import."""
    (tmp_path / "gpu_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def answers(pool: Pool, *texts: str) -> list[Reply]:
    return await replies(pool, await batch(pool, *texts), BACK_WITHIN_S)


def pid(worker: Worker) -> int:
    assert worker._supervisor.model is not None
    return worker._supervisor.model.pid


async def test_an_assert_on_the_device_ends_the_process_and_another_serves(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """Every later call would fail in the same process; the neighbours complete in the next ones."""
    worker = await start_here("gpu_models:asserts_on_bad", redis_url=redis_url, device="cuda")
    first, began = pid(worker), time.monotonic()

    found = await answers(pool, "one", "bad", "three")
    back_s = time.monotonic() - began

    assert [reply.error_code for reply in found] == ["", "worker_lost", ""]
    await eventually(lambda: worker._supervisor.model, "a model is ready", BACK_WITHIN_S)
    assert pid(worker) != first
    print(f"three device-side asserts, and every request answered: {back_s:.1f} s")


async def test_an_allocation_that_does_not_fit_halves_the_batch(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """The process lives, and gives the device less in one go from then on."""
    worker = await start_here("gpu_models:holds_three", redis_url=redis_url, device="cuda")
    alive = pid(worker)

    for _ in range(2):
        assert [reply.output for reply in await answers(pool, *"abcdefgh")] == list("abcdefgh")

    assert pid(worker) == alive
    assert 0 < worker._execution._largest < 8


async def test_a_kernel_that_never_ends_is_killed_with_its_process(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """By the cap of its batch; the next process has the GPU again."""
    worker = await start_here("gpu_models:spins_on_bad", redis_url=redis_url, device="cuda", gpu_timeout_ms=1000)
    first = pid(worker)

    ids = await batch(pool, "bad")
    await eventually(lambda: worker._supervisor.model is None, "its process is gone", BACK_WITHIN_S)
    await eventually(lambda: worker._supervisor.model, "another is ready", BACK_WITHIN_S)

    assert pid(worker) != first
    assert [reply.error_code for reply in await replies(pool, ids, 3 * BACK_WITHIN_S)] != [""]
    assert [reply.output for reply in await answers(pool, "next")] == ["txen"]


async def test_tiny_answers_on_a_gpu(pool: Pool, redis_url: str, start_here: StartHere) -> None:
    """The model that ships with the project, through the queue."""
    await start_here("tiny", redis_url=redis_url, device="cuda")

    found = await answers(pool, "Once upon a time", "The price of bread")

    assert [reply.error_code for reply in found] == ["", ""]
    assert all(reply.output for reply in found)
