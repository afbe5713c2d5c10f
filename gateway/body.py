"""Reading a request's body: bounded in size and time, never decompressed, never asked for when it is refused anyway."""

from typing import Protocol, cast

from aiohttp import web
from multidict import CIMultiDictProxy

from gateway.body_budget import BodyShare
from gateway.http.response import JSON
from scheduler.errors import ErrorCode, RequestError

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
