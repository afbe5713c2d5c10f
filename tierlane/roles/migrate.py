"""`tierlane migrate`: the database to the newest revision, or one line that says why not."""

import asyncio
import sys

from ledger.migration import upgrade_to_head
from ledger.revision import head_revision
from scheduler.errors import StartError


def run(database_url: str) -> int:
    """Migrate and return the exit code: 0 done (or nothing to do, as for a database of a newer version), 1 failed, with one
    line on stderr.
    """
    if not database_url:
        sys.stderr.write("No database: set TIERLANE_DATABASE_URL.\n")
        return 1
    try:
        revision = asyncio.run(upgrade_to_head(database_url))
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if revision == head_revision():
        sys.stdout.write(f"The database is at revision {revision}.\n")
    else:
        newer = f"which is newer than this version's {head_revision()}"
        sys.stdout.write(
            f"The database is at revision {revision}, {newer}: nothing to do, this version can run on it.\n"
        )
    return 0
