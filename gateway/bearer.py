"""The token of a request: exactly one Authorization header, Bearer, short; what it says goes no further than `identify`."""

import hmac
from collections.abc import Sequence

from scheduler.errors import ErrorCode, RequestError

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
