"""The meaning of an endpoint's error: a client error, a wrong configuration, or a temporary failure. No I/O.

Text of the server is never passed on: it may contain paths, keys and other clients' inputs.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.messages import PARAMETERS
from scheduler.errors import ErrorCode

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 30.0
"""Limits for the pause that a server asks for."""

_BUSY = frozenset({429, 503, 529})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407})
_RETRYABLE = frozenset({408, 425})
_TOO_LONG = re.compile(r"context.?length|context.?size|too long|maximum.{1,40}tokens|exceeds?.{1,40}(context|tokens)")


@dataclass(frozen=True, slots=True)
class Busy:
    """The server accepts nothing for now; `wait_s` as it asks, within limits, or None."""

    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The endpoint will reject every request (wrong key, missing model); the operator must fix it, no client is at
    fault.
    """

    reason: str
    key: bool = False
    """It rejects the key, which no client's input can cause."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The server failed on these items, or the connection was lost: they may have run. Counts as an attempt."""

    reason: str
    by_input: bool = False
    """The server reported the failure: if other items succeed, this input causes it."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """The server did not receive it, or sent no response: it may be sent again."""

    reason: str


CallResult = ItemResult | Busy | Broken | Lost | Unreached
"""The result of one item."""


def read_refusal(
    status: int, headers: Mapping[str, str], body: bytes, sent: Collection[str], now_s: float
) -> ItemResult | Busy | Broken | Lost:
    """The meaning of a response other than 200 to a call with the parameters `sent`; `now_s` is UNIX time."""
    if status in _BUSY:
        return Busy(retry_after_s(headers, now_s))
    if status in _MISCONFIGURED or status < 400:
        return Broken(f"The endpoint answers {status}.", key=status in (401, 407))
    if status in _RETRYABLE:
        return Lost(f"The endpoint answers {status}.")
    if status >= 500:
        return Lost(f"The endpoint answers {status}.", by_input=status == 500)
    if status == 413:
        return ItemResult("The input is larger than the model takes.", 0, ErrorCode.REQUEST_TOO_LARGE)
    return ItemResult(_sentence(body, sent), 0, ErrorCode.INVALID_REQUEST)


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """The seconds for which the server asks to be left alone, within limits; None if it gives no time."""
    wait_s = _number(headers.get("retry-after-ms"), 1000) or _number(headers.get("Retry-After"), 1)
    if wait_s is None:
        try:
            wait_s = parsedate_to_datetime(headers.get("Retry-After", "")).timestamp() - now_s
        except (ValueError, TypeError, OverflowError):
            return None
    return min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, wait_s))


def _number(text: str | None, divisor: float) -> float | None:
    try:
        value = float(text or "") / divisor
    except ValueError:
        return None
    return value if value >= 0 else None  # Excludes NaN too.


def _sentence(body: bytes, sent: Collection[str]) -> str:
    named, text = _error_fields(body)
    if name := next((each for each in named if each in PARAMETERS or each in sent), None):
        return f"parameters.{name} is not accepted by the model."
    if _TOO_LONG.search(text):
        return "The input and max_tokens together exceed the model's context."
    mentioned = next((name for name in sorted(sent) if re.search(rf"\b{re.escape(name)}\b", text)), None)
    return (
        f"parameters.{mentioned} is not accepted by the model."
        if mentioned
        else "The model does not accept this request."
    )


def _error_fields(body: bytes) -> tuple[Sequence[str], str]:
    """(fields that the server names, its message in lower case), in all known formats."""
    try:
        document: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return (), ""
    if not isinstance(document, dict):
        return (), ""
    error = document.get("error", document)
    error = error if isinstance(error, dict) else {"message": error}
    named = [error.get("param"), *_fastapi_fields(document.get("detail"))]
    text = f"{error.get('message') or ''} {error.get('code') or ''}".lower()
    return [each for each in named if isinstance(each, str)], text


def _fastapi_fields(detail: Any) -> list[Any]:
    """FastAPI's format: [{"loc": ["body", "temperature"], ...}]."""
    rows = [row.get("loc") for row in detail if isinstance(row, dict)] if isinstance(detail, list) else []
    return [each for loc in rows if isinstance(loc, list) for each in loc]
