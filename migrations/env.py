"""How alembic meets our database: one transaction, one migrator at a time, and what it may compare.

`ledger.migration` hands a connection over; a developer's `alembic -x url=postgresql+asyncpg://... revision
--autogenerate` makes its own.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from ledger.migration import MIGRATION_LOCK, is_ours
from ledger.schema import metadata


def run(connection: Connection) -> None:
    """Bring the database that `connection` speaks to up to date, in one transaction."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        compare_server_default=True,
        include_name=is_ours,
    )
    with context.begin_transaction():
        # Taken before alembic reads the revision, so that the second of two migrators finds nothing left to do.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        context.run_migrations()


async def run_from_url() -> None:
    url = context.get_x_argument(as_dictionary=True).get("url")
    if not url:
        raise SystemExit("Name the database: alembic -x url=postgresql+asyncpg://user@host/database ...")
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
elif context.is_offline_mode():
    raise SystemExit("Offline mode is not supported; give a database with -x url=...")
else:
    asyncio.run(run_from_url())
