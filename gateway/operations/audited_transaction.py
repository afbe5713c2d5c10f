"""The audited transaction of a dashboard action: the change and its record are one PostgreSQL transaction.

It runs on a connection of its own.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from asyncpg import DataError, IntegrityConstraintViolationError

from gateway.http.errors import RejectionError
from ledger.admin.transaction import as_actor
from ledger.postgres import AWAY, Connection, reason
from scheduler.errors import ErrorCode, RequestError

Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""One connection to PostgreSQL. Raises the exceptions of `ledger.postgres.AWAY`."""

_BAD_VALUE = (DataError, IntegrityConstraintViolationError)
"""Errors that the values of the request caused."""

NOTHING_CHANGED = "so nothing was changed"
CHANGE_UNKNOWN = "and it is not known whether anything was changed: reload to check"


class AuditedTransaction:
    """Transactions in PostgreSQL, with the actor of the change. `connect`: None if the gateway has no PostgreSQL."""

    def __init__(self, connect: Connect | None) -> None:
        self._connect = connect

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A connection for reading. Raises RequestError `catalog_unavailable`, or `invalid_request` for a rejected value."""
        try:
            async with self._connection() as connection:
                yield connection
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _unavailable(error, "so this cannot be read") from error

    @asynccontextmanager
    async def change(self, actor: str) -> AsyncIterator[Connection]:
        """A transaction by `actor`, committed at the end of the block. Raises RequestError as `read` does."""
        outcome = NOTHING_CHANGED
        try:
            async with self._connection() as connection, as_actor(connection, actor):
                yield connection
                outcome = CHANGE_UNKNOWN  # The commit follows.
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _unavailable(error, outcome) from error

    def _connection(self) -> AbstractAsyncContextManager[Connection]:
        if self._connect is None:
            raise RequestError(
                ErrorCode.CATALOG_UNAVAILABLE, f"This gateway does not use PostgreSQL, {NOTHING_CHANGED}."
            )
        return self._connect()


def _bad_value(error: BaseException) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"PostgreSQL rejected a value ({reason(error)}), {NOTHING_CHANGED}.")


def _unavailable(error: BaseException, outcome: str) -> RejectionError:
    return RejectionError(ErrorCode.CATALOG_UNAVAILABLE, f"PostgreSQL is not available ({reason(error)}), {outcome}.")
