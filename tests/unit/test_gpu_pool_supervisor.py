"""Supervision of the model process: quarantine, restart delays, a process that cannot be killed."""

import asyncio
from typing import cast

import pytest

from eventually import eventually
from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process import supervisor
from gpu_pool.model_process.handle import ModelProcess
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.quarantine import BatchVerdict, Quarantine, judge
from gpu_pool.model_process.respawn import Respawn
from gpu_pool.model_process.supervisor import ModelSupervisor

GOOD, INVALID, NEITHER = BatchVerdict.GOOD, BatchVerdict.INVALID, BatchVerdict.NEITHER
VERDICTS = {"G": GOOD, "X": INVALID, "N": NEITHER}
CODES = {"g": "", "x": "invalid_output", "p": "poison_request", "t": "gpu_timeout", "i": "invalid_request"}


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ("gx", INVALID),
        ("ggx", GOOD),
        ("px", INVALID),
        ("ppx", NEITHER),
        ("ti", NEITHER),
        ("u", NEITHER),
        ("ug", GOOD),
        ("uxg", INVALID),
        ("", NEITHER),
    ],
)
def test_verdict_of_a_batch(results: str, verdict: BatchVerdict) -> None:
    """Half invalid output is a strike; otherwise one good answer shows that the model works. `u`: an unusual input had it."""
    made = [ItemResult("", 0, CODES.get(each, "invalid_output"), by_input=each == "u") for each in results]
    assert judge(made) is verdict


@pytest.mark.parametrize(
    ("batches", "quarantines"),
    [
        ("XXGXX", []),
        ("XXNX", [5]),
        ("XXXNX", [5, 10]),  # One strike is enough on probation.
        ("XXXXXXXX", [5, 10, 20, 40, 60, 60]),
        ("XXXXGXXX", [5, 10, 5]),  # A good batch ends probation.
    ],
)
def test_three_strikes_and_probation(batches: str, quarantines: list[float]) -> None:
    """Seconds of each quarantine: 5, doubling to 60 while no good batch comes in between."""
    quarantine = Quarantine()

    assert [s for batch in batches if (s := quarantine.after(VERDICTS[batch]))] == quarantines


WORKED, OLD, CRASHED, NOT_LOADED = (3.0, 20), (10.0, 0), (0.5, 3), (None, 0)


@pytest.mark.parametrize(
    ("ends", "delays", "failed"),
    [
        ([WORKED, OLD] * 3, [0.1] * 6, False),
        ([CRASHED] * 8, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], False),
        ([(9.9, 19)] * 3, [0.1, 0.2, 0.4], False),
        ([CRASHED, CRASHED, WORKED, CRASHED], [0.1, 0.2, 0.1, 0.2], False),
        ([NOT_LOADED] * 4, [0.1, 0.2, 0.4, 0.8], False),
        ([NOT_LOADED] * 6, [0.1, 0.2, 0.4, 0.8, 30.0, 30.0], True),
        ([NOT_LOADED, NOT_LOADED, CRASHED, NOT_LOADED], [0.1, 0.2, 0.4, 0.8], False),
        ([*[NOT_LOADED] * 5, WORKED, NOT_LOADED], [0.1, 0.2, 0.4, 0.8, 30.0, 0.1, 0.2], False),
    ],
)
def test_restart_delays(ends: list[tuple[float | None, int]], delays: list[float], failed: bool) -> None:
    """(seconds ready, good batches): ten seconds or twenty batches restart at once; five failed loads mean `failed`."""
    respawn, found = Respawn(), []
    for ready_s, good in ends:
        if ready_s is not None:
            respawn.loaded()
        found.append(respawn.ended(ready_s, good))

    assert found == pytest.approx(delays)
    assert respawn.failed is failed


class Stuck:
    """A stand-in for a process in uninterruptible sleep."""

    pid = 1
    why_lost = "The model process was ended by signal 9."

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def close(self) -> None:
        await self.gone.wait()


@pytest.mark.parametrize("stopping", [False, True])
async def test_process_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch, stopping: bool) -> None:
    """The worker is quarantined until the process is gone, and starts no second one; a worker that stops leaves it."""
    monkeypatch.setattr(supervisor, "REAPED_WITHIN_S", 0.05)
    model_supervisor, process = ModelSupervisor(ModelLaunch("simulated"), 1.0, lambda: None), Stuck()
    model_supervisor._process = cast("ModelProcess", process)

    if stopping:
        async with asyncio.timeout(2):
            await model_supervisor.close()
        assert model_supervisor._process is not None
        process.gone.set()
        assert model_supervisor._closing is not None
        await model_supervisor._closing
        return
    ending = asyncio.create_task(model_supervisor._end_process())
    await eventually(lambda: model_supervisor.status == "quarantined", "the status is quarantined")
    assert not ending.done()
    process.gone.set()
    await ending
    assert model_supervisor._process is None
