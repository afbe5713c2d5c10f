"""Transactions of an operator in a gateway: the actor's name, and the holder of a lock that a change waits for.

The statements are plain SQL, while SQLAlchemy builds those of ledger/admin/changes.py: it would cost each gateway 15 MB. All
functions raise what asyncpg raises.

Every change of the catalog locks the row of its version. A transaction that an administrator left open in psql therefore
blocks all others. These stop waiting after a few seconds with an error that names the holder, which is queried during the
wait, since PostgreSQL does not report it afterwards.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from asyncpg import LockNotAvailableError

from ledger.postgres import AWAY, Connection, statement

LOCK_TIMEOUT = {"lock_timeout": "3s"}
"""Settings of a connection."""

FIRST_QUERY_S = 0.5
QUERY_EVERY_S = 0.25


@asynccontextmanager
async def as_actor(connection: Connection, actor: str) -> AsyncIterator[None]:
    """A transaction whose changes `config_changes` records under `actor`."""
    async with connection.transaction():
        await connection.execute(statement("set_actor"), actor)
        yield


async def cordon_worker(connection: Connection, worker: str, reason: str) -> bool:
    """Returns False if the worker was cordoned already."""
    return bool(await connection.fetchval(statement("cordon_worker"), worker, reason))


async def uncordon_worker(connection: Connection, worker: str) -> bool:
    """Returns False if the worker was not cordoned."""
    return bool(await connection.fetchval(statement("uncordon_worker"), worker))


class Blocked(LockNotAvailableError):
    """The wait for a lock timed out. The message is a sentence with the holder and what to do."""


@asynccontextmanager
async def naming_holder(
    connection: Connection, connect: Callable[[], AbstractAsyncContextManager[Connection]]
) -> AsyncIterator[None]:
    """Raises Blocked if a wait for a lock in the block times out. `connect` opens another connection for the queries."""
    seen: list[Any] = []
    watch = asyncio.create_task(_watch(connection.get_server_pid(), connect, seen), name="lock holder")
    try:
        yield
    except LockNotAvailableError as error:
        raise Blocked(_sentence(seen)) from error
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(pid: int, connect: Callable[[], AbstractAsyncContextManager[Connection]], seen: list[Any]) -> None:
    await asyncio.sleep(FIRST_QUERY_S)
    with contextlib.suppress(*AWAY):
        async with connect() as connection:
            while True:
                if rows := await connection.fetch(statement("lock_holders"), pid):
                    seen[:] = rows
                await asyncio.sleep(QUERY_EVERY_S)


def _sentence(seen: list[Any]) -> str:
    if not seen:
        return "Another transaction holds a lock that this change needs: find it in pg_stat_activity, and try again."
    row = seen[0]
    facts = {
        "pid": row["pid"],
        "user": row["usename"],
        "application": row["application_name"],
        "from": row["client_addr"],
        "state": row["state"],
    }
    holder = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    since = f", open for {row['open_s']:.0f} s" if row["open_s"] is not None else ""
    more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
    return (
        f"An open transaction holds a lock that this change needs ({holder}{since}){more}: end it with COMMIT or "
        f"ROLLBACK, or with `SELECT pg_terminate_backend({row['pid']})`, and try again."
    )
