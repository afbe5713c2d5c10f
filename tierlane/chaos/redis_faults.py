"""Faults of Redis itself: clients cut off, data lost, memory or disk short, answers late, a clock that steps."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from tierlane.chaos.faults.target import Doing, FaultImpossible
from tierlane.chaos.file_limits import full_disk
from tierlane.chaos.ground import Ground
from tierlane.chaos.schedule import Planned
from tierlane.chaos.steps import told_step

PATIENCE_S = 1.0
HEAL_WITHIN_S = 15.0  # Another fault may have stopped or killed it meanwhile.
HEAL_POLL_S = 0.1
AOF_WITHIN_S = 2.0  # A file of what such a stack holds is begun in a fraction of it.


@asynccontextmanager
async def redis(ground: Ground) -> AsyncIterator[Redis]:
    """A client of Redis itself."""
    client = command_client(ground.redis_url)
    try:
        yield client
    finally:
        await client.aclose()


async def command(ground: Ground, *words: str | int) -> object:
    """Send one command. Raises RedisUnavailable when it is not answered in time; it may run later all the same."""
    async with redis(ground) as client, bounded(PATIENCE_S):
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def normal_clients_killed(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Every command connection is closed."""
    del fault
    yield f"{await command(ground, 'CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')} connections"


@asynccontextmanager
async def subscribers_killed(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Every subscriber is closed."""
    del fault
    yield f"{await command(ground, 'CLIENT', 'KILL', 'TYPE', 'pubsub')} connections"


@asynccontextmanager
async def flushed(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Everything is gone."""
    del fault
    keys = await command(ground, "DBSIZE")
    await command(ground, "FLUSHALL")
    yield f"{keys} keys"


@asynccontextmanager
async def scripts_flushed(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Redis knows no script any more."""
    del fault
    await command(ground, "SCRIPT", "FLUSH")
    yield ""


@asynccontextmanager
async def paused(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Redis takes commands and answers them when the time is over; the pause ends by itself."""
    await command(ground, "CLIENT", "PAUSE", round(fault.length_s * 1000), "ALL")
    yield ""


@asynccontextmanager
async def short_of_memory(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """The limit is just above what is used."""
    before = await _memory_limit(ground)
    spare = round(fault.parameters["spare_kib"] * 1024)
    async with redis(ground) as client, bounded(PATIENCE_S):
        used = int((await client.info("memory"))["used_memory"])
        await client.config_set("maxmemory", used + spare)
    try:
        yield f"maxmemory {used + spare}, {spare} more than used"
    finally:
        await _set(ground, "maxmemory", before)


async def _memory_limit(ground: Ground) -> int:
    async with redis(ground) as client, bounded(PATIENCE_S):
        return int((await client.config_get("maxmemory"))["maxmemory"] or 0)


async def _set(ground: Ground, name: str, value: str | int) -> None:
    """Set it, however long Redis is away; a restarted one has its own value already."""
    deadline = time.monotonic() + HEAL_WITHIN_S
    while True:
        try:
            await command(ground, "CONFIG", "SET", name, value)
            return
        except (RedisUnavailable, RedisError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEAL_POLL_S)


@asynccontextmanager
async def without_disk(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """An append-only file that takes no byte more: every command that writes, and PING, is answered MISCONF."""
    processes = await asyncio.to_thread(ground.processes, fault.place, fault.index)
    if not processes:
        raise FaultImpossible("It is down already.")
    try:
        await command(ground, "CONFIG", "SET", "appendonly", "yes")
        await _file_begun(ground)
        with full_disk() as disk:
            disk.fill(processes[0])
            yield ""
    finally:
        await _set(ground, "appendonly", "no")


async def _file_begun(ground: Ground) -> None:
    """Wait until the file has what is in memory. Raises FaultImpossible where that takes too long."""
    deadline = time.monotonic() + AOF_WITHIN_S
    while time.monotonic() < deadline:
        async with redis(ground) as client, bounded(PATIENCE_S):
            state = await client.info("persistence")
        if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
            return
        await asyncio.sleep(HEAL_POLL_S)
    raise FaultImpossible("It did not begin its append-only file in time.")


def clock_stepped(direction: int) -> Doing:
    """Its wall clock steps forwards (1) or backwards (-1), and back again at the end."""

    @asynccontextmanager
    async def stepped(ground: Ground, fault: Planned) -> AsyncIterator[str]:
        step_s = direction * round(fault.parameters["step_s"], 3)
        if ground.redis_clock.why_not:
            raise FaultImpossible(ground.redis_clock.why_not)
        ground.redis_clock.move(step_s)
        try:
            yield told_step(step_s)
        finally:
            ground.redis_clock.move(-step_s)

    return stepped
