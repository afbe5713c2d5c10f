"""A stack without a running scheduler: its gateways do the work of a scheduler, and report it if one is expected."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from eventually import eventually
from load import ALL_WELL, load, one_row_each, unwell, verdict
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
OPTIONS = ("--backend", "simulated:50", "--workers", "2", "--gateways", "2")
START_S = 30.0
"""In which a scheduler has started, and made its first pass, on a busy machine."""


async def standing_in(stack: Stack) -> bool:
    health = await stack.health()
    return health["status"] == "degraded" and health["checks"]["scheduler:pass_age"][0].get("code") == "no_scheduler"


def scheduling(stack: Stack) -> int:
    """The number of gateways that schedule now, by their log."""
    # Without the lines in which `up` says what a process that it waits for has printed last.
    lines = [
        line for line in (stack.data_dir.parent / "up.log").read_text().splitlines() if line.startswith("gateway-")
    ]
    log = "\n".join(lines)
    return log.count("this gateway schedules") - log.count("this gateway no longer schedules")


async def test_gateways_stand_in_for_a_suspended_scheduler(tmp_path: Path) -> None:
    """No queued request times out; when the scheduler continues, both gateways stop."""
    with start_stack(tmp_path / "stack", *OPTIONS) as stack:
        await stack.healthy(2)
        (pid,) = stack.pids("scheduler").values()
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGSTOP)
        try:
            answers = await load(stack, 60.0, 4.0, TIERS)
            assert await standing_in(stack)
            await eventually(lambda: scheduling(stack) == 2, "both gateways schedule")
        finally:
            os.kill(pid, signal.SIGCONT)

        # A queue that is not served may be shed; accepted requests get their response in time.
        accepted = [answer for answer in answers if answer.code != "shed_for_priority"]
        assert verdict(accepted) == ALL_WELL, unwell(accepted)
        assert len(accepted) > 0.8 * len(answers)
        await stack.healthy(2)
        await eventually(lambda: scheduling(stack) == 0, "both gateways stop")
        await one_row_each(stack, accepted)


@asynccontextmanager
async def scheduler_beside(stack: Stack) -> AsyncIterator[asyncio.subprocess.Process]:
    """A scheduler that is not a process of the stack; it is killed at the end."""
    command = [sys.executable, "-P", "-m", "tierlane", "scheduler"]
    process = await asyncio.create_subprocess_exec(
        *command, env=stack.role_environment(), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def test_gateways_schedule_where_no_scheduler_is_deployed(tmp_path: Path) -> None:
    """With `--schedulers 0` health has no reason, and each request has its output and one row, also when a worker is killed.

    The gateways stop while a scheduler passes, and continue when it is killed.
    """
    with start_stack(tmp_path / "stack", *OPTIONS, "--schedulers", "0") as stack:
        await stack.healthy(2)
        health = await stack.health()
        assert (health["status"], health["reasons"], stack.pids("scheduler")) == ("healthy", [], {})
        asyncio.get_running_loop().call_later(1.0, os.kill, stack.pids("worker")["worker-1"], signal.SIGKILL)
        answers = await load(stack, 60.0, 4.0, TIERS)
        await stack.healthy(2)

        await eventually(lambda: scheduling(stack) == 2, "both gateways schedule")
        async with scheduler_beside(stack):
            await eventually(lambda: scheduling(stack) == 0, "both gateways stop", START_S)
            answers += await load(stack, 60.0, 2.0, TIERS)
            await stack.healthy(2)
        answers += await load(stack, 60.0, 2.0, TIERS)
        await eventually(lambda: scheduling(stack) == 2, "both gateways schedule again")
        await stack.healthy(2)

        assert verdict(answers) == ALL_WELL, unwell(answers)
        await one_row_each(stack, answers)


async def test_a_gateway_of_two_is_killed_where_no_scheduler_is_deployed(tmp_path: Path) -> None:
    """The other one goes on forming batches and writing the audit, without a pause that a request would notice."""
    with start_stack(tmp_path / "stack", *OPTIONS, "--schedulers", "0") as stack:
        await stack.healthy(2)
        os.kill(stack.pids("gateway")["gateway-1"], signal.SIGKILL)
        answers = await load(stack, 60.0, 2.0, TIERS)

        assert verdict(answers) == ALL_WELL, unwell(answers)
        await one_row_each(stack, answers)
        await stack.healthy(2)
