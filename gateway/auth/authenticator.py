"""Authentication: from the Authorization header to an identity, with the throttle for failed attempts.

A token is exactly one short Bearer header, and goes no further than `identify`. API keys go to the catalog, JWTs to the
verifier where one is configured.
"""

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from multidict import CIMultiDictProxy

from gateway.auth.throttle import AuthThrottle
from gateway.catalog import IdentityView
from gateway.http.errors import RejectionError
from scheduler.errors import ErrorCode, RequestError
from scheduler.tasks import Loop

MAX_TOKEN_BYTES = 256
_SCHEME = "bearer "


def bearer_token(values: Sequence[str], longest_jwt: int = 0) -> str:
    """The token of a request with these Authorization headers.

    `longest_jwt`: bytes that a token may have which looks like a JWT; 0: none is taken.
    Raises RequestError: `invalid_request` for more than one header, `invalid_api_key` for none, another scheme, or
    a token that cannot be one of ours.
    """
    if len(values) != 1:
        raise _missing() if not values else _twice()
    value = values[0]
    if value[:7].lower() != _SCHEME:
        raise _missing()
    token = value[7:].strip(" ")
    if not token or not token.isascii() or not token.isprintable():
        raise RequestError(ErrorCode.INVALID_API_KEY)
    if len(token) > MAX_TOKEN_BYTES and not (len(token) <= longest_jwt and looks_like_jwt(token)):
        raise RequestError(ErrorCode.INVALID_API_KEY)
    return token


def looks_like_jwt(token: str) -> bool:
    """Whether it has the three parts of a signed JWT; an API key has no dot."""
    return token.count(".") == 2


def check_service_token(values: Sequence[str], expected: str) -> None:
    """Raises RequestError unless the request carries the service token; takes the same time for every wrong one."""
    presented = bearer_token(values)
    if not expected or not hmac.compare_digest(presented.encode(), expected.encode()):
        raise RequestError(ErrorCode.INVALID_API_KEY, "The service token is missing or not valid.")


def _missing() -> RequestError:
    return RequestError(ErrorCode.INVALID_API_KEY, "Send the API key as `Authorization: Bearer <key>`.")


def _twice() -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, "Send exactly one Authorization header.", "Authorization")


KEY_PREFIX = "tl_"


class KeyLookup(Protocol):
    """The catalog, as far as API keys go."""

    def identify(self, presented: str, wall_now: float) -> IdentityView: ...


class TokenLookup(Protocol):
    """A second way in, for tokens that others issue."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def problem(self) -> str | None: ...

    def identify(self, presented: str, wall_now: float) -> IdentityView: ...

    def loops(self) -> Mapping[str, Loop]: ...


class Identities:
    """Both ways in. Without `tokens` there is only the first."""

    def __init__(self, keys: KeyLookup, tokens: TokenLookup | None = None) -> None:
        self._keys = keys
        self._tokens = tokens

    @property
    def longest_jwt(self) -> int:
        """Bytes that a JWT may have; 0 where none is taken."""
        return self._tokens.max_bytes if self._tokens else 0

    @property
    def problem(self) -> str | None:
        """Why some tokens cannot be checked as they should, for health; None while all is well."""
        return self._tokens.problem if self._tokens else None

    def identify(self, presented: str, wall_now: float) -> IdentityView:
        """The identity. Raises RequestError as the catalog and the verifier do; `wall_now` is seconds since the epoch."""
        if self._tokens is None or presented.startswith(KEY_PREFIX) or not looks_like_jwt(presented):
            return self._keys.identify(presented, wall_now)
        return self._tokens.identify(presented, wall_now)

    def loops(self) -> Mapping[str, Loop]:
        """What has to run beside the requests, by name."""
        return self._tokens.loops() if self._tokens else {}


TOO_MANY = "Too many requests from this address had no valid key; try again later, or with a valid one."


class AuthRequest(Protocol):
    """A request, as far as it says who sends it; `remote` is the client's address."""

    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...


class Authenticator:
    """Asks who it is, at every door. `wall` is seconds since the epoch; without `throttle` nobody has to wait."""

    def __init__(
        self, identities: Identities, throttle: AuthThrottle | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self._identities = identities
        self._throttle = throttle
        self._wall = wall
        self._longest_jwt = identities.longest_jwt

    def identify(self, asking: AuthRequest) -> IdentityView:
        """Who sends this request. Raises RequestError as `recognise` does."""
        return self.recognise(asking.headers.getall("Authorization", []), asking)

    def recognise(self, authorization: Sequence[str], asking: AuthRequest) -> IdentityView:
        """Who shows these values of the Authorization header. Raises RequestError.

        401 `invalid_api_key`, after too many of these from one address 429 `rate_limit_exceeded`; and what the catalog
        says: 403 `account_suspended`, 503 `catalog_unavailable`.
        """
        try:
            token = bearer_token(authorization, self._longest_jwt)
            return self._identities.identify(token, self._wall())
        except RequestError as error:
            raise self._failure(error, asking) from error

    def check_service(self, asking: AuthRequest, expected: str) -> None:
        """Raises RequestError unless the request carries the service token, as often as `identify` allows."""
        try:
            check_service_token(asking.headers.getall("Authorization", []), expected)
        except RequestError as error:
            raise self._failure(error, asking) from error

    def _failure(self, error: RequestError, asking: AuthRequest) -> RequestError:
        """The error to answer: nobody is told to wait for what is no fault of theirs, such as a catalog that is away."""
        if self._throttle is None or error.code is not ErrorCode.INVALID_API_KEY:
            return error
        wait_ms = self._throttle.failed(asking.remote)
        return error if wait_ms is None else RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, TOO_MANY, wait_ms)
