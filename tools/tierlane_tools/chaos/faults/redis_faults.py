"""Faults of Redis: commands, lost data, a pause, little memory, a full disk, steps of its clock."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from tierlane_tools.chaos.faults.full_disk import full_disk
from tierlane_tools.chaos.faults.process_faults import running_processes
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.server_clock import step_text
from tierlane_tools.chaos.faults.target import FaultAction, FaultImpossible, StackTargets

PATIENCE_S = 1.0
HEAL_WITHIN_S = 15.0  # Another fault may have stopped or killed Redis meanwhile.
HEAL_POLL_S = 0.1
AOF_WITHIN_S = 2.0  # Enough for the data of such a stack.


@asynccontextmanager
async def redis(url: str) -> AsyncIterator[Redis]:
    """A client of this Redis."""
    client = command_client(url)
    try:
        yield client
    finally:
        await client.aclose()


async def command(url: str, *words: str | int) -> object:
    """Send one command. Raises RedisUnavailable without a reply in time; it may still run later."""
    async with redis(url) as client, bounded(PATIENCE_S):
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


def redis_command(details: str, *words: str) -> FaultAction:
    """Send one command; `details` is the text for its result."""

    @asynccontextmanager
    async def sent(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        yield details.format(await command(await targets.redis_server(fault.index), *words))

    return sent


@asynccontextmanager
async def flushed(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Delete all keys."""
    url = await targets.redis_server(fault.index)
    keys = await command(url, "DBSIZE")
    await command(url, "FLUSHALL")
    yield f"{keys} keys"


@asynccontextmanager
async def paused(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Delay all replies for the length of the fault."""
    await command(await targets.redis_server(fault.index), "CLIENT", "PAUSE", round(fault.length_s * 1000), "ALL")
    yield ""


@asynccontextmanager
async def short_of_memory(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Set the memory limit just above the used memory."""
    spare = round(fault.parameters["spare_kib"] * 1024)
    url = await targets.redis_server(fault.index)
    async with redis(url) as client, bounded(PATIENCE_S):
        before = int((await client.config_get("maxmemory"))["maxmemory"] or 0)
        used = int((await client.info("memory"))["used_memory"])
        await client.config_set("maxmemory", used + spare)
    try:
        yield f"maxmemory {used + spare}, {spare} more than used"
    finally:
        await _set(url, "maxmemory", before)


async def _set(url: str, name: str, value: str | int) -> None:
    """Set a configuration value once Redis responds; after a restart it already has its own."""
    deadline = time.monotonic() + HEAL_WITHIN_S
    while True:
        try:
            await command(url, "CONFIG", "SET", name, value)
            return
        except (RedisUnavailable, RedisError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEAL_POLL_S)


@asynccontextmanager
async def redis_without_disk(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Fill the disk of the append-only file: writes and PING get MISCONF."""
    processes = await running_processes(targets, fault)
    url = await targets.redis_server(fault.index)
    try:
        await command(url, "CONFIG", "SET", "appendonly", "yes")
        await _wait_for_file(url)
        with full_disk() as disk:
            disk.fill(processes[0])
            yield ""
    finally:
        await _set(url, "appendonly", "no")


async def _wait_for_file(url: str) -> None:
    """Wait until the file has the data in memory. Raises FaultImpossible where that takes too long."""
    deadline = time.monotonic() + AOF_WITHIN_S
    while time.monotonic() < deadline:
        async with redis(url) as client, bounded(PATIENCE_S):
            state = await client.info("persistence")
        if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
            return
        await asyncio.sleep(HEAL_POLL_S)
    raise FaultImpossible("Redis did not write its append-only file in time.")


def clock_stepped(direction: int) -> FaultAction:
    """Step the wall clock of Redis forwards (1) or backwards (-1), and back at the end."""

    @asynccontextmanager
    async def stepped(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        step_s = direction * round(fault.parameters["step_s"], 3)
        if targets.redis_clock.why_not:
            raise FaultImpossible(targets.redis_clock.why_not)
        targets.redis_clock.move(step_s)
        try:
            yield step_text(step_s)
        finally:
            targets.redis_clock.move(-step_s)

    return stepped
