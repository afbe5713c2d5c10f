"""What an operator changes by way of a gateway: in a transaction under a name, and who is cordoned.

The statements are plain SQL where `ledger/admin/` has SQLAlchemy build them: that costs a process 15 MB, which no gateway needs
to spend. Rows, triggers and record are the same. All functions raise what asyncpg raises.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledger.postgres import Connection
from ledger.statements import statement


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
