"""One HTTP/1.1 connection: its states, the fast path, handler tasks, and the end of the connection.

Requests are served one at a time. One that arrived whole may take the fast path (gateway/inference/fast_path.py) at once,
without a task; all others get a task for their handler. An idle connection has neither a task nor a timer. If the headers
of a request equal those of the request before it, or cached ones, they are not parsed (gateway/http/header_cache.py).
Everything else is read by gateway/http/request_reader.py, which exists only on connections that need it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from aiohttp import HttpVersion11, StreamReader
from aiohttp.http import RawRequestMessage
from aiohttp.web import RequestPayloadError
from multidict import CIMultiDictProxy

from gateway.http.body.reading import CONTINUE, BodyEnded
from gateway.http.header_cache import ApiFormat, CompleteRequest, RepeatedHead, split_request
from gateway.http.parsed_request import ParsedRequest
from gateway.http.request_reader import RequestReader, complete_body
from gateway.http.response import HttpResponse
from gateway.http.sse import EventStream, ProgressTimers
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

if TYPE_CHECKING:
    from gateway.http.server import EdgeServer

MAX_CACHE_MISSES = 16
"""After so many uncached headers in a row, the cache is not used for a connection: its client never repeats headers."""

PROBES_S = (0.04, 0.03, 0.2, 0.25)
"""Seconds before each interim response to a client that closed its sending side. If the client is gone, the first one makes it
reset the connection, and the next one after the reset has arrived detects that."""

IDLE: Final = 0
"""All requests have their responses, and nothing of the next one has arrived."""
HEAD: Final = 1
"""As IDLE, but bytes of the next request have arrived."""
REQUEST: Final = 2
"""A request is being handled."""
BLOCKED: Final = 3
"""All requests have their responses, but the client does not read them. No further request is begun."""
CLOSING: Final = 4
"""Nothing is read any more."""


class FastPathCall(Protocol):
    """One request on the fast path. It responds with `EdgeConnection.write_response`."""

    @property
    def headers(self) -> CIMultiDictProxy[str]: ...

    @property
    def known(self) -> bool:
        """Whether a caller with these headers was authenticated, so that they may be cached."""

    def start(self, raw: bytes) -> None:
        """Handle the request with this body; an error may be written before this returns."""

    def client_left(self) -> None:
        """The connection was closed before the response."""


class FastPathHandler(Protocol):
    """Creates the calls of the fast path (gateway/inference/fast_path.py), and decides which requests take it."""

    @property
    def open(self) -> bool: ...

    def format_at(self, path: str) -> ApiFormat | None: ...

    def format_of(self, message: RawRequestMessage, payload: StreamReader) -> ApiFormat | None: ...

    def suits(self, api_format: ApiFormat, raw: bytes) -> bool: ...

    def call(
        self,
        connection: "EdgeConnection",
        api_format: ApiFormat,
        headers: CIMultiDictProxy[str],
        authorization: Sequence[str],
    ) -> FastPathCall: ...


class EdgeConnection(asyncio.Protocol):
    """One connection. `transport`: None once it is closed. `idle_since`: the end of its last request (coarse clock)."""

    __slots__ = (
        "_cache_attempts",
        "_call",
        "_drained",
        "_edge",
        "_fast_path",
        "_half_closed",
        "_last",
        "_reader",
        "_remote",
        "_repeated",
        "_request",
        "_responding",
        "_share",
        "_state",
        "idle_since",
        "known_headers",
        "task",
        "transport",
        "writing_paused",
    )

    def __init__(self, edge: "EdgeServer") -> None:
        self._edge = edge
        self._fast_path = edge.fast_path
        self._state: int = IDLE
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self.idle_since = edge.now
        self._reader: RequestReader | None = None
        self._repeated: RepeatedHead | None = None  # The headers of the last request, if the fast path took it.
        self._cache_attempts = MAX_CACHE_MISSES
        self._call: FastPathCall | None = None  # The current request, on the fast path.
        self._request: ParsedRequest | None = None  # The current request, in its handler.
        self.task: asyncio.Task[None] | None = None  # Of the handler.
        self._responding = False  # The handler's response is being written.
        self._last = False  # The connection is closed after the current request.
        self._half_closed = False  # The client closed its sending side.
        self._drained: asyncio.Future[None] | None = None
        self._remote: str | None = None
        self.known_headers: Any = None  # Of the last request on the fast path, kept by that.
        self._share = edge.customer_connections.share()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection. One over the cap gets an error."""
        edge = self._edge
        self.transport = cast("asyncio.Transport", transport)
        self.idle_since = edge.now
        edge.connections.add(self)
        if len(edge.connections) > edge.max_connections:
            self.reject(RequestError(ErrorCode.NO_CAPACITY, "Too many connections are open."))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Cancel the current request, and drop all references to what references this connection."""
        self._state, self.transport = CLOSING, None
        self._edge.connections.discard(self)
        for watch in self._edge.watches:
            watch.stop(self)
        self._share.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        task, self.task, self._request = self.task, None, None
        if task is not None:
            task.cancel()
        self.resume_writing()
        call, self._call = self._call, None
        if call is not None:
            call.client_left()

    def data_received(self, data: bytes) -> None:
        """Start the fast path if the headers equal those of the last request; else read the data."""
        repeated = self._repeated
        if repeated is not None and self._state == IDLE:
            body, fast_path, api_format = repeated.body_of(data), self._fast_path, repeated.api_format
            if body is not None and fast_path is not None and fast_path.open and fast_path.suits(api_format, body):
                self._state = REQUEST
                # Assigned first, because an error may be written before `start` returns.
                self._call = call = fast_path.call(self, api_format, repeated.headers, repeated.authorization)
                call.start(body)
                return
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        state = self._state
        if state == CLOSING:
            return
        if state in (IDLE, HEAD):
            whole = split_request(data) if state == IDLE and self._cache_attempts else None
            if whole is None or not self._take_cached(whole):
                self._parse(data, whole)
            return
        reader = self._reader or self._new_reader()
        if state == BLOCKED or reader.body.is_eof():
            reader.hold(data)
        else:
            reader.read(data)

    def _take_cached(self, whole: CompleteRequest) -> bool:
        """Start the fast path without the parser, which stays between two requests. Returns whether that was possible."""
        fast_path = self._fast_path
        if fast_path is None or not fast_path.open:
            return False
        headers, api_format = self._edge.header_cache.get(whole), fast_path.format_at(whole.path)
        if headers is None or api_format is None:
            self._cache_attempts -= 1
            return False
        self._cache_attempts = MAX_CACHE_MISSES
        if not fast_path.suits(api_format, whole.body):
            return False
        repeated = RepeatedHead(whole, headers, api_format)
        self._state = REQUEST
        self._call = call = fast_path.call(self, api_format, headers, repeated.authorization)
        call.start(whole.body)
        if call.known:
            self._repeated = repeated
        return True

    def _new_reader(self) -> RequestReader:
        reader = self._reader = RequestReader(cast("asyncio.Transport", self.transport), self._edge.loop)
        return reader

    def _parse(self, data: bytes, whole: CompleteRequest | None = None) -> None:
        """Parse data between two requests, and begin the request if its headers are complete."""
        reader = self._reader or self._new_reader()
        message = reader.read(data, one_piece=whole is not None)
        if message is not None:
            if self._state == HEAD:
                self._edge.headers_watch.stop(self)
            if self._half_closed and reader.incomplete:
                reader.body.set_exception(RequestPayloadError())
            self._begin(message, reader, whole)
        elif reader.problem is not None:
            self.reject(RequestError(ErrorCode.INVALID_REQUEST, reader.problem))
        elif self._half_closed:
            self.close()
        elif not reader.at_boundary:
            self._state = HEAD
            self._edge.headers_watch.start(self, self._edge.loop.time())

    def _begin(self, message: RawRequestMessage, reader: RequestReader, whole: CompleteRequest | None) -> None:
        """Handle a request: on the fast path if that accepts it, else in a task."""
        self._state = REQUEST
        edge, fast_path, body = self._edge, self._fast_path, reader.body
        api_format = None if fast_path is None else fast_path.format_of(message, body)
        if fast_path is None or api_format is None:
            self._handle_in_task(message, body)
            return
        raw = body.read_nowait()
        if not fast_path.suits(api_format, raw):
            self._handle_in_task(message, complete_body(raw, edge.loop))
            return
        headers, at_boundary = message.headers, reader.at_boundary
        call = self._call = fast_path.call(self, api_format, headers, tuple(headers.getall("Authorization", ())))
        call.start(raw)
        if whole is not None and at_boundary and call.known:
            kept = edge.header_cache.add(whole, headers)
            self._repeated = None if kept is None else RepeatedHead(whole, kept, api_format)

    def _handle_in_task(self, message: RawRequestMessage, body: StreamReader) -> None:
        self._edge.requests_count += 1
        self._request = request = ParsedRequest(message, body, self)
        self.task = self._edge.loop.create_task(self._handle(request))

    def write_response(self, response: HttpResponse) -> None:
        """Write the response of the fast path, and continue with the data that arrived meanwhile."""
        call, self._call = self._call, None
        transport, edge = self.transport, self._edge
        if transport is None or transport.is_closing():
            return
        closing = response.close or edge.drain_state.leaving or ((self._last or self._half_closed) and self._ends())
        if edge.cors is not None and call is not None:
            response.lines += edge.cors.lines(call.headers)
        transport.write(response.head("close" if closing else "") + response.body)
        if closing:
            self.close()
        else:
            self._next()

    async def _handle(self, request: ParsedRequest) -> None:
        """Handle one request. It is cancelled if the client leaves."""
        keep_alive = False
        try:
            response = await self._edge.handle(request)
            response.close = response.close or self._ends()
            self._responding = True
            await response.write_to(request)
            if not (request.content.is_eof() or response.abort):
                await self._discard(request.content)
            keep_alive = response.keep_alive
        except ConnectionError:  # The client left.
            pass
        except Exception as error:  # noqa: BLE001  # the connection is closed after every fault
            log_fault("connection closed after a fault", error)
        finally:
            self.task = self._request = None
            self._responding = False
            if self._reader is not None:
                self._reader.drop_body()
            if keep_alive and self._state == REQUEST and not self._ends():
                self._next()
            else:
                self.close()

    async def _discard(self, body: StreamReader) -> None:
        """Read the rest of a rejected body for a limited time, so that the client gets the response and not a reset."""
        self._edge.linger_watch.start(self, self._edge.loop.time())
        try:
            while not body.is_eof():
                await body.readany()
        except RequestPayloadError as error:
            error.__traceback__ = None  # The stream keeps this error: with its frames it would form a ring.
        finally:
            self._edge.linger_watch.stop(self)

    def _ends(self) -> bool:
        """Whether the connection is closed after the current response."""
        return self._last or (self._half_closed and (self._reader is None or self._reader.at_boundary))

    def _next(self) -> None:
        """The current request has its response: wait for the next one, or continue with what has arrived of it."""
        self.idle_since = self._edge.now
        reader = self._reader
        if self.writing_paused:
            self._state = BLOCKED
        elif reader is None or reader.at_boundary:
            self._state = IDLE
        else:
            self._state = HEAD
            self._edge.loop.call_soon(self._continue)  # A call from here would be recursive.

    def _continue(self) -> None:
        """Read what was held, unless more data arrived before this call."""
        if self._state == HEAD and self._reader is not None and not self._reader.at_boundary:
            self._parse(b"")

    def eof_received(self) -> bool:
        """The client closed its sending side. Returns whether a complete request is still without a response.

        A client that closed its socket is recognised only by writing to it: see `_probe`.
        """
        reader = self._reader
        if self._state == REQUEST:
            complete = not self._responding and (reader is None or reader.body.is_eof())
        else:
            complete = self._state != CLOSING and reader is not None and reader.held_bytes > 0
        if not complete:
            self.close()
            return False
        self._half_closed = True
        self._probe_later(iter(PROBES_S))
        return True

    def _probe_later(self, waits_s: Iterator[float]) -> None:
        if (wait_s := next(waits_s, None)) is not None:
            self._edge.loop.call_later(wait_s, self._probe, waits_s)

    def _probe(self, waits_s: Iterator[float]) -> None:
        """Write an interim response (RFC 9110, 15.2) to a half-closed client. If it is gone, it resets the connection."""
        request = self._request
        if self._state != REQUEST or self._responding or (request is not None and request.version != HttpVersion11):
            return
        self.write_continue()
        self._probe_later(waits_s)

    def write_continue(self) -> None:
        """Write an interim response."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(CONTINUE)

    @property
    def remote(self) -> str | None:
        """The client's address, if the transport has one."""
        if self._remote is None and self.transport is not None:
            peer = self.transport.get_extra_info("peername")
            self._remote = str(peer[0]) if isinstance(peer, tuple) else peer
        return self._remote

    def occupy(self, customer_id: str) -> None:
        """Count this connection to the customer of its last request. Raises RequestError if that one has too many."""
        self._share.occupy(customer_id)

    @property
    def pings(self) -> ProgressTimers[EventStream]:
        """The timers of streams that need pings."""
        return self._edge.ping_watch

    def error_response(self, error: Exception, request_id: str, *, problem: bool) -> HttpResponse:
        """The response of the fast path to an unknown caller or after a fault: without limit headers."""
        if isinstance(error, RequestError):
            return self._edge.error_responses.answer(error, request_id, problem=problem)
        return self._edge.internal_error(error, request_id, problem=problem)

    def pause_writing(self) -> None:
        """Called by the transport when the client reads slower than responses are written."""
        self.writing_paused = True
        self._edge.write_watch.start(self, self._edge.loop.time())

    def resume_writing(self) -> None:
        """Called by the transport when most was sent."""
        self.writing_paused = False
        self._edge.write_watch.stop(self)
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        if self._state == BLOCKED:
            self._next()

    async def drain(self) -> None:
        """Wait while the client reads slower than responses are written. Raises ConnectionResetError if it left."""
        while self.writing_paused:
            if self._drained is None:
                self._drained = self._edge.loop.create_future()
            await self._drained
        if self.transport is None:
            raise ConnectionResetError("The client left.")

    def reject(self, error: RequestError) -> None:
        """Write an error that belongs to no request, and close."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            response = self._edge.error_responses.answer(error, new_request_id())
            transport.write(response.head("close") + response.body)
        self.close()

    def body_started(self) -> None:
        """Start the timeout of a body that a handler waits for."""
        self._edge.body_watch.start(self, self._edge.loop.time())

    def body_ended(self) -> None:
        """Stop the timeout of the body."""
        self._edge.body_watch.stop(self)

    def fail_body(self, code: ErrorCode) -> None:
        """End the body that a handler waits for with this error, unless it is complete."""
        request = self._request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(BodyEnded(code))

    @property
    def idle(self) -> bool:
        """Whether every request has its response."""
        return self._state != REQUEST

    def close_after_response(self) -> None:
        """Close: at once if idle, else after the response to the current request."""
        if self.idle:
            self.close()
        self._last = True

    def leave(self) -> None:
        """Close for the drain, without waiting for a body."""
        self.close_after_response()
        if self in self._edge.body_watch:
            self.fail_body(ErrorCode.DRAINING)

    def close(self) -> None:
        """Close once all data is sent. A client that does not read its response delays that only for a limited time."""
        self._state = CLOSING
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            self._edge.close_watch.start(self, self._edge.loop.time())

    def abort(self) -> None:
        """Close the connection to a client that does not read."""
        if self.transport is not None:
            self.transport.abort()
