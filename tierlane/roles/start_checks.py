"""What a role stands on: a database at the newest revision. A database that is away does not stop a role."""

import structlog

from ledger.migration import current_revision, head_revision, is_behind
from scheduler.errors import StartError

log = structlog.get_logger("process")


async def check_database(database_url: str) -> None:
    """Refuse an old schema. PostgreSQL being away is no reason to refuse: queued work goes on without it.

    Raises StartError.
    """
    try:
        revision = await current_revision(database_url)
    except StartError as error:
        log.warning("database_away", error=str(error))
        return
    if is_behind(revision):
        raise StartError(
            f"The database is at revision {revision or 'none'}, not {head_revision()}: run `tierlane migrate`."
        )
