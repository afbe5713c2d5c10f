"""The drain of a stack: nothing is queued, leased or unwritten, and no audit row is open."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from ledger.postgres import asyncpg_dsn
from scheduler.errors import RedisUnavailable
from tierlane_tools.chaos.checker.leftovers import leftovers_of_cells

POLL_S = 0.5
QUIET_READS = 2  # Reads of several servers are no snapshot.
ROWS_PATIENCE_S = 1.0
OPEN_ROWS = "SELECT count(*) FROM requests WHERE status IN ('queued', 'processing')"


@dataclass(frozen=True)
class UnfinishedWork:
    """Unfinished work, or `fault`: why it is unknown."""

    in_redis: int = 0
    open_rows: int = 0
    spooled: int = 0
    fault: str = ""

    @property
    def nothing(self) -> bool:
        """Whether there is none."""
        return not (self.in_redis or self.open_rows or self.spooled or self.fault)

    def __str__(self) -> str:
        """The text in the report."""
        return self.fault or (
            f"{self.in_redis} requests, batches and audit records in Redis, {self.spooled} spool files, "
            f"{self.open_rows} open rows"
        )


async def drain(
    redis_urls: Sequence[str], database_url: str, spools: Sequence[Path], within_s: float
) -> tuple[float, UnfinishedWork]:
    """Wait until no work is left, at most `within_s`; returns the seconds, and the work that is left."""
    began = time.monotonic()
    quiet = 0
    while True:
        left = await _read_unfinished(redis_urls, database_url, spools)
        seconds = time.monotonic() - began
        quiet = quiet + 1 if left.nothing else 0
        if quiet >= QUIET_READS or seconds > within_s:
            return seconds, left
        await asyncio.sleep(POLL_S)


async def _read_unfinished(redis_urls: Sequence[str], database_url: str, spools: Sequence[Path]) -> UnfinishedWork:
    try:
        left = await leftovers_of_cells(redis_urls)
        connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=ROWS_PATIENCE_S, command_timeout=5)
        try:
            open_rows = int(await connection.fetchval(OPEN_ROWS))
        finally:
            await connection.close(timeout=ROWS_PATIENCE_S)
        return UnfinishedWork(
            in_redis=len(left.open_requests) + sum(left.lengths.values()),
            open_rows=open_rows,
            spooled=sum(
                path.stat().st_size > 0 for spool in spools for path in spool.glob("spool/*") if path.is_file()
            ),
        )
    except (RedisUnavailable, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        return UnfinishedWork(fault=f"{type(error).__name__}: {error}")
