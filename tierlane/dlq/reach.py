"""How `tierlane dlq` reaches PostgreSQL: as every verb does, under a name of its own."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from ledger.postgres import Connection
from tierlane import connect as reach
from tierlane.connect import UsageError, reachable, run
from tierlane.connect import VerbError as DlqError

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

__all__ = ["DlqError", "UsageError", "database", "reachable", "run"]


def database(settings: "Settings") -> AbstractAsyncContextManager[Connection]:
    """One connection. Raises DlqError where PostgreSQL does not serve it."""
    return reach.database(settings, "tierlane-dlq")
