"""Migration to the newest revision: alembic without its ini file.

A migration runs the .sql file beside it and stays one line.
"""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from ledger.postgres import SCHEME, asyncpg_dsn, place_of
from ledger.postgres import Connection as Raw
from ledger.revision import CONNECT_TIMEOUT_S, head_revision, is_unknown, migrations_dir
from ledger.schema import metadata
from scheduler.errors import StartError

MIGRATION_LOCK = 7_436_001
"""Key of the advisory lock that one migrator at a time holds."""

_OURS = re.compile(r"[0-9]{4}_(pre|post)_\w+")
"""`pre`: runs before the new code, and old code bears it."""

_DAY_PARTITION = re.compile(r"requests_(default|\d{8})")


def is_ours(name: str | None, kind: str, _parents: Any) -> bool:
    """Whether alembic should compare this: day partitions are made by a function, and guests' tables are theirs."""
    if kind != "table":
        return True
    return name in metadata.tables and _DAY_PARTITION.fullmatch(name or "") is None


async def upgrade_to_head(database_url: str) -> str:
    """Run what is missing, in one transaction; a second migrator waits and then finds nothing to do.

    A database that a newer version has migrated is left as it is, where this version can run on it. Returns the revision that
    it is at. `database_url` begins with postgresql+asyncpg://. Raises StartError with one sentence that holds no password.
    """
    async with _connected(database_url) as connection:
        revision = await connection.run_sync(_revision)
        await connection.rollback()  # The migration begins a transaction of its own.
        if is_unknown(revision):
            return _bearable(revision)
        try:
            await connection.run_sync(_upgrade)
        except CommandError as error:  # A newer version may have been at it since.
            raise StartError(f"Cannot migrate PostgreSQL at {place_of(database_url)}: {_sentence(error)}") from error
    return head_revision()


def _bearable(revision: str) -> str:
    """A revision that is not known here, where this version can run on it. Raises StartError where it cannot.

    Only the newest one can be seen: a `post` migration below it was for versions that were gone by then, this one among them.
    """
    named = _OURS.fullmatch(revision)
    if named is None:
        why = "which no version of Tierlane has made: is this another application's database?"
    elif named[1] == "post":
        why = "which only newer versions can run on: install that version again."
    else:
        return revision
    raise StartError(f"The database is at revision {revision}, {why}")


@asynccontextmanager
async def _connected(database_url: str) -> AsyncIterator[AsyncConnection]:
    try:
        # Not by SQLAlchemy's reading of the URL: parameters mean the same here as for the roles, those of TLS among them.
        engine = create_async_engine(f"{SCHEME}://", poolclass=NullPool, async_creator=lambda: _raw(database_url))
        try:
            async with engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()
    except (OSError, TimeoutError, SQLAlchemyError) as error:
        raise StartError(f"Cannot migrate PostgreSQL at {place_of(database_url)}: {_sentence(error)}") from error


async def _raw(database_url: str) -> Raw:
    return await asyncpg.connect(asyncpg_dsn(database_url), timeout=CONNECT_TIMEOUT_S)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _upgrade(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _sentence(error: BaseException) -> str:
    """The first line of what the driver said, without SQLAlchemy's wrapping."""
    cause = getattr(error, "orig", None) or error
    cause = cause.__cause__ or cause
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__


def run_sql_beside(migration: str) -> None:
    """Run every statement of the file with the migration's name and the ending .sql, in order.

    `migration` is the caller's `__file__`.
    """
    connection = op.get_bind()
    for statement in split_statements(Path(migration).with_suffix(".sql").read_text(encoding="utf-8")):
        # The driver prepares what it runs, and only one statement at a time can be prepared.
        connection.exec_driver_sql(statement)


def split_statements(sql: str) -> Iterator[str]:
    """Split at lines that end in `;` outside of a `$$` body; comments stay with the statement below them."""
    lines: list[str] = []
    in_body = False
    for line in sql.splitlines():
        lines.append(line)
        in_body ^= line.count("$$") % 2 == 1
        if line.rstrip().endswith(";") and not in_body and not line.lstrip().startswith("--"):
            yield "\n".join(lines)
            lines = []
    if any(line.strip() and not line.lstrip().startswith("--") for line in lines):
        raise ValueError("the last SQL statement does not end with a semicolon")
