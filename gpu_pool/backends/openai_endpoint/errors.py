"""What an endpoint's refusal means, and for whom: the caller, the one who configured it, or nobody but the moment. Pure.

Nothing of what the server wrote is passed on: it may name paths, keys and other people's texts.
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
"""However long a server asks to be left alone."""

_BUSY = frozenset({429, 503, 529})
_OURS = frozenset({401, 403, 404, 405, 407})
_ONCE_MORE = frozenset({408, 425})
_TOO_LONG = re.compile(r"context.?length|context.?size|too long|maximum.{1,40}tokens|exceeds?.{1,40}(context|tokens)")


@dataclass(frozen=True, slots=True)
class Busy:
    """The server takes nothing for now; `wait_s` as it asks, bounded, or None where it says nothing."""

    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The endpoint will refuse everybody: a wrong key, a model that is gone. Ours to mend, no caller's fault."""

    reason: str
    key: bool = False
    """It does not take our key, which no caller's text can bring about."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The server failed over these items, or was lost with them: they may have been run. Counted as an attempt."""

    reason: str
    by_input: bool = False
    """It answered that it failed: where others go well, this input breaks it."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """The server has seen nothing of it, or said nothing of it: it may be sent again."""

    reason: str


End = ItemResult | Busy | Broken | Lost | Unreached
"""What became of one item."""


def read_refusal(
    status: int, headers: Mapping[str, str], body: bytes, sent: Collection[str], now_s: float
) -> ItemResult | Busy | Broken | Lost:
    """The meaning of an answer other than 200 to a call with the parameters `sent`; `now_s` is UNIX time."""
    if status in _BUSY:
        return Busy(asked_wait_s(headers, now_s))
    if status in _OURS or status < 400:
        return Broken(f"The endpoint answers {status}.", key=status in (401, 407))
    if status in _ONCE_MORE:
        return Lost(f"The endpoint answers {status}.")
    if status >= 500:
        return Lost(f"The endpoint answers {status}.", by_input=status == 500)
    if status == 413:
        return ItemResult("The input is larger than the model takes.", 0, ErrorCode.REQUEST_TOO_LARGE)
    return ItemResult(_sentence(body, sent), 0, ErrorCode.INVALID_REQUEST)


def asked_wait_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Seconds for which the server wants to be left alone, within bounds; None where it does not say."""
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
    return value if value >= 0 else None  # NaN is neither.


def _sentence(body: bytes, sent: Collection[str]) -> str:
    named, text = _complaint(body)
    if name := next((each for each in named if each in PARAMETERS), None):
        return f"parameters.{name} is not accepted by the model."
    if _TOO_LONG.search(text):
        return "The input and the tokens that are asked for are more than the model can hold."
    said = next((name for name in sorted(sent) if re.search(rf"\b{re.escape(name)}\b", text)), None)
    return f"parameters.{said} is not accepted by the model." if said else "The model does not accept this request."


def _complaint(body: bytes) -> tuple[Sequence[str], str]:
    """(fields that the server names, what it says in lower case), in each of the forms that servers have."""
    try:
        document: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return (), ""
    if not isinstance(document, dict):
        return (), ""
    error = document.get("error", document)
    error = error if isinstance(error, dict) else {"message": error}
    named = [error.get("param"), *_places(document.get("detail"))]
    text = f"{error.get('message') or ''} {error.get('code') or ''}".lower()
    return [each for each in named if isinstance(each, str)], text


def _places(detail: Any) -> list[Any]:
    """FastAPI's: [{"loc": ["body", "temperature"], ...}]."""
    rows = [row.get("loc") for row in detail if isinstance(row, dict)] if isinstance(detail, list) else []
    return [each for loc in rows if isinstance(loc, list) for each in loc]
