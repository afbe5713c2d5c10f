"""The revision of a database, and the revisions of this installation, without alembic.

Every role checks the revision when it starts, and loading alembic and SQLAlchemy would take as long as everything else
together. The file names of the migrations are the revisions, in their order.
"""

import re
from pathlib import Path
from typing import TypeGuard

import asyncpg

from ledger.postgres import AWAY, SharedSession, closing, connect, place_of, reason
from scheduler.errors import StartError

CONNECT_TIMEOUT_S = 10
_REVISION = re.compile(r"\d{4}_\w+")


def migrations_dir() -> Path:
    """The directory of the migrations: in the package in a wheel, at the top of a checkout. Raises StartError."""
    here = Path(__file__).resolve().parent
    for directory in (here / "migrations", here.parent / "migrations"):
        if (directory / "env.py").is_file():
            return directory
    raise StartError("The migrations are missing from this installation; install Tierlane again.")


def known_revisions() -> list[str]:
    """All revisions of this installation, the oldest first; at least one. Raises StartError."""
    files = (path.stem for path in (migrations_dir() / "versions").glob("*.py"))
    found = sorted(stem for stem in files if _REVISION.fullmatch(stem))
    if not found:
        raise StartError("There are no migrations in this installation; install Tierlane again.")
    return found


def head_revision() -> str:
    """The newest revision of this installation. Raises StartError."""
    return known_revisions()[-1]


async def current_revision(database_url: str) -> str | None:
    """The revision of the database; None before the first migration.

    Raises StartError with one sentence, without the password, and SharedSession.
    """
    try:
        connection = await connect(
            database_url,
            name="tierlane-start",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_ms=1000 * CONNECT_TIMEOUT_S,
        )
        async with closing(connection):
            found = await connection.fetchval("SELECT version_num FROM alembic_version")
    except SharedSession:
        raise
    except asyncpg.UndefinedTableError:
        return None
    except (*AWAY, ValueError) as error:
        raise StartError(
            f"Cannot read the revision of PostgreSQL at {place_of(database_url)}: {reason(error)}"
        ) from error
    return None if found is None else str(found)


def is_behind(revision: str | None) -> bool:
    """Whether a database at `revision` lacks a migration of this installation.

    An unknown revision is that of a newer version: in a rolling upgrade the migration comes first.
    """
    return revision is None or (not is_unknown(revision) and revision != head_revision())


def is_unknown(revision: str | None) -> TypeGuard[str]:
    return revision is not None and revision not in known_revisions()
