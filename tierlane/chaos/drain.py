"""When a stack has finished all that it accepted: nothing queued, leased or unwritten, and no open row in the audit."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from redis.asyncio import Redis

from ledger.postgres import asyncpg_dsn
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from scheduler.redis_client.keys import Keys
from tierlane.up.demo_data import TIERS

LOOK_S = 0.5
QUIET_LOOKS = 2  # One look at several servers is no snapshot.
PATIENCE_S = 1.0
OPEN_ROWS = "SELECT count(*) FROM requests WHERE status IN ('queued', 'processing')"


@dataclass(frozen=True)
class Left:
    """What is not finished yet, or `fault`: why nobody can tell."""

    waiting: int = 0
    unwritten: int = 0
    open_rows: int = 0
    spooled: int = 0
    fault: str = ""

    @property
    def nothing(self) -> bool:
        """Whether all is done."""
        return not (self.waiting or self.unwritten or self.open_rows or self.spooled or self.fault)

    def __str__(self) -> str:
        """As the report says it."""
        return self.fault or (
            f"{self.waiting} waiting or running, {self.unwritten} not written to the audit, "
            f"{self.spooled} spool files, {self.open_rows} open rows"
        )


async def drain(redis_url: str, database_url: str, spools: Sequence[Path], within_s: float) -> tuple[float, Left]:
    """Wait until nothing is left, at most `within_s`; how long it took, and what is left."""
    began = time.monotonic()
    quiet = 0
    while True:
        left = await _look(redis_url, database_url, spools)
        seconds = time.monotonic() - began
        quiet = quiet + 1 if left.nothing else 0
        if quiet >= QUIET_LOOKS or seconds > within_s:
            return seconds, left
        await asyncio.sleep(LOOK_S)


async def _look(redis_url: str, database_url: str, spools: Sequence[Path]) -> Left:
    try:
        waiting, unwritten = await _in_redis(redis_url)
        return Left(waiting, unwritten, await _open_rows(database_url), sum(_spooled(spool) for spool in spools))
    except (RedisUnavailable, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        return Left(fault=f"{type(error).__name__}: {error}")


async def _in_redis(redis_url: str) -> tuple[int, int]:
    keys = Keys()
    client = command_client(redis_url)
    try:
        async with bounded(PATIENCE_S):
            queues = [await client.llen(key) for key in (keys.batch_queue, *map(keys.queue, TIERS))]
            leases = await client.zcard(keys.leases)
            unwritten = await client.llen(keys.outbox) + await _taken(client, keys)
    finally:
        await client.aclose()
    return sum(queues) + leases, unwritten


async def _taken(client: Redis, keys: Keys) -> int:
    """Audit entries in the hands of auditors, dead ones included."""
    return sum([await client.llen(key) async for key in client.scan_iter(match=keys.auditor_outbox("*"))])


async def _open_rows(database_url: str) -> int:
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=PATIENCE_S, command_timeout=5)
    try:
        return int(await connection.fetchval(OPEN_ROWS))
    finally:
        await connection.close(timeout=PATIENCE_S)


def _spooled(directory: Path) -> int:
    """Files of the audit spool that hold something."""
    return sum(path.is_file() and path.stat().st_size > 0 for path in directory.glob("spool/*"))
