"""A stack without a running scheduler: its gateways do the work of a scheduler, and report it."""

import asyncio
import os
import signal
from pathlib import Path

from eventually import eventually
from load import ALL_WELL, load, one_row_each, unwell, verdict
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
OPTIONS = ("--backend", "simulated:50", "--workers", "2", "--gateways", "2")


async def standing_in(stack: Stack) -> bool:
    health = await stack.health()
    return health["status"] == "degraded" and health["checks"]["scheduler:pass_age"][0].get("code") == "no_scheduler"


async def test_gateways_stand_in_for_a_suspended_scheduler(tmp_path: Path) -> None:
    """No queued request times out; when the scheduler continues, both gateways stop."""
    with start_stack(tmp_path / "stack", *OPTIONS) as stack:
        await stack.healthy(2)
        (pid,) = stack.pids("scheduler").values()
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGSTOP)
        try:
            answers = await load(stack, 60.0, 4.0, TIERS)
            assert await standing_in(stack)
        finally:
            os.kill(pid, signal.SIGCONT)

        # A queue that is not served may be shed; accepted requests get their response in time.
        accepted = [answer for answer in answers if answer.code != "shed_for_priority"]
        assert verdict(accepted) == ALL_WELL, unwell(accepted)
        assert len(accepted) > 0.8 * len(answers)
        await stack.healthy(2)
        log = stack.data_dir.parent / "up.log"
        assert log.read_text().count("this gateway schedules") == 2
        await eventually(lambda: log.read_text().count("no longer schedules") == 2, "both gateways stop")
        await one_row_each(stack, accepted)
