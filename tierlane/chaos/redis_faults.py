"""Faults of Redis that are commands: clients cut off, data lost, memory short, answers late."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.connections import bounded, command_client
from scheduler.errors import RedisUnavailable
from tierlane.chaos.ground import Ground
from tierlane.chaos.schedule import Planned

PATIENCE_S = 1.0
HEAL_WITHIN_S = 15.0  # Another fault may have stopped or killed it meanwhile.
HEAL_POLL_S = 0.1


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
        await _give_back(ground, before)


async def _memory_limit(ground: Ground) -> int:
    async with redis(ground) as client, bounded(PATIENCE_S):
        return int((await client.config_get("maxmemory"))["maxmemory"] or 0)


async def _give_back(ground: Ground, limit: int) -> None:
    """Set the old limit again, however long Redis is away; a restarted one has it already."""
    deadline = time.monotonic() + HEAL_WITHIN_S
    while True:
        try:
            await command(ground, "CONFIG", "SET", "maxmemory", limit)
            return
        except (RedisUnavailable, RedisError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEAL_POLL_S)
