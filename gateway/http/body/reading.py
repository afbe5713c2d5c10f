"""Reading a request body: bounded in size, decoded too, and in time, and not read if the request is rejected anyway."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11
from aiohttp.web import RequestPayloadError
from multidict import CIMultiDictProxy

from gateway.http.body.budget import BodyShare
from gateway.http.body.content_coding import coding_of, decoded
from gateway.http.response import JSON
from scheduler.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from gateway.http.parsed_request import ParsedRequest

JSON_TYPES = (JSON, "")  # Sent by most clients, and by those without a Content-Type.
READ_BYTES = 1 << 18
"""Reading of a body pauses after twice as many bytes, so that others are served between two pauses."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyEnded(RequestPayloadError):
    """The rest of a body is not read, for the reason `code`."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__()
        self.code = code


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
    check_length(length, max_bytes)


def check_length(length: int, max_bytes: int) -> None:
    """Raises RequestError for a body of `length` bytes if that is over `max_bytes`."""
    if length > max_bytes:
        raise too_large("The body", max_bytes)


async def read_body(request: "ParsedRequest", max_bytes: int, share: BodyShare | None = None) -> bytes:
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


async def _read_raw(request: "ParsedRequest", max_bytes: int, share: BodyShare | None) -> bytes:
    payload = request.content
    if payload.is_eof():
        body = payload.read_nowait()
        if len(body) > max_bytes:
            raise too_large("The body", max_bytes)
        return body
    chunks: list[bytes] = []
    size = 0
    try:
        if share is not None and request.content_length:
            share.take(request.content_length)
        async with awaited_body(request):
            while chunk := await payload.readany():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large("The body", max_bytes)
                if share is not None and not request.content_length:
                    share.take(len(chunk))
                chunks.append(chunk)
        return b"".join(chunks)
    finally:
        if share is not None:
            share.give_back()


@asynccontextmanager
async def awaited_body(request: "ParsedRequest") -> AsyncIterator[Callable[[], None]]:
    """A body that is read in this block, under its timeout. Yields a function that restarts the timeout.

    Raises RequestError if the body is too slow or truncated.
    """
    connection = request.protocol
    connection.body_started()

    def restart() -> None:
        connection.body_ended()
        connection.body_started()

    try:
        request.content.set_read_chunk_size(READ_BYTES)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            connection.write_continue()  # Some clients (curl, with a large body) wait for it.
        yield restart
        return
    except RequestPayloadError as error:
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


def too_large(what: str, max_bytes: int, param: str | None = None) -> RequestError:
    """The error for a part of a request that is larger than the model accepts; the message names the setting."""
    message = (
        f"{what} must not be larger than {max_bytes} bytes: send less, or ask the operator to raise "
        "TIERLANE_MAX_BODY_BYTES."
    )
    return RequestError(ErrorCode.REQUEST_TOO_LARGE, message, param)
