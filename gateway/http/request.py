"""Reading a request: body, strict JSON, memory budget, Prefer header, and the view of a request that the pipeline uses.

A body is bounded in size and time, never decompressed, and never read when the request is rejected anyway. It counts
against the budget of its key, its customer and the process from the moment that its handler waits for it until it was
read; bodies that came whole with their headers are not counted.

JSON is decoded and checked in one step by its type, and the error names the field. msgspec refuses unknown fields,
wrong types, NaN, bad UTF-8 and (by the types) deep nesting, but keeps the last of two equal keys: decoders check for
duplicates besides. `Prefer: respond-async` (RFC 7240) is a wish and never an error.
"""

import json
import math
import re
from typing import Any, Protocol, TypeVar, cast

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from gateway.catalog import IdentityView
from gateway.http.errors import RejectionError
from gateway.http.response import JSON
from scheduler.errors import ErrorCode, RequestError

OWN = (
    "Too many bytes of request bodies are being sent with this key or by this customer: send fewer requests at a time."
)
ALL = "Too many bytes of request bodies are being sent to this gateway; try again."
RETRY_MS = 1000
"""Milliseconds after which a body that is sent at the usual speed has made room."""


class BodyBudget:
    """The counts of one gateway. Limits are in bytes."""

    def __init__(self, in_all: int, of_customer: int, of_key: int) -> None:
        self.in_all = 0
        self._most_in_all = in_all
        self._most = {"customer": of_customer, "key": of_key}
        self._held: dict[tuple[str, str], int] = {}  # Only what is not zero.

    def share(self, identity: IdentityView) -> "BodyShare":
        """For one body of this customer and key."""
        return BodyShare(self, (("key", identity.key_id), ("customer", identity.customer_id)))

    def take(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """Raises RequestError: 429 `rate_limit_exceeded` for the owners' own limits, 503 `no_capacity` for that of all."""
        held = self._held
        for owner in owners:
            if held.get(owner, 0) + count > self._most[owner[0]]:
                raise RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, OWN, RETRY_MS)
        if self.in_all + count > self._most_in_all:
            raise RequestError(ErrorCode.NO_CAPACITY, ALL)
        self.in_all += count
        for owner in owners:
            held[owner] = held.get(owner, 0) + count

    def give_back(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """What `take` counted."""
        self.in_all -= count
        for owner in owners:
            left = self._held[owner] - count
            if left:
                self._held[owner] = left
            else:
                del self._held[owner]


class BodyShare:
    """What one body takes of the budget."""

    __slots__ = ("_budget", "_count", "_owners")

    def __init__(self, budget: BodyBudget, owners: tuple[tuple[str, str], ...]) -> None:
        self._budget = budget
        self._owners = owners
        self._count = 0

    def take(self, count: int) -> None:
        """So many bytes more. Raises RequestError as `BodyBudget.take`."""
        self._budget.take(self._owners, count)
        self._count += count

    def give_back(self) -> None:
        """The body was read, or is not read any more."""
        if self._count:
            self._budget.give_back(self._owners, self._count)
            self._count = 0


JSON_TYPES = (JSON, "")  # What most clients send, and those that do not say.


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyEnded(web.RequestPayloadError):
    """The rest of a body is not waited for any more; `code` is why."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__()
        self.code = code


class TimedConnection(Protocol):
    """A connection that gives the rest of a body only so long; then the body stream raises `BodyEnded`."""

    def body_started(self) -> None: ...

    def body_ended(self) -> None: ...


def check_media(headers: CIMultiDictProxy[str], length: int, max_bytes: int) -> None:
    """Judge a body by its headers. Raises RequestError for a wrong type, an encoding, or a length over `max_bytes`."""
    media_type = headers.get("Content-Type", "")
    if media_type not in JSON_TYPES and media_type.partition(";")[0].strip().lower() != JSON:
        message = "Content-Type must be application/json."
        raise RequestError(ErrorCode.UNSUPPORTED_ENCODING, message, "Content-Type")
    if "Content-Encoding" in headers and not _is_identity(headers.getall("Content-Encoding")):
        raise RequestError(ErrorCode.UNSUPPORTED_ENCODING, param="Content-Encoding")
    if headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        message = "No transfer encoding but chunked is accepted."
        raise RequestError(ErrorCode.UNSUPPORTED_ENCODING, message, "Transfer-Encoding")
    if length > max_bytes:
        raise _too_large(max_bytes)


def _is_identity(encodings: list[str]) -> bool:
    return all(encoding.strip().lower() == "identity" for encoding in encodings)


async def read_body(request: web.BaseRequest, max_bytes: int, share: BodyShare | None = None) -> bytes:
    """The whole body. Raises RequestError when it is too large, too slow, cut wrongly, or more than its `share` has room for."""
    payload = request.content
    if payload.is_eof():
        body = payload.read_nowait()
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    connection = cast("TimedConnection", request.protocol)
    connection.body_started()
    try:
        if share is not None and request.content_length:
            share.take(request.content_length)
        await _continue(request)
        return await _read_on(request, max_bytes, None if request.content_length else share)
    except web.RequestPayloadError as error:
        # The stream keeps this error. With its frames it would keep the stream and all that was read, as a ring.
        error.__traceback__ = None
        code = error.code if isinstance(error, BodyEnded) else None
    finally:
        connection.body_ended()
        if share is not None:
            share.give_back()
    if code is None:
        raise RequestError(ErrorCode.INVALID_REQUEST, "The body does not end as its headers say.")
    raise RequestError(code)


async def _read_on(request: web.BaseRequest, max_bytes: int, share: BodyShare | None) -> bytes:
    """`share` takes what comes, where the length is not known before."""
    chunks: list[bytes] = []
    size = 0
    while chunk := await request.content.readany():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if share is not None:
            share.take(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


async def _continue(request: web.BaseRequest) -> None:
    """Tell a client that waits for it (curl, with a large body) to send on."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # aiohttp takes written bytes for an answer that has begun.


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(ErrorCode.REQUEST_TOO_LARGE, f"The body must not be larger than {max_bytes} bytes.")


MAX_NAME_CHARACTERS = 64  # Of a parameter's name, and of a field's name that is told back.

T = TypeVar("T")
_NOT_WHOLE = re.compile(r"Expected `int\b[^`]*`, got `float`")
_NO_NUMBER = object()  # Stands for NaN and Infinity while their field is looked for.


def decode(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """What a body says. Raises RequestError `invalid_request`, with `param`; duplicate keys are not looked for."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if _NOT_WHOLE.search(str(error)):
            return _decode_whole(decoder, raw)
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _not_json(raw) from None


def _decode_whole(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """Once more, with 16.0 read as 16: they are one number to JSON Schema, and to the encoders of some languages."""
    try:
        plain = json.loads(raw, parse_float=_whole, parse_constant=_refuse_constant)
        return decoder.decode(msgspec.json.encode(plain))
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (ValueError, RecursionError):  # What follows is not JSON at all.
        raise _not_json(raw) from None


def _whole(digits: str) -> int | float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("out of range")
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _refuse_constant(_: str) -> None:
    raise ValueError("NaN or Infinity")


def check_duplicates(raw: bytes) -> None:
    """Parse a body that is valid once more. Raises RequestError that names a key that is there twice."""
    json.loads(raw, object_pairs_hook=_refuse_duplicates)


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raises RequestError for an input that is empty or too large."""
    if not text:
        raise invalid(name, f"`{name}` must not be empty.")
    # A character has one to four bytes, so most texts need no encoding to be judged.
    if len(text) * 4 > max_bytes and len(text.encode()) > max_bytes:
        message = f"`{name}` must not be larger than {max_bytes} bytes."
        raise RequestError(ErrorCode.REQUEST_TOO_LARGE, message, name)


def invalid(param: str | None, message: str) -> RequestError:
    """The error for a body that is not valid."""
    return RequestError(ErrorCode.INVALID_REQUEST, message, param)


def _not_json(raw: bytes) -> RequestError:
    """The error for a body that is not JSON: with its field where a NaN is at fault, since many encoders write it."""
    try:
        json.loads(raw, object_pairs_hook=_refuse_no_number, parse_constant=lambda _: _NO_NUMBER)
    except RequestError as error:
        return error
    except (ValueError, RecursionError):
        pass
    return invalid(None, "The body is not valid JSON in UTF-8.")


def _refuse_no_number(pairs: list[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is _NO_NUMBER or (isinstance(value, list) and _NO_NUMBER in value):
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"`{field}` is NaN or infinite, which JSON has no word for.")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"The field `{field}` is there twice.")
        seen.add(name)


def _validation_error(text: str) -> RequestError:
    """Turn msgspec's sentence (`... - at `$.parameters[...]``, or a field's name) into ours with the field named."""
    reason, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".").split("[")[0] or None
    if "unknown field `" in reason:
        field = reason.split("`")[1][:MAX_NAME_CHARACTERS]
        return invalid(field, f"The field `{field}` is not known.")
    if "missing required field `" in reason:
        field = reason.split("`")[1]
        return invalid(field, f"The field `{field}` is required.")
    if "matching regex" in reason:  # All patterns are of this kind.
        return invalid(field, f"`{field}` must have no control characters.")
    return invalid(field, reason + (f" in `{field}`." if field else "."))


class HttpRequest(Protocol):
    """A request, as far as its handler looks at it; `remote` is the client's address."""

    @property
    def request_id(self) -> str: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...


HEADER = "Prefer"
RESPOND_ASYNC = "respond-async"
APPLIED = ("Preference-Applied", RESPOND_ASYNC)


def prefers_async(headers: CIMultiDictProxy[str]) -> bool:
    """Whether the client would rather be told where the answer will be than wait for it.

    Of preferences that are there twice the first counts, as the RFC has it. This one has no value; parameters and other
    preferences (`wait=10`) are passed over.
    """
    for line in headers.getall(HEADER, ()):
        for preference in line.split(","):
            name, equals, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == RESPOND_ASYNC:
                return not equals or value.strip() in ("", '""')
    return False
