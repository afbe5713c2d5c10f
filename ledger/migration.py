"""Migration to the newest revision, by alembic without its ini file. Each migration runs the .sql file beside it."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from ledger.postgres import AWAY, SCHEME, connect, place_of
from ledger.revision import CONNECT_TIMEOUT_S, head_revision, is_unknown, migrations_dir
from ledger.schema import metadata
from scheduler.errors import StartError

_REVISION = re.compile(r"[0-9]{4}_(pre|post)_\w+")
"""A `pre` migration runs before the new code starts, and old code can run after it."""

_DAY_PARTITION = re.compile(r"requests_(default|\d{8})")


def is_compared(name: str | None, kind: str, _parents: Any) -> bool:
    """Whether alembic compares this object: not partitions, which a function creates, nor tables of other applications."""
    if kind != "table":
        return True
    return name in metadata.tables and _DAY_PARTITION.fullmatch(name or "") is None


async def upgrade_to_head(database_url: str) -> str:
    """Run the missing migrations in one transaction, and return the revision. A second migrator waits for the first.

    A database that a newer version has migrated is not changed, if this version can run on it. Raises StartError with one sentence, without the password.
    """
    async with _connected(database_url) as connection:
        revision = await connection.run_sync(_revision)
        await connection.rollback()  # The migration starts its own transaction.
        if is_unknown(revision):
            # Only the newest revision is known. An earlier `post` migration required that old versions, such as this, were gone.
            named = _REVISION.fullmatch(revision)
            if named is not None and named[1] == "pre":
                return revision
            why = "which requires a newer version of Tierlane: install that version again."
            if named is None:
                why = "which is not a revision of Tierlane: is this the database of another application?"
            raise StartError(f"The database is at revision {revision}, {why}")
        try:
            await connection.run_sync(_upgrade)
        except CommandError as error:  # A newer version may have migrated it meanwhile.
            raise StartError(f"Cannot migrate PostgreSQL at {place_of(database_url)}: {_sentence(error)}") from error
    return head_revision()


@asynccontextmanager
async def _connected(database_url: str) -> AsyncIterator[AsyncConnection]:
    # Connected as the roles do and not by SQLAlchemy, so that parameters of the URL (for TLS) have the same meaning.
    open_ = partial(
        connect, database_url, name="tierlane-migrate", connect_timeout_s=CONNECT_TIMEOUT_S, statement_timeout_ms=0
    )
    try:
        engine = create_async_engine(f"{SCHEME}://", poolclass=NullPool, async_creator=open_)
        try:
            async with engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()
    except (*AWAY, SQLAlchemyError) as error:
        raise StartError(f"Cannot migrate PostgreSQL at {place_of(database_url)}: {_sentence(error)}") from error


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
    """The first line of the driver's error, without SQLAlchemy's."""
    cause = getattr(error, "orig", None) or error
    cause = cause.__cause__ or cause
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__


def run_sql_beside(migration: str) -> None:
    """Run the statements of the .sql file with the name of `migration`, which is the caller's `__file__`."""
    connection = op.get_bind()
    for statement in split_statements(Path(migration).with_suffix(".sql").read_text(encoding="utf-8")):
        # The driver prepares statements, and only one at a time can be prepared.
        connection.exec_driver_sql(statement)


def split_statements(sql: str) -> Iterator[str]:
    """Split at lines that end with `;` outside of a `$$` body. Comments belong to the following statement."""
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
