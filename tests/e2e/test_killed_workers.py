"""Workers die by SIGKILL in the middle of their batches: one answer and one audit row for each request all the same."""

import asyncio
import os
import signal
import time

from eventually import eventually
from faults import killed_mid_batch
from load import ALL_WELL, Answer, load, one_row_each, unwell, verdict
from stack import Stack

TIERS = ("enterprise", "paid", "free")


async def under_fire(stack: Stack, role: str) -> list[Answer]:
    """300 requests/s while four processes of the role are killed, each while three GPUs of four are well.

    Where starting one takes seconds all four could be dead at once; then the limits follow the GPUs, and rightly refuse.
    """
    killing = asyncio.create_task(killed_mid_batch(stack, role, 4, 2.0, healthy=3))
    answers = await load(stack, 300, 6.0, TIERS, done=killing.done)
    gone = await killing
    assert len(set(gone)) == 4
    return answers


async def test_killed_supervisors_lose_nothing(simulated: Stack) -> None:
    """Supervisor and model die together; the lease runs out and another worker takes the batch."""
    answers = await under_fire(simulated, "worker")

    assert verdict(answers) == ALL_WELL, unwell(answers)
    assert await one_row_each(simulated, answers) > 0  # some really were in a killed worker's hands


async def test_killed_models_lose_nothing(simulated: Stack) -> None:
    """The model process dies alone; its supervisor sees it at once and releases the batch."""
    answers = await under_fire(simulated, "model")

    assert verdict(answers) == ALL_WELL, unwell(answers)
    assert await one_row_each(simulated, answers) > 0


async def test_health_tells_the_truth_about_a_killed_worker(simulated: Stack) -> None:
    """One of four is missing within two seconds and named; and all four count again once it is back."""
    await simulated.healthy(4)
    pid = simulated.pids("worker")["worker-2"]
    os.kill(pid, signal.SIGSTOP)  # silent, and nobody restarts it: the hardest to see
    began = time.monotonic()
    try:

        async def seen() -> dict[str, object]:
            health = await simulated.health()
            return health if health["healthy_gpus"] == 3 else {}

        health = await eventually(seen, "three healthy GPUs", 5.0)
        assert time.monotonic() - began < 2.0
        assert health["status"] == "degraded"
        assert "worker-2" in str(health["reasons"])
    finally:
        os.kill(pid, signal.SIGKILL)
    await simulated.healthy(4)


async def test_a_killed_scheduler_is_only_a_pause(simulated: Stack) -> None:
    """Whatever was queued or running when the scheduler died is served by the next one."""
    (pid,) = simulated.pids("scheduler").values()
    asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGKILL)
    answers = await load(simulated, 200, 3.0, TIERS)

    counted = verdict(answers)
    assert (counted["unanswered"], counted["duplicated"], counted["crossed"], counted["late"]) == (0, 0, 0, 0)
    ids = [a.request_id for a in answers if a.status in {200, 504}]
    rows = await simulated.audited([i for i in ids if i])
    outcome = {a.request_id: a.status for a in answers}
    assert {i: row["http_status"] for i, row in rows.items()} == {i: outcome[i] for i in rows}
