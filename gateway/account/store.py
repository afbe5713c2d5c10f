"""PostgreSQL for the account of customers: one connection, on which one short operation runs at a time."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.http.errors import RejectionError
from gateway.http.validation import invalid
from ledger.catalog.webhook_secret import TooManySecrets
from ledger.jobs import JobSession, StoreUnavailable
from ledger.keys import KeyRejected, KeysNotManaged, TooManyKeys
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RequestError

T = TypeVar("T")
NOT_NOW = "Jobs and keys cannot be read or changed right now; try again soon."


class AccountStore:
    """`database_url`: None if the gateway has no PostgreSQL."""

    def __init__(self, database_url: str | None) -> None:
        self._session = None if database_url is None else JobSession(database_url, "tierlane-account")

    async def run(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        """Run an operation, which must be repeatable.

        Raises RequestError: `catalog_unavailable`, and for what an operation on keys raises.
        """
        if self._session is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW)
        try:
            return await self._session.run(operation)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        except KeysNotManaged as error:
            raise RequestError(ErrorCode.PERMISSION_DENIED, str(error)) from None
        except TooManyKeys as error:
            raise RequestError(ErrorCode.QUOTA_EXCEEDED, str(error)) from None
        except TooManySecrets as error:
            raise RejectionError(ErrorCode.QUOTA_EXCEEDED, str(error), error.wait_ms) from None
        except KeyRejected as error:
            raise invalid(error.param, str(error)) from None

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()
