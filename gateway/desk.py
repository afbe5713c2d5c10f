"""PostgreSQL for the actions of the page for on-call: one short connection each, and its faults as an answer.

An action that PostgreSQL cannot record is not done: what is changed and the record of it are one transaction.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from asyncpg import DataError, IntegrityConstraintViolationError

from gateway.http.errors import Refusal
from ledger.operating import as_actor
from ledger.postgres import AWAY, Connection, reason
from scheduler.errors import ErrorCode, RequestError

Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""One connection to PostgreSQL. Raises what is in `ledger.postgres.AWAY`."""

NOTHING = "so nothing was changed"
_BAD_VALUE = (DataError, IntegrityConstraintViolationError)
"""What is the fault of what was sent, and says nothing against PostgreSQL."""

UNKNOWN = "and whether anything was changed is not known: look again"


class Desk:
    """Without `connect` there is no PostgreSQL here, and nothing can be done."""

    def __init__(self, connect: Connect | None) -> None:
        self._connect = connect

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[Connection]:
        """For a look. Raises RequestError `catalog_unavailable`, and `invalid_request` for what PostgreSQL does not take."""
        try:
            async with self._connection() as connection:
                yield connection
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _away(error, "so this is not known") from error

    @asynccontextmanager
    async def acting(self, actor: str) -> AsyncIterator[Connection]:
        """For a change by `actor`, committed at the end of the block. Raises RequestError as `looking` does."""
        outcome = NOTHING
        try:
            async with self._connection() as connection, as_actor(connection, actor):
                yield connection
                outcome = UNKNOWN  # From here on it is being committed.
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _away(error, outcome) from error

    def _connection(self) -> AbstractAsyncContextManager[Connection]:
        if self._connect is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, f"This gateway has no PostgreSQL, {NOTHING}.")
        return self._connect()


def _bad_value(error: BaseException) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"PostgreSQL does not take this ({reason(error)}), {NOTHING}.")


def _away(error: BaseException, outcome: str) -> Refusal:
    return Refusal(ErrorCode.CATALOG_UNAVAILABLE, f"PostgreSQL cannot be used ({reason(error)}), {outcome}.")
