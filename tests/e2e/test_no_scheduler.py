"""A stack without a scheduler: its gateways do what one would, and say so, until one passes again."""

import asyncio
import os
import signal
from pathlib import Path

from eventually import eventually
from load import ALL_WELL, load, one_row_each, unwell, verdict
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
OPTIONS = ("--backend", "simulated:50", "--workers", "2", "--gateways", "2")
STAND_IN = "gateways form the batches"


def said(stack: Stack) -> str:
    return (stack.data_dir.parent / "up.log").read_text()


async def standing_in(stack: Stack) -> bool:
    seen = await stack.health()
    return seen["status"] == "degraded" and any(STAND_IN in reason for reason in seen["reasons"])


async def test_a_stack_without_schedulers_serves_and_audits(tmp_path: Path) -> None:
    """Every request has its answer in time and its row; health names what is missing."""
    with start_stack(tmp_path / "stack", *OPTIONS, "--schedulers", "0") as stack:
        await eventually(lambda: standing_in(stack), "health says that gateways stand in")

        answers = await load(stack, 60.0, 3.0, TIERS)

        assert verdict(answers) == ALL_WELL, unwell(answers)
        await one_row_each(stack, answers)
        assert await standing_in(stack)


async def test_gateways_stand_in_for_a_scheduler_that_stands_still(tmp_path: Path) -> None:
    """Nothing that waits meanwhile runs out of time; once the scheduler goes on they leave it to it alone."""
    with start_stack(tmp_path / "stack", *OPTIONS) as stack:
        await stack.healthy(2)
        (pid,) = stack.pids("scheduler").values()
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, os.kill, pid, signal.SIGSTOP)
        try:
            answers = await load(stack, 60.0, 4.0, TIERS)
            assert await standing_in(stack)
        finally:
            os.kill(pid, signal.SIGCONT)

        # A queue that nobody takes from may be shed; what was accepted is answered in time.
        taken = [answer for answer in answers if answer.code != "shed_for_priority"]
        assert verdict(taken) == ALL_WELL, unwell(taken)
        assert len(taken) > 0.8 * len(answers)
        await stack.healthy(2)
        assert said(stack).count("no scheduler passes") == 2
        await eventually(lambda: said(stack).count("no longer schedules") == 2, "both gateways stopped")
        await one_row_each(stack, taken)
