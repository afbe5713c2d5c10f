"""Authentication: from the Authorization header to an identity, with a limit on failed attempts.

API keys are checked by the catalog, JWTs by a verifier if one is configured. The token is not passed on to any other
module.
"""

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gateway.auth.client_address import X_FORWARDED_FOR, Network, client_address
from gateway.auth.throttle import AuthThrottle
from gateway.http.errors import RejectionError
from gateway.http.request import HttpRequest
from ledger.catalog.api_key import KeyParts, parse
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError
from scheduler.tasks import Loop

MAX_KEY_BYTES = 256
KEY_PREFIX = "tl_"
KEY_HEADER = "x-api-key"
"""Has the key alone, in requests of clients of Anthropic's API."""
NO_KEY = "Send the API key as `Authorization: Bearer <key>`."
NO_TOKEN = "Send the service token as `Authorization: Bearer <token>`."  # noqa: S105 - no password
TOO_MANY = "Too many requests from this address had no valid key. Try again later, or with a valid key."


def bearer_token(values: Sequence[str], max_jwt_bytes: int = 0) -> str:
    """The token in the values of the Authorization header. `max_jwt_bytes`: 0 if JWTs are not accepted.

    Raises RequestError: `invalid_request` for more than one header; `invalid_api_key` for none, another scheme, or a token
    that is neither a possible key nor a possible JWT.
    """
    if len(values) > 1:
        raise RequestError(ErrorCode.INVALID_REQUEST, "Send exactly one Authorization header.", "Authorization")
    if not values or values[0][:7].lower() != "bearer ":
        raise RequestError(ErrorCode.INVALID_API_KEY, NO_KEY)
    token = values[0][7:].strip(" ")
    if not token or not token.isascii() or not token.isprintable():
        raise RequestError(ErrorCode.INVALID_API_KEY)
    if len(token) > MAX_KEY_BYTES and not (len(token) <= max_jwt_bytes and looks_like_jwt(token)):
        raise RequestError(ErrorCode.INVALID_API_KEY)
    return token


def looks_like_jwt(token: str) -> bool:
    """Whether a token has three parts. An API key has no dot."""
    return token.count(".") == 2


class TokenLookup(Protocol):
    """Authentication by JWT (gateway/auth/jwt_customers.py), which is imported only if it is configured."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def problem(self) -> str | None: ...

    def identify(self, presented: str, wall_now: float) -> Identity: ...

    def loops(self) -> Mapping[str, Loop]: ...


class Authenticator:
    """Authenticates all requests. `wall` is seconds since the epoch. Without `throttle` failures are not limited.

    `charge`: called once for each auxiliary request of a known caller, and for each stored response that is sent again; raises
    RequestError if the caller sends too many.
    """

    def __init__(
        self,
        catalog: Catalog,
        tokens: TokenLookup | None = None,
        throttle: AuthThrottle | None = None,
        wall: Callable[[], float] = time.time,
        charge: Callable[[Identity], None] = lambda _: None,
        *,
        trusted_proxies: Sequence[Network] = (),
    ) -> None:
        self._catalog = catalog
        self._tokens = tokens
        self._throttle = throttle
        self._wall = wall
        self.charge = charge
        self._trusted_proxies = trusted_proxies
        self._max_jwt_bytes = tokens.max_bytes if tokens else 0

    @property
    def problem(self) -> str | None:
        """Why JWTs may not be verifiable, for health; None while there is no problem."""
        return self._tokens.problem if self._tokens else None

    def loops(self) -> Mapping[str, Loop]:
        """Background loops, by name."""
        return self._tokens.loops() if self._tokens else {}

    def identify(self, request: HttpRequest, key_header: str = "") -> Identity:
        """The identity of the caller. Raises RequestError as `authenticate` does.

        `key_header`: a header that may have the key alone, read if there is no Authorization.
        """
        values: Sequence[str] = request.headers.getall("Authorization", [])
        if key_header and not values:
            keys = request.headers.getall(key_header, [])
            if len(keys) > 1:
                raise RequestError(ErrorCode.INVALID_REQUEST, f"Send exactly one {key_header} header.", key_header)
            values = [f"Bearer {key}" for key in keys]
        return self.authenticate(values, request)

    def authenticate(self, authorization: Sequence[str], request: HttpRequest) -> Identity:
        """The identity for these values of the Authorization header.

        Raises RequestError: 401 `invalid_api_key`, or 429 `rate_limit_exceeded` after too many of them from one address; 403
        `account_suspended` and 503 `catalog_unavailable` from the catalog or the verifier; 429 `too_many_connections`;
        what `charge` raises.
        """
        try:
            token = bearer_token(authorization, self._max_jwt_bytes)
            if self._tokens is None or token.startswith(KEY_PREFIX) or not looks_like_jwt(token):
                identity = self._catalog.identify(token, self._wall())
            else:
                identity = self._tokens.identify(token, self._wall())
        except RequestError as error:
            raise self._failure(error, request) from error
        request.occupy(identity.customer_id)
        if request.auxiliary:
            request.auxiliary = False  # After a slow body the caller is identified again.
            self.charge(identity)
        return identity

    def parsed_key(self, authorization: Sequence[str]) -> KeyParts | None:
        """The API key in these values, which have been authenticated; None for a JWT."""
        return parse(bearer_token(authorization, self._max_jwt_bytes))

    def authenticate_key(self, key: KeyParts, request: HttpRequest) -> Identity:
        """The identity of an API key that `parsed_key` returned: as `authenticate`, for a request that is not auxiliary."""
        try:
            identity = self._catalog.identify(key, self._wall())
        except RequestError as error:
            raise self._failure(error, request) from error
        request.occupy(identity.customer_id)
        return identity

    def check_service(self, request: HttpRequest, expected: str) -> None:
        """Raises RequestError as `authenticate` does unless the request has the service token `expected`."""
        try:
            token = bearer_token(request.headers.getall("Authorization", []))
        except RequestError as error:
            missing = error.code is ErrorCode.INVALID_API_KEY
            raise self._failure(RequestError(error.code, NO_TOKEN) if missing else error, request) from error
        # The comparison takes the same time for every wrong token.
        if not expected or not hmac.compare_digest(token.encode(), expected.encode()):
            wrong = RequestError(ErrorCode.INVALID_API_KEY, "The service token is missing or not valid.")
            raise self._failure(wrong, request)

    def _failure(self, error: RequestError, request: HttpRequest) -> RequestError:
        """The error to return. Only invalid keys count as failures, not an unavailable catalog."""
        if self._throttle is None or error.code is not ErrorCode.INVALID_API_KEY:
            return error
        forwarded = request.headers.getall(X_FORWARDED_FOR, [])
        wait_ms = self._throttle.failed(client_address(request.remote, forwarded, self._trusted_proxies))
        return error if wait_ms is None else RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, TOO_MANY, wait_ms)
