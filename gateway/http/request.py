"""Reading a request: request line, body, strict JSON, memory budget, and the Prefer header.

A body is bounded in size, decoded too, and time, and not read if the request is rejected anyway. It counts against
the budget of its key, its customer and the process from the moment that its handler waits for it until it was read;
bodies that arrived whole with their headers are not counted.

JSON is decoded and checked in one step by its type, and errors name the field. msgspec rejects unknown fields, wrong
types, NaN, invalid UTF-8 and (by the types) deep nesting, but keeps the last of two equal keys, so that decoders check for
duplicates too.
"""

import json
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDictProxy

from gateway.catalog import IdentityView
from gateway.http.absent_members import without_absent_member
from gateway.http.content_coding import coding_of, decoded
from gateway.http.errors import RejectionError
from gateway.http.response import JSON
from gateway.http.validation import MAX_NAME_CHARACTERS, invalid, validation_error
from scheduler.errors import ErrorCode, RequestError

BAD_VERSION = "Only HTTP/1.0 and HTTP/1.1 are supported: end the request line with HTTP/1.1."
BAD_TARGET = "The host in the request target is not valid: send the path alone, or a valid host."


def request_line_error(message: RawRequestMessage, line: re.Match[bytes] | None = None) -> str | None:
    """Why a request is rejected by its request line; None if it is not. `line` is the result of `rtsp_line`."""
    if message.version not in (HttpVersion10, HttpVersion11):
        return BAD_VERSION
    if line is not None and line[1] == b"RTSP":
        return BAD_VERSION
    if message.path.startswith("/"):
        return None
    url = message.url
    try:  # aiohttp decodes the host when it builds its request, where an error would end the connection's task.
        if url.absolute:
            _ = (url.with_scheme("http") if url.scheme else url).host
            url.relative()
    except ValueError:
        return BAD_TARGET
    return None


def rtsp_line(message: RawRequestMessage, recent: bytes) -> re.Match[bytes] | None:
    """The request line in the received bytes, with its protocol as the first group; None if they contain no RTSP.

    The parser (llhttp) accepts RTSP too, without reporting it. Only a body that is not JSON can contain such a line.
    """
    if b" RTSP/" not in recent:
        return None
    method, path = re.escape(message.method.encode()), re.escape(message.path.encode("utf-8", "surrogateescape"))
    return re.search(rb"(?:^|\n)" + method + rb" +" + path + rb" +([A-Z]+)/", recent)


OWN_BUDGET = (
    "Too many bytes of request bodies are being sent with this key or by this customer: send fewer requests at a time."
)
GATEWAY_BUDGET = "Too many bytes of request bodies are being sent to this gateway; try again."
RETRY_MS = 1000
"""Milliseconds after which a body sent at the usual speed has been read."""


class BodyBudget:
    """Bytes of bodies that are being read by one gateway. Limits are in bytes."""

    def __init__(self, in_all: int, of_customer: int, of_key: int) -> None:
        self.in_all = 0
        self._max_in_all = in_all
        self._max = {"customer": of_customer, "key": of_key}
        self._held: dict[tuple[str, str], int] = {}  # Without zeros.

    def share(self, identity: IdentityView) -> "BodyShare":
        """The share of one body of this customer and key."""
        return BodyShare(self, (("key", identity.key_id), ("customer", identity.customer_id)))

    def take(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """Raises RequestError: 429 `rate_limit_exceeded` over an owner's limit, 503 `no_capacity` over the gateway's."""
        held = self._held
        for owner in owners:
            if held.get(owner, 0) + count > self._max[owner[0]]:
                raise RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, OWN_BUDGET, RETRY_MS)
        if self.in_all + count > self._max_in_all:
            raise RequestError(ErrorCode.NO_CAPACITY, GATEWAY_BUDGET)
        self.in_all += count
        for owner in owners:
            held[owner] = held.get(owner, 0) + count

    def give_back(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """Undo `take`."""
        self.in_all -= count
        for owner in owners:
            self._held[owner] -= count
            if not self._held[owner]:
                del self._held[owner]


class BodyShare:
    """The share of one body in the budget."""

    __slots__ = ("_budget", "_count", "_owners")

    def __init__(self, budget: BodyBudget, owners: tuple[tuple[str, str], ...]) -> None:
        self._budget = budget
        self._owners = owners
        self._count = 0

    def take(self, count: int) -> None:
        """Count more bytes. Raises RequestError as `BodyBudget.take`."""
        self._budget.take(self._owners, count)
        self._count += count

    def give_back(self) -> None:
        """Return all bytes: the body was read, or will not be read."""
        if self._count:
            self._budget.give_back(self._owners, self._count)
            self._count = 0


JSON_TYPES = (JSON, "")  # Sent by most clients, and by those without a Content-Type.
READ_BYTES = 1 << 18
"""Reading of a body pauses after twice as many bytes, so that others are served between two pauses."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyEnded(web.RequestPayloadError):
    """The rest of a body is not read, for the reason `code`."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__()
        self.code = code


class TimedConnection(Protocol):
    """A connection with a timeout for bodies, after which the body stream raises `BodyEnded`."""

    def body_started(self) -> None: ...

    def body_ended(self) -> None: ...


def check_media(headers: CIMultiDictProxy[str], length: int, max_bytes: int, also: tuple[str, ...] = ()) -> None:
    """Check a body by its headers. Raises RequestError for a wrong type, an encoding, or a length over `max_bytes`.

    `also`: the accepted types beside JSON.
    """
    media_type = headers.get("Content-Type", "")
    if media_type not in JSON_TYPES and media_type.partition(";")[0].strip().lower() not in (JSON, *also):
        raise RequestError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, param="Content-Type")
    coding_of(headers)
    if headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        message = "The only supported transfer encoding is chunked."
        raise RequestError(ErrorCode.UNSUPPORTED_ENCODING, message, "Transfer-Encoding")
    if length > max_bytes:
        raise too_large("The body", max_bytes)


async def read_body(request: web.BaseRequest, max_bytes: int, share: BodyShare | None = None) -> bytes:
    """The whole body, decoded. Raises RequestError if it is too large, too slow, truncated, or over the budget of its `share`."""
    raw, coding = await _read_raw(request, max_bytes, share), coding_of(request.headers)
    if not coding:
        return raw
    try:
        body = await decoded(raw, coding, max_bytes, _not_counted if share is None else share.take)
    finally:
        if share is not None:
            share.give_back()
    if body is None:
        raise too_large("The decoded body", max_bytes)
    return body


def _not_counted(_: int) -> None:
    """The bytes of an operator's body, which is small."""


async def _read_raw(request: web.BaseRequest, max_bytes: int, share: BodyShare | None) -> bytes:
    payload = request.content
    if payload.is_eof():
        body = payload.read_nowait()
        if len(body) > max_bytes:
            raise too_large("The body", max_bytes)
        return body
    try:
        if share is not None and request.content_length:
            share.take(request.content_length)
        async with awaited_body(request):
            return await _read_chunks(request, max_bytes, None if request.content_length else share)
    finally:
        if share is not None:
            share.give_back()


@asynccontextmanager
async def awaited_body(request: web.BaseRequest) -> AsyncIterator[Callable[[], None]]:
    """A body that is read in this block, under its timeout. Yields a function that restarts the timeout.

    Raises RequestError if the body is too slow or truncated.
    """
    connection = cast("TimedConnection", request.protocol)
    connection.body_started()

    def restart() -> None:
        connection.body_ended()
        connection.body_started()

    try:
        request.content.set_read_chunk_size(READ_BYTES)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            await request.writer.write(CONTINUE)  # Some clients (curl, with a large body) wait for it.
            request.writer.output_size = 0  # aiohttp would take the written bytes for the start of a response.
        yield restart
        return
    except web.RequestPayloadError as error:
        # The stream keeps this error. With its frames it would keep the stream and all received data, as a ring.
        error.__traceback__ = None
        code = error.code if isinstance(error, BodyEnded) else None
    finally:
        connection.body_ended()
    if code is None:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, "The body does not match its Content-Length or Transfer-Encoding."
        )
    raise RequestError(code)


async def _read_chunks(request: web.BaseRequest, max_bytes: int, share: BodyShare | None) -> bytes:
    """The body. `share` counts the chunks if the length is not known in advance."""
    chunks: list[bytes] = []
    size = 0
    while chunk := await request.content.readany():
        size += len(chunk)
        if size > max_bytes:
            raise too_large("The body", max_bytes)
        if share is not None:
            share.take(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


def too_large(what: str, max_bytes: int, param: str | None = None) -> RequestError:
    """The error for a part of a request that is larger than the model accepts; the message names the setting."""
    message = (
        f"{what} must not be larger than {max_bytes} bytes: send less, or ask the operator to raise "
        "TIERLANE_MAX_BODY_BYTES."
    )
    return RequestError(ErrorCode.REQUEST_TOO_LARGE, message, param)


T = TypeVar("T")
MOST_ABSENT = 16
"""Each costs a pass over the body."""
_FLOAT_FOR_INT = re.compile(r"Expected `int\b[^`]*`, got `float`")
_NOT_A_NUMBER = object()  # Stands for NaN and Infinity while their field is searched.


def decode(decoder: "msgspec.json.Decoder[T]", raw: bytes, absent: int = MOST_ABSENT) -> T:
    """The decoded body. Raises RequestError `invalid_request`, with `param`. Duplicate keys are not detected.

    `absent`: the most names of unknown members that may ask for nothing.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if _FLOAT_FOR_INT.search(str(error)):
            return _decode_whole_floats(decoder, raw)
        if absent and (shorter := without_absent_member(raw, str(error))) is not None:
            return decode(decoder, shorter, absent - 1)
        raise validation_error(str(error), fields_of(decoder)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _not_json(raw) from None


def fields_of(decoder: "msgspec.json.Decoder[Any]") -> tuple[str, ...]:
    """The fields of the body."""
    return tuple(getattr(decoder.type, "__struct_encode_fields__", ()))


def _decode_whole_floats(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """Decode again, with 16.0 as 16: JSON Schema, and the encoders of some languages, do not distinguish them."""
    try:
        plain = json.loads(raw, parse_float=_integer_if_whole, parse_constant=_reject_constant)
        return decoder.decode(msgspec.json.encode(plain))
    except msgspec.ValidationError as error:
        raise validation_error(str(error), fields_of(decoder)) from None
    except (ValueError, RecursionError):  # The rest of the body is not JSON.
        raise _not_json(raw) from None


def _integer_if_whole(digits: str) -> int | float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("out of range")
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _reject_constant(_: str) -> None:
    raise ValueError("NaN or Infinity")


TOO_DEEP = "The body is nested too deeply."


def check_duplicates(raw: bytes) -> None:
    """Parse a valid body again. Raises RequestError that names a duplicate key."""
    try:
        json.loads(raw, object_pairs_hook=_reject_duplicates)
    except RecursionError:  # The library that decoded it allows a few levels more.
        raise invalid(None, TOO_DEEP) from None
    except UnicodeDecodeError:  # In a field that it skipped.
        raise _not_json(raw) from None


# A body is parsed several times, each of which takes half a millisecond for an image of 2 MB. So a mark replaces each large
# string, which is checked once and not copied. A mark is a word that no client can know.
#
# The search needs no parser. A run without a quotation mark is a string, or lies between two strings. In the second case its
# mark is outside of strings, where a word is no JSON, and the caller parses the whole body.

MIN_LARGE = 32_768
"""Bytes. Strings of twice this size are always found."""

LargeStrings = Mapping[str, memoryview]
"""Mark -> the string as it is written, without its quotation marks."""

NO_STRINGS: LargeStrings = MappingProxyType({})
_WORD = f"large-{secrets.token_hex(16)}-"
_string = msgspec.json.Decoder(str)


def without_large_strings(raw: bytes) -> tuple[bytes, LargeStrings]:
    """The body with marks instead of large strings. Keys, and strings with escapes, are left in it."""
    found: dict[str, memoryview] = {}
    view, kept, at, after = memoryview(raw), list[bytes](), MIN_LARGE, 0
    while (end := raw.find(b'"', at)) >= 0:
        if end - at >= MIN_LARGE:
            begin = raw.rfind(b'"', after + 1, at) + 1
            is_value = raw[end + 1 : end + 9].lstrip()[:1] in (b",", b"}", b"]")
            if begin and is_value and raw.find(b"\\", begin, end) < 0 and _is_string(view[begin - 1 : end + 1]):
                mark = f"{_WORD}{len(found)}."
                found[mark] = view[begin:end]
                kept += [raw[after:begin], mark.encode()]
                after = end
        at = end + MIN_LARGE
    return (b"".join([*kept, raw[after:]]) if found else raw), found


def _is_string(quoted: memoryview) -> bool:
    try:
        _string.decode(quoted)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def with_large_strings(short: bytes, strings: LargeStrings) -> list[bytes | memoryview]:
    """The parts of a body with its large strings, whose marks are in their order."""
    parts: list[bytes | memoryview] = []
    for mark, text in strings.items():
        before, _, short = short.partition(mark.encode())
        parts += [before, text]
    return [*parts, short]


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raises RequestError for an empty or too large text of the field `name`."""
    if not text:
        raise invalid(name, f"`{name}` must not be empty.")
    # A character has one to four bytes, so that most texts need not be encoded.
    if len(text) * 4 > max_bytes and len(text.encode()) > max_bytes:
        raise too_large(f"`{name}`", max_bytes, name)


def texts_of(name: str, value: str | list[Any], max_bytes: int, not_text: str) -> list[str]:
    """The texts of a field with one text or several, each of at most `max_bytes`.

    Raises RequestError, with the message `not_text` for an item that is not a string.
    """
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise invalid(name, f"`{name}` must not be empty.")
    if any(not isinstance(text, str) for text in texts):
        raise invalid(name, not_text)
    for text in texts:
        check_text(name, text, max_bytes)
    return texts


def _not_json(raw: bytes) -> RequestError:
    """The error for a body that is not JSON. It names the field of a NaN, which many encoders write."""
    try:
        json.loads(raw, object_pairs_hook=_reject_not_a_number, parse_constant=lambda _: _NOT_A_NUMBER)
    except RequestError as error:
        return error
    except json.JSONDecodeError as error:
        if not raw.strip():
            return invalid(None, "The body is empty: send a JSON object.")
        fault = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        where = f"line {error.lineno}, column {error.colno}"
        return invalid(None, f"The body is not valid JSON: {fault} ({where}).")
    except (ValueError, RecursionError):
        pass
    return invalid(None, "The body is not valid JSON in UTF-8.")


def _reject_not_a_number(pairs: list[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is _NOT_A_NUMBER or (isinstance(value, list) and _NOT_A_NUMBER in value):
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"`{field}` is NaN or infinite, which JSON does not allow.")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            field = name[:MAX_NAME_CHARACTERS]
            raise invalid(field, f"The field `{field}` occurs twice.")
        seen.add(name)


class HttpRequest(Protocol):
    """A request, for authentication and its records. `remote` is the client's address.

    `auxiliary`: it runs no model, so admission will not count it, and no other limit has counted it yet.
    """

    auxiliary: bool

    @property
    def request_id(self) -> str: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...

    def occupy(self, customer_id: str) -> None:
        """Count the connection to this customer. Raises RequestError 429 `too_many_connections`."""


HEADER = "Prefer"
RESPOND_ASYNC = "respond-async"
APPLIED = ("Preference-Applied", RESPOND_ASYNC)


def prefers_async(headers: CIMultiDictProxy[str]) -> bool:
    """Whether the client prefers a job to waiting for the result (`Prefer: respond-async`, RFC 7240).

    Of duplicate preferences the first counts, according to the RFC. This preference has no value. Parameters and other
    preferences (`wait=10`) are ignored.
    """
    for line in headers.getall(HEADER, ()):
        for preference in line.split(","):
            name, equals, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == RESPOND_ASYNC:
                return not equals or value.strip() in ("", '""')
    return False
