"""Workers, model processes and schedulers are killed under load: each request has one response and one audit row."""

import asyncio
import os
import signal

import pytest

from faults import killed_mid_batch
from load import ALL_WELL, load, one_row_each, unwell, verdict
from stack import Stack

TIERS = ("enterprise", "paid", "free")


@pytest.mark.parametrize("role", ["worker", "model"])
async def test_killed_workers_lose_nothing(simulated: Stack, role: str) -> None:
    """120 requests/s while four processes of the role are killed during a batch, each while all four GPUs are healthy.

    Without that condition several could be dead at once, and requests would be rejected for lack of capacity.
    """
    killing = asyncio.create_task(killed_mid_batch(simulated, role, 4, 2.0, healthy=4))
    answers = await load(simulated, 120, 6.0, TIERS, done=killing.done)

    assert len(set(await killing)) == 4
    assert verdict(answers) == ALL_WELL, unwell(answers)
    assert await one_row_each(simulated, answers) > 0  # Some needed a second attempt.


async def test_a_killed_scheduler_is_only_a_pause(simulated: Stack) -> None:
    """Requests that were queued or running are served after the restart."""
    (pid,) = simulated.pids("scheduler").values()
    asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGKILL)
    answers = await load(simulated, 200, 3.0, TIERS)

    wrong = verdict(answers)
    assert (wrong["unanswered"], wrong["duplicated"], wrong["crossed"], wrong["late"]) == (0, 0, 0, 0)
    statuses = {a.request_id: a.status for a in answers if a.request_id and a.status in {200, 504}}
    rows = await simulated.audited(list(statuses))
    assert {request_id: row["http_status"] for request_id, row in rows.items()} == statuses
