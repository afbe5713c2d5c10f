"""The meaning of an endpoint's error: a client error, a wrong configuration, or a temporary failure. No I/O.

Text of the server is never passed on: it may contain paths, keys and other clients' inputs.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause
from gpu_pool.backends.openai_endpoint.messages import PARAMETERS
from scheduler.context_length import read_overflow
from scheduler.errors import ErrorCode

NamesSent = Callable[[], Collection[str]]
"""The names of the request by which a server may name its fault, read when they are needed."""

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 30.0
"""Limits for the pause that a server asks for."""

KEY_STATUSES = frozenset({401, 403, 407})
NO_KEY = EndpointFault("The endpoint rejects the key: set TIERLANE_ENDPOINT_API_KEY.", FaultCause.KEY_REJECTED)
LOADING = EndpointFault("The endpoint is loading its model.", FaultCause.LOADING)
_BUSY = frozenset({429, 503, 529})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407})
_RETRYABLE = frozenset({408, 425})
_NO_MODEL = re.compile(
    r"unknown model|model_not_found|pinned to|model .{0,128}(?:not found|does not exist|not available)"
)
"""Servers that reject the name of a model with 400: `transformers serve`, infinity, Triton. A check confirms it."""
_KINDS = (
    (("ratelimit", "overloaded", "toomany", "unavailable", "exhausted"), 429),
    (("authentication", "permission", "unauthorized"), 401),
    (
        (
            "invalidrequest",
            "badrequest",
            "invalidargument",
            "validation",
            "contextlength",
            "exceedcontextsize",
            "unprocessable",
        ),
        400,
    ),
)
"""Words of an error's type -> the status that it would have."""
_NOT_SUPPORTED = re.compile(r"not support|unsupported|not implemented")
_NOT_ACCEPTED, _REFUSED = "parameters.{} is not accepted by the model.", "The model does not accept this request."
_EVERYWHERE = frozenset({"messages", "prompt"})
"""Of every request: they are the fault if nothing else is."""
_WORDS = tuple(
    (re.compile(words), names)
    for words, names in (
        (r"image|vision|mmproj|multi-?modal", ("image_url",)),
        (r"audio|multi-?modal", ("input_audio", "audio")),
        (r"\bfile", ("file",)),
        (r"tool|function", ("tools", "functions", "tool_choice")),
        (r"schema|grammar|json|structured|guided", ("response_format",)),
        (r"logprob", ("logprobs", "top_logprobs")),
        (r"choice|\bn\b|number of (?:completions|sequences)", ("n", "best_of")),
        (r"content.{0,12}type|content.{0,3}part", ("file", "input_audio", "image_url")),
    )
)
"""Words of a server's message -> the names of a request that they are about."""


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
    """It rejects the key, which the inputs of one customer may cause at most."""
    certain: bool = False
    """No client's input can cause it: it is loading."""


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
    status: int, headers: Mapping[str, str], body: bytes, sent: NamesSent, now_s: float
) -> ItemResult | Busy | Broken | Lost:
    """The meaning of a response other than 200 to a call; `now_s` is UNIX time."""
    if status in _BUSY:
        return Broken(LOADING, certain=True) if is_loading(status, body) else Busy(retry_after_s(headers, now_s))
    named, text = _error_fields(body)
    if status in _MISCONFIGURED or status < 400 or (status in (400, 422) and _NO_MODEL.search(text)):
        key = status in (401, 407)
        return Broken(NO_KEY if key else EndpointFault(f"The endpoint answers {status}.", FaultCause.STATUS), key=key)
    # First: vLLM 0.32 names max_tokens in such an error, and some servers answer 500.
    if overflow := read_overflow(text):
        return ItemResult(overflow.sentence(), 0, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    fails = status >= 500 or status in _RETRYABLE
    fault = None
    # llama.cpp answers 500 to an image or a sound that its model does not support.
    if not fails or _NOT_SUPPORTED.search(text):
        # The first name of the request that the server gives as the fault, exactly or in its words.
        names = sorted(sent(), key=lambda name: (name in _EVERYWHERE, name))
        mentioned = [each for each in names if each != "text" and re.search(rf"\b{re.escape(each)}\b", text)]
        given = (
            *(each for each in named if each in PARAMETERS or each in names),
            *(each for each in mentioned if each not in _EVERYWHERE),
            *(each for words, of in _WORDS if words.search(text) for each in of if each in names),
            *mentioned,
        )
        fault = next(iter(given), None)
    if fails and fault is None:
        return Lost(EndpointFault(f"The endpoint answers {status}.", FaultCause.STATUS), by_input=status == 500)
    if status == 413:
        return ItemResult("The input is larger than the model takes.", 0, ErrorCode.REQUEST_TOO_LARGE)
    return ItemResult(_NOT_ACCEPTED.format(fault) if fault else _REFUSED, 0, ErrorCode.INVALID_REQUEST)


def is_loading(status: int, body: bytes) -> bool:
    """Whether the server has started and its model has not, as llama.cpp says it."""
    return status == 503 and "loading model" in _error_fields(body)[1]


def read_reported(document: Mapping[str, Any], sent: NamesSent, now_s: float) -> ItemResult | Busy | Broken | Lost:
    """The meaning of an error that the server reports in a response of status 200: that of the status which it names.

    Without one it is the failure of the server, unless the error's type names the client's.
    """
    error = document.get("error") or document
    fields: Mapping[str, Any] = error if isinstance(error, dict) else {"message": error}
    status = 0
    for name in ("code", "status", "status_code", "http_status_code"):
        try:
            code = int(fields.get(name) or 0)
        except (TypeError, ValueError, OverflowError):
            continue
        if 400 <= code < 600:
            status = code
            break
    if not status:
        named = (fields.get(name) for name in ("type", "code", "error_type", "status"))
        kind = " ".join(each.lower() for each in named if isinstance(each, str)).replace("_", "").replace(" ", "")
        status = next((status for words, status in _KINDS if any(word in kind for word in words)), 500)
    return read_refusal(status, {}, msgspec.json.encode(document), sent, now_s)


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


def names_field(body: bytes, name: str) -> bool:
    """Whether an error is about this field of the body."""
    named, text = _error_fields(body)
    return name in named or name in text


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
    detail = document.get("detail")
    # FastAPI's format: [{"loc": ["body", "temperature"], ...}].
    rows = [row.get("loc") for row in detail if isinstance(row, dict)] if isinstance(detail, list) else []
    named = [error.get("param"), *(each for loc in rows if isinstance(loc, list) for each in loc)]
    text = f"{error.get('message') or detail or ''} {error.get('code') or ''}".lower()
    return [each for each in named if isinstance(each, str)], text
