"""A gateway's change on behalf of an operator: a transaction under the actor's name, and lock holders.

The statements are plain SQL where ledger/admin/changes.py has SQLAlchemy build them: that costs a process 15 MB, which
no gateway needs to spend. Rows, triggers and record are the same. All functions raise what asyncpg raises.

Every change of the catalog locks the row of its version, so a transaction that an admin has left open in psql blocks
all others. They give up after a few seconds and name it; its holder is found while they wait, since PostgreSQL does not
know afterwards.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from asyncpg import LockNotAvailableError

from ledger.postgres import AWAY, Connection, statement


@asynccontextmanager
async def as_actor(connection: Connection, actor: str) -> AsyncIterator[None]:
    """A transaction whose changes are put down to `actor` in `config_changes`; rolled back where the block raises."""
    async with connection.transaction():
        await connection.execute(statement("set_actor"), actor)
        yield


async def cordon_worker(connection: Connection, worker: str, reason: str) -> bool:
    """Whether that changed anything: it does not for one that is cordoned already."""
    return bool(await connection.fetchval(statement("cordon_worker"), worker, reason))


async def uncordon_worker(connection: Connection, worker: str) -> bool:
    """Whether it was cordoned."""
    return bool(await connection.fetchval(statement("uncordon_worker"), worker))


LOCK_TIMEOUT = {"lock_timeout": "3s"}
"""As settings of a connection."""

LOOK_AFTER_S = 0.5
LOOK_EVERY_S = 0.25
_HOLDERS = """
SELECT pid, usename, application_name, client_addr, state,
       extract(epoch FROM clock_timestamp() - xact_start)::float8 AS open_s
FROM pg_stat_activity WHERE pid = ANY (pg_blocking_pids($1)) ORDER BY xact_start
"""


class Blocked(LockNotAvailableError):
    """A lock was not to be had in time; the message is a sentence that names its holder and what to do."""


@asynccontextmanager
async def naming_holder(
    connection: Connection, connect: Callable[[], AbstractAsyncContextManager[Connection]]
) -> AsyncIterator[None]:
    """Raises Blocked where something in the block gives up to wait for a lock. `connect` opens another connection to look
    by, once the block has taken half a second.
    """
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
    await asyncio.sleep(LOOK_AFTER_S)
    with contextlib.suppress(*AWAY):
        async with connect() as connection:
            while True:
                if rows := await connection.fetch(_HOLDERS, pid):
                    seen[:] = rows
                await asyncio.sleep(LOOK_EVERY_S)


def _sentence(seen: list[Any]) -> str:
    if not seen:
        return (
            "Another transaction holds a lock that this change needs: look for it in pg_stat_activity, and try again."
        )
    row = seen[0]
    facts = {
        "pid": row["pid"],
        "user": row["usename"],
        "application": row["application_name"],
        "from": row["client_addr"],
        "state": row["state"],
    }
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    since = f", open for {row['open_s']:.0f} s" if row["open_s"] is not None else ""
    more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
    return (
        f"A transaction that is open holds a lock that this change needs ({told}{since}){more}: have it end with COMMIT or "
        f"ROLLBACK, or end it with `SELECT pg_terminate_backend({row['pid']})`, and try again."
    )
