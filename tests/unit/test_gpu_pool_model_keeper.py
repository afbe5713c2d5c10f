"""The keeper of a model process that does not end: stuck in the kernel, it answers not even to SIGKILL."""

import asyncio
from typing import cast

import pytest

from eventually import eventually
from gpu_pool.model_process import supervisor
from gpu_pool.model_process.handle import ModelLaunch, ModelProcess
from gpu_pool.model_process.supervisor import ModelSupervisor


class Stuck:
    """Stands for a process in uninterruptible sleep, which no test can make."""

    pid = 1
    why_lost = "The model process was ended by signal 9."

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1
        await self.gone.wait()


@pytest.fixture
async def stuck(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelSupervisor, Stuck]:
    monkeypatch.setattr(supervisor, "REAPED_WITHIN_S", 0.05)
    keeper, process = ModelSupervisor(ModelLaunch("simulated"), 1.0, lambda: None), Stuck()
    keeper._process = cast("ModelProcess", process)
    return keeper, process


async def test_a_device_that_holds_its_process_is_out_of_use_until_it_lets_go(
    stuck: tuple[ModelSupervisor, Stuck],
) -> None:
    """Health says quarantined, and no second process is started on the device."""
    keeper, process = stuck
    ending = asyncio.create_task(keeper._end_process())

    await eventually(lambda: keeper.status == "quarantined", "health can see it")
    assert not ending.done()
    process.gone.set()
    await ending

    assert keeper._process is None


async def test_a_worker_that_stops_leaves_it_to_the_kernel(stuck: tuple[ModelSupervisor, Stuck]) -> None:
    """The worker's own end must not wait for what may never come; the process was told to die."""
    keeper, process = stuck

    async with asyncio.timeout(2):
        await keeper.close()

    assert process.closed == 1
    process.gone.set()
    assert keeper._closing is not None
    await keeper._closing
