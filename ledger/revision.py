"""At which revision a database is, and which one this installation carries: read without alembic.

Every role asks at its start, and alembic with SQLAlchemy would take as long to load as all else together. It needs no more
than the file names, which are the revisions, in the order in which they run.
"""

import re
from pathlib import Path
from typing import TypeGuard

import asyncpg

from ledger.postgres import asyncpg_dsn, place_of, reason
from scheduler.errors import StartError

CONNECT_TIMEOUT_S = 10
_REVISION = re.compile(r"\d{4}_\w+")


def migrations_dir() -> Path:
    """Where the migrations are: inside the package in a wheel, at the top of a checkout. Raises StartError."""
    here = Path(__file__).resolve().parent
    for directory in (here / "migrations", here.parent / "migrations"):
        if (directory / "env.py").is_file():
            return directory
    raise StartError("The migrations are missing from this installation; install Tierlane again.")


def known_revisions() -> list[str]:
    """All revisions that this installation carries, the oldest first; at least one. Raises StartError."""
    files = (path.stem for path in (migrations_dir() / "versions").glob("*.py"))
    found = sorted(stem for stem in files if _REVISION.fullmatch(stem))
    if not found:
        raise StartError("There are no migrations in this installation; install Tierlane again.")
    return found


def head_revision() -> str:
    """The newest revision that this installation carries. Raises StartError."""
    return known_revisions()[-1]


async def current_revision(database_url: str) -> str | None:
    """The revision that the database is at; None before the first migration.

    `database_url` begins with postgresql+asyncpg://. Raises StartError with one sentence that holds no password.
    """
    try:
        connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=CONNECT_TIMEOUT_S)
        try:
            found = await connection.fetchval("SELECT version_num FROM alembic_version", timeout=CONNECT_TIMEOUT_S)
        except asyncpg.UndefinedTableError:
            return None
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        raise StartError(
            f"Cannot read the revision of PostgreSQL at {place_of(database_url)}: {reason(error)}"
        ) from error
    return None if found is None else str(found)


def is_behind(revision: str | None) -> bool:
    """Whether a database at `revision` lacks a migration of this installation.

    A revision that is not known here was written by a newer version, whose migrations old code must bear: a rolling
    upgrade migrates first.
    """
    return revision is None or (not is_unknown(revision) and revision != head_revision())


def is_unknown(revision: str | None) -> TypeGuard[str]:
    """Whether this installation does not have it."""
    return revision is not None and revision not in known_revisions()


async def is_current(database_url: str) -> bool:
    """Whether the database is at this installation's newest revision. Raises StartError where it cannot be asked."""
    return await current_revision(database_url) == head_revision()
