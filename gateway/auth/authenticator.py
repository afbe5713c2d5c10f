"""The one place where a request's header becomes an identity, and where those who fail too often are told to wait."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from multidict import CIMultiDictProxy

from gateway.auth.throttle import AuthThrottle
from gateway.bearer import bearer_token, check_service_token
from gateway.catalog import IdentityView
from gateway.http.errors import Refusal
from gateway.identities import Identities
from scheduler.errors import ErrorCode, RequestError

TOO_MANY = "Too many requests from this address had no valid key; try again later, or with a valid one."


class Asking(Protocol):
    """A request, as far as it says who sends it; `remote` is the client's address."""

    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...


class Doorman:
    """Asks who it is, at every door. `wall` is seconds since the epoch; without `throttle` nobody has to wait."""

    def __init__(
        self, identities: Identities, throttle: AuthThrottle | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self._identities = identities
        self._throttle = throttle
        self._wall = wall
        self._longest_jwt = identities.longest_jwt

    def identify(self, asking: Asking) -> IdentityView:
        """Who sends this request. Raises RequestError as `recognise` does."""
        return self.recognise(asking.headers.getall("Authorization", []), asking)

    def recognise(self, authorization: Sequence[str], asking: Asking) -> IdentityView:
        """Who shows these values of the Authorization header. Raises RequestError.

        401 `invalid_api_key`, after too many of these from one address 429 `rate_limit_exceeded`; and what the catalog
        says: 403 `account_suspended`, 503 `catalog_unavailable`.
        """
        try:
            token = bearer_token(authorization, self._longest_jwt)
            return self._identities.identify(token, self._wall())
        except RequestError as error:
            raise self._failure(error, asking) from error

    def check_service(self, asking: Asking, expected: str) -> None:
        """Raises RequestError unless the request carries the service token, as often as `identify` allows."""
        try:
            check_service_token(asking.headers.getall("Authorization", []), expected)
        except RequestError as error:
            raise self._failure(error, asking) from error

    def _failure(self, error: RequestError, asking: Asking) -> RequestError:
        """The error to answer: nobody is told to wait for what is no fault of theirs, such as a catalog that is away."""
        if self._throttle is None or error.code is not ErrorCode.INVALID_API_KEY:
            return error
        wait_ms = self._throttle.failed(asking.remote)
        return error if wait_ms is None else Refusal(ErrorCode.RATE_LIMIT_EXCEEDED, TOO_MANY, wait_ms)
