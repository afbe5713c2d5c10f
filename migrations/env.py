"""Alembic's environment: one transaction, one migrator at a time.

`ledger.migration` passes a connection. `alembic -x url=postgresql+asyncpg://... revision --autogenerate`, for developers,
opens its own.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from ledger.migration import is_compared
from ledger.postgres import MIGRATION_LOCK
from ledger.schema import metadata


def run(connection: Connection) -> None:
    """Migrate the database of `connection` in one transaction."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        compare_server_default=True,
        include_name=is_compared,
    )
    with context.begin_transaction():
        # Before alembic reads the revision, so that the second of two migrators finds nothing to do.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        context.run_migrations()


async def run_from_url() -> None:
    url = context.get_x_argument(as_dictionary=True).get("url")
    if not url:
        raise SystemExit(
            "The URL of the database is missing: alembic -x url=postgresql+asyncpg://user@host/database ..."
        )
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
