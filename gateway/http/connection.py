"""One HTTP connection: aiohttp's protocol with timeouts, the fast path, and checks of the request line.

A request that arrived whole, on an idle connection, may take the fast path (gateway/inference/fast_path.py): aiohttp parses
it, but its task for the connection is not woken, which costs as much as the rest of the gateway's work for a request.
If its headers equal cached ones, it is not parsed either (gateway/http/header_cache.py). Request lines that aiohttp's
parser accepts and this server rejects (other protocols or versions, invalid hosts) are detected here.

This module is the only one that uses private members of aiohttp's RequestHandler.
tests/unit/test_gateway_http.py fails if a new version of aiohttp lacks one of them.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog
from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from multidict import CIMultiDictProxy

from gateway.http.body.reading import CONTINUE, BodyEnded
from gateway.http.header_cache import CompleteRequest, is_complete, is_header_block, split_request
from gateway.http.problem_details import wants_problem
from gateway.http.request_line import request_line_error, rtsp_line
from gateway.http.response import HttpResponse
from gateway.http.sse import EventStream, ProgressTimers
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

if TYPE_CHECKING:
    from gateway.http.server import EdgeServer

log = structlog.get_logger("gateway")

MAX_LINE_BYTES = 16_384
"""Bytes of an incomplete request line that are kept; the parser accepts 8190 bytes of target."""

MAX_CACHE_MISSES = 16
"""After so many uncached headers in a row, the cache is not used for a connection: its client never repeats headers."""

READ_AHEAD = 65_536
"""Bytes of bodies behind the current request, after which reading stops. One read of the socket may exceed it."""

PROBES_S = (0.04, 0.03, 0.2, 0.25)
"""Seconds before each interim response to a client that closed its sending side. If the client is gone, the first one makes it
reset the connection, and the next one after the reset has arrived detects that."""


class FastPathCall(Protocol):
    """One request on the fast path. It responds with `EdgeConnection.write_response`."""

    authenticated: bool

    @property
    def headers(self) -> CIMultiDictProxy[str]: ...

    def start(self, raw: bytes) -> None:
        """Handle the request with this body; the response may be written before this returns."""

    def client_left(self) -> None:
        """The connection was closed before the response."""


class FastPathHandler(Protocol):
    """Creates the calls of the fast path (gateway/inference/fast_path.py), and decides which requests take it."""

    @property
    def open(self) -> bool: ...

    def accepts(self, message: RawRequestMessage, payload: StreamReader) -> bool: ...

    def call(
        self, connection: "EdgeConnection", headers: CIMultiDictProxy[str], authorization: Sequence[str]
    ) -> FastPathCall: ...


class EdgeConnection(RequestHandler):
    """One connection."""

    __slots__ = (
        "_at_boundary",
        "_body",
        "_body_bytes",
        "_broken",
        "_buffered",
        "_cache_attempts",
        "_edge",
        "_fast_call",
        "_half_closed",
        "_held",
        "_open_transport",
        "_recent",
        "_responding",
        "_share",
    )

    def __init__(self, edge: "EdgeServer", **kwargs: Any) -> None:
        super().__init__(edge, **kwargs)
        # One message per call: if the parser raises an error, it keeps the messages that it read before in the same call.
        self._parser = HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_headers=self.max_headers,
            max_field_size=self.max_field_size,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,
        )
        self._edge = edge
        self._open_transport: asyncio.Transport | None = None  # Until it is closed; aiohttp drops its own earlier.
        self._fast_call: FastPathCall | None = None  # The request that is handled by the fast path.
        self._buffered = b""  # Bytes that arrived before the response of the fast path.
        self._at_boundary = True  # The parser has read all requests to their end, and nothing behind them.
        self._held = b""  # The last byte of data that a full queue, or a full body, keeps from being parsed.
        self._recent = b""  # Bytes that may contain the incomplete request line.
        self._body: StreamReader = EMPTY_PAYLOAD  # Of the last parsed request.
        self._body_bytes = 0  # Its Content-Length.
        self._broken = False  # The parser rejected something: nothing behind it is read.
        self._responding = False  # Response headers are being written, or were written and the body follows.
        self._half_closed = False  # The client closed its sending side.
        self._cache_attempts = MAX_CACHE_MISSES
        self._share = edge.customer_connections.share()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._edge.open_connections += 1
        self._open_transport = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        cast("asyncio.Task[None]", self._task_handler).add_done_callback(self._task_ended)
        if self._edge.open_connections > self._edge.max_connections:
            self.reject(RequestError(ErrorCode.NO_CAPACITY, "Too many connections are open."))

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """Close the connection, because aiohttp's task for it has ended and can send no more responses."""
        try:
            error = task.exception()
        except (
            asyncio.CancelledError
        ):  # From the task: with its frames, which reference the task, it would form a ring.
            error = None
        if error is not None:
            log_fault("connection closed after a fault", error)
        self._close = True
        if self._open_transport is not None and self._fast_call is None:  # `write_response` closes it otherwise.
            self._open_transport.close()
            self._edge.close_watch.start(self, self._loop.time())

    def force_close(self) -> None:
        """Close, as in aiohttp; a client that does not read its response delays that only for a limited time."""
        super().force_close()
        if self._open_transport is not None:
            self._edge.close_watch.start(self, self._loop.time())

    def connection_lost(self, exc: BaseException | None) -> None:
        self._edge.open_connections -= 1
        self._share.close()
        self._open_transport = None
        self._body = EMPTY_PAYLOAD  # It references this connection: a ring, freed by the garbage collector only.
        for watch in self._edge.watches:
            watch.stop(self)
        super().connection_lost(exc)
        if (call := self._fast_call) is not None:
            self._fast_call = None
            call.client_left()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's returns nothing: the connection is closed
        """The client closed its sending side. Returns whether a complete request is still without a response.

        A client that closed its socket is recognised only by writing to it: see `_probe`.
        """
        body = self._body
        incomplete = not body.is_eof()
        if self._responding or self._is_idle() or (incomplete and not self._messages):
            return False
        if incomplete:
            body.set_exception(web.RequestPayloadError())
        self._half_closed = True
        self._probe_later(iter(PROBES_S))
        return True

    def _probe_later(self, waits_s: Iterator[float]) -> None:
        if (wait_s := next(waits_s, None)) is not None:
            self._loop.call_later(wait_s, self._probe, waits_s)

    def _probe(self, waits_s: Iterator[float]) -> None:
        """Write an interim response (RFC 9110, 15.2) to a half-closed client. If it is gone, it resets the connection."""
        request = self._current_request
        if (
            self._open_transport is None
            or self._responding
            or (request is not None and request.version != HttpVersion11)
        ):
            return
        self._open_transport.write(CONTINUE)
        self._probe_later(waits_s)

    def data_received(self, data: bytes) -> None:
        if self._fast_call is not None:
            self._buffered += data
            self._pause_transport_reading()  # Otherwise a client that never reads could fill the memory.
            return
        whole = split_request(data) if self._at_boundary and self._cache_attempts else None
        if whole is None or not self._take_cached(whole):
            self._parse(data, whole)

    def _take_cached(self, whole: CompleteRequest) -> bool:
        """Start the fast path without the parser, which stays between two requests. Returns whether that was possible."""
        fast_path = self._edge.fast_path
        if (
            fast_path is None
            or not fast_path.open
            or self._paused
            or self._close
            or self._force_close
            or not self._is_idle()
        ):
            return False
        headers = self._edge.header_cache.get(whole)
        if headers is None:
            self._cache_attempts -= 1
            return False
        self._cache_attempts = MAX_CACHE_MISSES
        self._request_count += 1
        # Assigned first, because the response may be written before `start` returns.
        self._fast_call = fast_path.call(self, headers, [whole.authorization])
        self._fast_call.start(whole.body)
        return True

    def _parse(self, data: bytes, whole: CompleteRequest | None) -> None:
        """Parse the data, and handle complete requests by the fast path or by aiohttp's task."""
        before, idle = self._request_count, self._is_idle()
        # Removed while parsing, so that aiohttp's task is not woken for a request of the fast path.
        waiter, self._waiter = self._waiter, None
        self._feed(data, whole)
        self._waiter = waiter
        if self._request_count != before:
            self._edge.headers_watch.stop(self)
            if idle and len(self._messages) == 1 and self._take_parsed(whole):
                return
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif not self._at_boundary:
            self._await_headers()
        # Bodies behind the current request have no reader yet. aiohttp's task resumes when it takes the next message.
        ahead = waiter is None and self._messages and not self._buffer_paused
        if ahead and sum(body.total_bytes for _, body in self._messages) > READ_AHEAD:
            self._pause_reading_for_buffer()

    def _feed(self, data: bytes, whole: CompleteRequest | None) -> None:
        """Pass data to the parser, and find out whether it ends within a request, which the parser does not report.

        The last byte is therefore passed separately: if it completes a request, the data ends at a boundary.
        """
        left = self._body_bytes - self._body.total_bytes
        if 0 < len(data) < left and not (self._held or self._reading_paused):
            super().data_received(data)  # The middle of a body.
            return
        if not data and not self._held:  # aiohttp resumes after a pause; nothing is behind the parsed data.
            self._step(b"")
            return
        self._recent += data
        if whole is not None or (self._at_boundary and is_header_block(data)):
            # Probably one whole request, or its headers: one call.
            count = self._request_count
            super().data_received(data)
            self._at_boundary = False
            if self._request_count != count:
                self._check_message()
                self._at_boundary = is_complete(data, *self._messages[-1])
                if not self._at_boundary:
                    self._step(b"")
        else:
            self._feed_all_but_last(data)
        if self._at_boundary:
            self._recent = b""
        elif not self._held:
            self._recent = self._recent[self._recent.rfind(b"\n") + 1 :][-MAX_LINE_BYTES:]

    def _feed_all_but_last(self, data: bytes) -> None:
        held, self._held = self._held, b""
        data = held + data
        self._at_boundary = False
        if held or len(data) > 1:
            self._step(data[:-1])
        if self._reading_paused or len(self._messages) >= self._max_msg_queue_size:
            self._held = data[-1:]
            return
        count, ended = self._request_count, self._body.is_eof()
        self._step(data[-1:])
        # The last byte was the end of a body, or of headers without a body.
        self._at_boundary = not self._broken and self._body.is_eof() and (not ended or self._request_count != count)

    def _step(self, data: bytes) -> None:
        """Parse message by message, while there is room for them."""
        while not self._broken:
            count = self._request_count
            super().data_received(data)
            if self._request_count == count:
                return
            self._check_message()
            if self._reading_paused or self._upgraded or len(self._messages) >= self._max_msg_queue_size:
                return
            data = b""

    def _check_message(self) -> None:
        """Check the message that was just parsed. A parser error is a message of its own behind the one it concerns."""
        message, body = self._messages[-1]
        if not isinstance(message, RawRequestMessage):
            self._broken = True
            if message.exc is not None:
                message.exc.__traceback__ = None  # Its frame references this message: a ring, with all received data.
            if not self._body.is_eof():
                self._body.set_exception(web.RequestPayloadError())
            return
        self._body = body
        self._body_bytes = int(message.headers.get("Content-Length", 0))
        line = rtsp_line(message, self._recent)
        if line is not None:
            self._recent = self._recent[line.end() :]
        problem = request_line_error(message, line)
        if problem is not None:
            self._broken = True
            self._messages[-1] = (_ErrInfo(400, RequestError(ErrorCode.INVALID_REQUEST, problem), ""), EMPTY_PAYLOAD)

    def _await_headers(self) -> None:
        """Start the timeout for incomplete headers, if the connection waits for them."""
        if self._is_idle():
            self._edge.headers_watch.start(self, self._loop.time())

    def _take_parsed(self, whole: CompleteRequest | None) -> bool:
        """Start the fast path with the only parsed request, and cache its headers. Returns whether that was possible."""
        fast_path = self._edge.fast_path
        message, payload = cast("tuple[RawRequestMessage, StreamReader]", self._messages[0])
        if fast_path is None or self._paused or not fast_path.accepts(message, payload):
            return False
        self._messages.clear()
        self._parser.message_consumed()  # type: ignore[union-attr]  # it parsed this message
        headers, at_boundary = message.headers, self._at_boundary
        call = self._fast_call = fast_path.call(self, headers, headers.getall("Authorization", []))
        call.start(payload.read_nowait())
        if whole is not None and at_boundary and call.authenticated:
            self._edge.header_cache.add(whole, headers)
        return True

    def write_response(self, response: HttpResponse) -> None:
        """Write the response of the fast path, and continue with the data that arrived meanwhile."""
        call, self._fast_call = self._fast_call, None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        closing = self._close or response.close or self._edge.drain_state.leaving or self._half_closed
        if self._edge.cors is not None and call is not None:
            response.lines += self._edge.cors.lines(call.headers)
        transport.write(response.head("close" if closing else "") + response.body)
        if closing:
            self.force_close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._buffered:
            data, self._buffered = self._buffered, b""
            self._resume_transport_reading()
            self.data_received(data)
        elif not self._at_boundary:
            self._await_headers()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write a response of aiohttp's task."""
        self._responding = True
        if self._half_closed and not self._messages:
            cast("HttpResponse", resp).close = True
        result = await super().finish_response(request, resp, start_time)
        self._responding = False
        if self._half_closed and not self._messages:
            self.close()
        elif not (self._at_boundary or self._messages) and resp.keep_alive and request.content.is_eof():
            self._edge.headers_watch.start(self, self._loop.time())
        return result

    @property
    def remote(self) -> str | None:
        """The client's address, if the transport has one."""
        peer = self.peername
        return str(peer[0]) if isinstance(peer, tuple) else peer

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

    def _process_keepalive(self) -> None:
        if self._fast_call is not None:  # aiohttp's task is idle, but the connection is not.
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def _is_idle(self) -> bool:
        """Whether every request has its response.

        Between taking a message and running its handler aiohttp shows neither. But it waits for a message only if it has
        none, or has not started to wait at all.
        """
        return self._fast_call is None and not self._messages and (self._waiter is not None or not self._request_count)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._edge.write_watch.start(self, self._loop.time())

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002  # aiohttp's signature
        """Called by aiohttp after every read of a body; usually nothing was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._edge.write_watch.stop(self)

    def reject(self, error: RequestError) -> None:
        """Write an error that belongs to no request, and close."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            response = self._edge.error_responses.answer(error, new_request_id())
            transport.write(response.head("close") + response.body)
        self.force_close()

    def body_started(self) -> None:
        """Start the timeout of a body that a handler waits for."""
        self._edge.body_watch.start(self, self._loop.time())

    def body_ended(self) -> None:
        """Stop the timeout of the body."""
        self._edge.body_watch.stop(self)

    def fail_body(self, code: ErrorCode) -> None:
        """End the body that a handler waits for with this error, unless it is complete."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(BodyEnded(code))

    def idle_s(self, now: float) -> float:
        """Seconds since the connection last had a request; 0 while one is open. `now`: the loop's clock."""
        return now - self._next_keepalive_close_time + self._keepalive_timeout if self._is_idle() else 0.0

    def leave(self) -> None:
        """Close for the drain: at once if idle, else after the response, without waiting for a body."""
        if self._is_idle():
            self.force_close()
            return
        self.close()
        if self in self._edge.body_watch:
            self.fail_body(ErrorCode.DRAINING)

    def abort(self) -> None:
        """Close the connection to a client that does not read."""
        if self._open_transport is not None:
            self._open_transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  # the parser's message quotes the client
    ) -> web.StreamResponse:
        """Called by aiohttp for parser errors (400), and for exceptions that no handler caught."""
        request_id = new_request_id()
        if status == 400:  # There is no request, and so no Accept header.
            error = RequestError(ErrorCode.INVALID_REQUEST, "The request is not valid HTTP.")
            if isinstance(exc, RequestError):  # From `_check_message`: it does not quote the client.
                error = exc
            response = self._edge.error_responses.answer(error, request_id)
        else:
            response = self._edge.internal_error(exc, request_id, problem=wants_problem(request.headers))
        response.close = True
        return cast("web.StreamResponse", response)

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002  # aiohttp's signature
        """Log the type of the exception only: aiohttp would log all of it, which may quote the client."""
        log.warning("connection closed after a fault", error=type(kw.get("exc_info")).__name__)
