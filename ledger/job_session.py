"""One connection for work that comes often: made when it is needed, made again when it was lost, never waited for long.

While PostgreSQL is away whoever asks is told at once, and it is tried again at most twice a second.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

from ledger.postgres import AWAY, Connection, closing, connect, reason
from scheduler.errors import TierlaneError

T = TypeVar("T")

STATEMENT_TIMEOUT_MS = 1500
CONNECT_TIMEOUT_S = 1.0
SORRY_S = 0.5
# What was promised must be on the disk, whatever the server does by default.
DURABLE = {"synchronous_commit": "on"}
_OUR_FAULT = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError)
"""What says nothing against the connection."""


class StoreUnavailable(TierlaneError):
    """PostgreSQL did not answer in time or not at all; whether the work took effect is unknown."""


class JobSession:
    """Runs one piece of work at a time. `name` is seen in pg_stat_activity; `clock` is monotonic seconds."""

    def __init__(self, database_url: str, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = database_url
        self._name = name
        self._clock = clock
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do it; it must bear being done twice, since a connection may be found lost. Raises StoreUnavailable.

        What PostgreSQL refuses because of its values is raised as asyncpg raises it.
        """
        async with self._turn:
            if self._clock() < self._not_before:
                raise StoreUnavailable("PostgreSQL was away a moment ago.")
            was_there = self._connection is not None
            try:
                try:
                    return await self._tried(work)
                except AWAY as error:
                    if not was_there or isinstance(error, _OUR_FAULT):
                        raise
                    return await self._tried(work)
            except _OUR_FAULT:
                raise
            except AWAY as error:
                self._not_before = self._clock() + SORRY_S
                raise StoreUnavailable(f"PostgreSQL did not answer: {reason(error)}.") from error

    async def _tried(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = self._connection = await connect(
                self._url,
                name=self._name,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                statement_timeout_ms=STATEMENT_TIMEOUT_MS,
                settings=DURABLE,
            )
        try:
            return await work(connection)
        except _OUR_FAULT:
            raise
        except BaseException:  # A cancel among it: a connection with an answer on its way is not used again.
            connection.terminate()
            self._connection = None
            raise

    async def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            async with closing(connection):
                pass
