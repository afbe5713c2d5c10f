"""One inference call over gRPC: its metadata, its deadline, its stream, and the status of its errors.

The stages are those of every request (gateway/inference/handler.py). The deadline of the call shortens that of the request,
here and in Redis. A call that its client cancelled is cancelled there as well.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, cast
from urllib.parse import unquote

import grpc
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.api.format import InferenceRequest
from gateway.api.inference import ApiFormat
from gateway.grpc.messages import messages_of
from gateway.http.body.budget import BodyShare
from gateway.http.response import HttpResponse
from gateway.http.router import ConnectionShare
from gateway.http.sse import EventStream, Result
from gateway.http.validation import invalid
from gateway.inference.call import Terms
from gateway.inference.entry import Entry
from gateway.inference.handler import infer
from gateway.inference.idempotency import idempotency_key
from gateway.inference.pipeline import drop_cycles
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.request_id import new_request_id

STATUS: dict[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The status of an error, by its HTTP status."""

ERROR_CODE = "error-code"
API_KEY = "x-api-key"
_READ = frozenset(
    {"authorization", "idempotency-key", "traceparent", "tracestate", "x-forwarded-for", "x-stainless-retry-count"}
)
"""The metadata that is read, under the names of the HTTP headers."""

_NOT_TRAILERS = frozenset({"www-authenticate", "server-timing"})
MAX_BUFFERED_BYTES = 64 << 10
"""Of one stream, not yet taken by the library; more increments are dropped, and the stored reply fills the gap."""

SLOW_S = 1.0
"""Seconds after which the caller of a message that arrives slowly is identified again."""

Context = grpc.aio.ServicerContext
Trailers = tuple[tuple[str, str], ...]


class GrpcRequest:
    """The metadata of a call, for authentication and its records. `arrived` is monotonic seconds."""

    def __init__(self, context: "Context[Any, Any]", share: ConnectionShare, *, auxiliary: bool = False) -> None:
        self.auxiliary = auxiliary
        self.occupy = share.occupy  # A gRPC call counts as a connection.
        self.request_id = new_request_id()
        self.arrived = time.monotonic()
        self.remote = address_of(context.peer())
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in context.invocation_metadata() or ():
            if name in _READ and isinstance(value, str):
                headers.add(name, value)
            elif name == API_KEY and isinstance(value, str):
                headers.add("authorization", f"Bearer {value}")
        self.headers = CIMultiDictProxy(headers)


@lru_cache(1024)  # A connection has many calls.
def address_of(peer: str) -> str | None:
    """The address in the library's name of a peer, such as ipv4:127.0.0.1:50051 or ipv6:%5B::1%5D:50051."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        return str(ip_address(host))
    except ValueError:
        return None


class GrpcCall:
    """One inference call, or one request of a stream. `error` is set once it was rejected.

    Its message is in memory until the call ends, and counts against the budget of bodies until `close`. `time_left`: of the
    call's deadline in seconds, None without one. Raises RequestError if the caller is unknown.
    """

    def __init__(
        self, entry: Entry, api_format: ApiFormat, request: GrpcRequest, time_left: Callable[[], float | None]
    ) -> None:
        self._entry = entry
        self._request = request
        self._time_left = time_left
        self._call = entry.call(api_format, request)
        self._share: BodyShare | None = None
        self.error: RequestError | None = None

    async def answered(self, read: Callable[[], Awaitable[Any]]) -> HttpResponse:
        """The response, or that of the error. `read` returns the message. Raises CancelledError if the client left."""
        entry, call = self._entry, self._call
        try:
            entry.decode(call, await self._receive(read))
            left_s = self._time_left()
            if left_s is not None:  # The deadline of the call shortens that of its requests.
                at_most_ms = max(1, int((entry.own.clock() - call.started + left_s) * 1000))
                call.terms = Terms(at_most_ms=at_most_ms)
            return await infer(entry, call, new_stream=MessageStream)
        except asyncio.CancelledError:
            self._left()
            raise
        except Exception as error:  # noqa: BLE001  # every error has a response, with the limit headers
            self.error = _without_traceback(error)
            return entry.reject(call, error)

    async def _receive(self, read: Callable[[], Awaitable[Any]]) -> bytes:
        """Read the Idempotency-Key and the message. Raises RequestError if either is not acceptable, the budget of bodies is
        used, or the gateway is draining.
        """
        entry, call = self._entry, self._call
        call.key = idempotency_key(call.headers)
        if entry.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)
        raw = await read()
        call.started = entry.own.clock()  # The time of a slow upload does not count against the deadline.
        if call.started - self._request.arrived > SLOW_S:  # The key may have been revoked or moved.
            call.identity = entry.authenticator.identify(self._request)
        if not isinstance(raw, bytes):
            raise invalid(None, "The call has no message.")
        self._share = entry.bodies.share(call.identity)
        self._share.take(len(raw))
        return raw

    def _left(self) -> None:
        """The client cancelled the call, or its deadline passed: end the pending requests and record it."""
        call, left_s = self._call, self._time_left()
        if left_s is None or left_s > 0:
            self._entry.left(call)
            return
        code, pipeline = ErrorCode.DEADLINE_EXCEEDED, call.pipeline or self._entry.own
        if (first := call.pending) is not None:
            pipeline.fail_list(first.together or (first,), code)
            drop_cycles(first)
        pipeline.events.failed(
            call.api_format.endpoint, call.request_id, call.identity, call.pending, RequestError(code)
        )

    def close(self) -> None:
        """Return the bytes of the message to the budget. To be called when the call has ended, in any way."""
        if self._share is not None:
            self._share.give_back()

    @property
    def decoded(self) -> InferenceRequest | None:
        """The request; None if it could not be decoded."""
        return getattr(self._call, "body", None)


def _without_traceback(error: Exception) -> RequestError:
    """A copy of the error: the frames of its traceback reference the call, which would be a reference cycle."""
    if not isinstance(error, RequestError):
        return RequestError(ErrorCode.INTERNAL_ERROR)
    return RequestError(error.code, error.message, error.param)


def trailers(response: HttpResponse, error: RequestError | None = None) -> Trailers:
    """The trailing metadata of a response: request id, rate limits, and for an error its code and waits."""
    lines = cast("list[tuple[str, str]]", [line.split(": ", 1) for line in response.lines.split("\r\n") if line])
    found = [
        (known, value) for name, value in (*response.headers, *lines) if (known := name.lower()) not in _NOT_TRAILERS
    ]
    return tuple(found) if error is None else (*found, (ERROR_CODE, error.code.value))


def fail(context: "Context[Any, Any]", error: RequestError, response: HttpResponse) -> None:
    """Set the status of this error, with which the call ends; the library then sends no message.

    `context.abort` would keep its exception, and with it all frames of the call, in a reference cycle.
    """
    context.set_code(STATUS[HTTP[error.code].status])
    context.set_details(error.message)
    context.set_trailing_metadata(trailers(response, error))


class MessageStream(EventStream):
    """The responses of one request, written by the coroutine of the call while it waits for the outcome.

    `write_timeout_s`: how long the client may not read.
    """

    __slots__ = ("_deliver", "_messages", "_size", "_wake", "_write_timeout_s")

    def __init__(self, play: Callable[[EventStream], Awaitable[None]]) -> None:
        super().__init__(play)
        self._messages: list[bytes] = []
        self._size = 0
        self._wake = asyncio.Event()
        self._deliver: Callable[[bytes], Awaitable[None]] | None = None
        self._write_timeout_s = 0.0

    async def run(self, write: Callable[[bytes], Awaitable[None]], write_timeout_s: float) -> None:
        """Write all messages. Raises ConnectionResetError if the client does not read them."""
        self._deliver, self._write_timeout_s = write, write_timeout_s
        await self._play(self)
        await self._flush()

    @property
    def full(self) -> bool:
        """Whether the client reads slower than messages are written."""
        return self._size > MAX_BUFFERED_BYTES

    def start(self) -> None:
        """The library writes the headers."""
        self.begun = True

    def send(self, events: bytes) -> None:
        """Add the messages of complete frames."""
        messages = messages_of(events)
        self._messages += messages
        self._size += sum(map(len, messages))
        self._wake.set()

    def end(self) -> None:
        """Nothing: other requests may follow."""

    async def outcome(self, future: "asyncio.Future[Result]") -> Result:
        """Write messages until the request has an outcome."""
        future.add_done_callback(lambda _: self._wake.set())
        while not future.done():
            await self._wake.wait()
            self._wake.clear()
            await self._flush()
        return future.result()

    async def _flush(self) -> None:
        while self._messages and self._deliver is not None:
            message = self._messages.pop(0)
            self._size -= len(message)
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await self._deliver(message)
            except TimeoutError:
                raise ConnectionResetError("The client does not read.") from None
