"""One HTTP connection: aiohttp's protocol with our deadlines, the fast path, and the checks of the request line.

A request that came whole, on a connection that does nothing else, may take the fast path
(gateway/inference/fast_path.py): aiohttp parses it, but the task of the connection is not woken, which costs as much as
all that we do for a request. Request lines that aiohttp's parser accepts and this server rejects (other protocols,
other versions, broken hosts) are recognised here.
"""

import asyncio
import re
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from gateway.http.errors import wants_problem
from gateway.http.header_cache import CompleteRequest, is_all, is_head, taken_apart
from gateway.http.request import CONTINUE, BodyEnded
from gateway.http.response import HttpResponse
from gateway.http.sse import EventStream, ProgressTimers
from gateway.inference.fast_path import FastPathRequest, RequestHead
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

if TYPE_CHECKING:
    from gateway.http.server import EdgeServer


VERSION = "Only HTTP/1.0 and HTTP/1.1 are supported: end the request line with HTTP/1.1."
TARGET = "The host in the request target is not valid: send the path alone, or a host that can be decoded."

LONGEST_LINE = 16_384
"""Bytes of a request line that are kept until it is complete; the parser accepts 8190 bytes of target."""


def refused(message: RawRequestMessage, line: re.Match[bytes] | None = None) -> str | None:
    """Why this request is rejected, as a sentence for the client; None where it is not. `line`: as `rtsp_line` gives it."""
    if message.version not in (HttpVersion10, HttpVersion11):
        return VERSION
    if line is not None and line[1] == b"RTSP":
        return VERSION
    if not message.path.startswith("/") and not _has_readable_host(message):
        return TARGET
    return None


def rtsp_line(message: RawRequestMessage, recent: bytes) -> re.Match[bytes] | None:
    """The request line in the received bytes, with its protocol as the first group; None where RTSP is not among them.

    The parser (llhttp) reads RTSP too, and does not say so. Only a body that is no JSON could hold such a line.
    """
    if b" RTSP/" not in recent:
        return None
    method, path = re.escape(message.method.encode()), re.escape(message.path.encode("utf-8", "surrogateescape"))
    return re.search(rb"(?:^|\n)" + method + rb" +" + path + rb" +([A-Z]+)/", recent)


def _has_readable_host(message: RawRequestMessage) -> bool:
    """Aiohttp decodes the host when it builds its request object, where an error would end the connection's task."""
    url = message.url
    try:
        if url.absolute:
            _ = (url.with_scheme("http") if url.scheme else url).host
            url.relative()
    except ValueError:
        return False
    return True


log = structlog.get_logger("gateway")

PATIENCE = 16
"""After so many heads in a row that were not known, none more is looked for on a connection: its client never repeats one."""

READ_AHEAD = 65_536
"""Bytes of bodies behind the request that is being answered, after which no more is read; one read of the socket may exceed it."""

PROBES = 2
"""Interim answers to a client that ended its sending side: a client that is gone resets the connection at the first, which
the second one discovers."""


class EdgeConnection(RequestHandler):
    """One connection."""

    __slots__ = (
        "_answering",
        "_between",
        "_body",
        "_broken",
        "_early",
        "_edge",
        "_fast_path_request",
        "_half_closed",
        "_held",
        "_line",
        "_patience",
        "_probes",
        "_recent",
    )

    def __init__(self, edge: "EdgeServer", **kwargs: Any) -> None:
        super().__init__(edge, **kwargs)
        # One message a call: where the parser raises an error it keeps the messages that it read before in the same call.
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
        self._line: asyncio.Transport | None = (
            None  # The transport until it is closed; aiohttp forgets its own earlier.
        )
        self._fast_path_request: FastPathRequest | None = (
            None  # The request that is answered past aiohttp's task, if there is one.
        )
        self._early = b""  # What came before its answer was written.
        self._between = True  # The parser has read each request to its end, and nothing behind it.
        self._held = b""  # The last byte of what a full queue, or a full body, keeps from being parsed.
        self._recent = b""  # What may hold the begun request line.
        self._body: StreamReader = EMPTY_PAYLOAD  # Of the request that was parsed last.
        self._broken = False  # The parser has refused something: nothing behind it is read.
        self._answering = False  # The head of an answer is being written, or is written and its body follows.
        self._half_closed = False  # The client sends nothing more.
        self._probes = PROBES
        self._patience = PATIENCE

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._edge.open_connections += 1
        self._line = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        cast("asyncio.Task[None]", self._task_handler).add_done_callback(self._task_ended)
        if self._edge.open_connections > self._edge.max_connections:
            self.refuse(RequestError(ErrorCode.NO_CAPACITY, "Too many connections are open."))

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """Whatever ended aiohttp's task for this connection: nothing more is answered here, so the connection ends."""
        try:
            error = task.exception()
        except asyncio.CancelledError:  # Taken from the task: with its frames, which know the task, it would be a ring.
            error = None
        if error is not None:
            log_fault("connection closed after a fault", error)
        self._close = True
        if self._line is not None and self._fast_path_request is None:  # A ride is answered first: see `arrive`.
            self._line.close()
            self._edge.close_watch.start(self, self._loop.time())

    def force_close(self) -> None:
        """As aiohttp; what the client has not read keeps the connection, but only so long."""
        super().force_close()
        if self._line is not None:
            self._edge.close_watch.start(self, self._loop.time())

    def connection_lost(self, exc: BaseException | None) -> None:
        self._edge.open_connections -= 1
        self._line = None
        self._body = EMPTY_PAYLOAD  # It knows this connection: only the garbage collector could free a ring.
        for watch in self._edge.watches:
            watch.stop(self)
        super().connection_lost(exc)
        if (fast_path_request := self._fast_path_request) is not None:
            self._fast_path_request = None
            fast_path_request.client_left()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's returns nothing: the connection is closed
        """The client sends nothing more. What came whole is answered first; returns whether there is such a request.

        A client that has closed its socket looks the same until something is written to it: see `probe`.
        """
        body = self._body
        incomplete = not body.is_eof()
        if self._answering or self._is_idle() or (incomplete and not self._messages):
            return False
        if incomplete:
            body.set_exception(web.RequestPayloadError())
        self._half_closed = True
        self._edge.left_watch.start(self, self._loop.time())
        return True

    def probe(self, now: float) -> None:
        """Write an interim answer (RFC 9110, 15.2) to a half-closed client: one that is gone resets the connection."""
        request = self._current_request
        if self._line is None or self._answering or (request is not None and request.version != HttpVersion11):
            return
        self._line.write(CONTINUE)
        self._probes -= 1
        if self._probes:
            self._edge.left_watch.start(self, now)

    def data_received(self, data: bytes) -> None:
        if self._fast_path_request is not None:
            self._early += data
            self._pause_transport_reading()  # Or a client that never reads could fill the memory.
            return
        whole = taken_apart(data) if self._between and self._patience else None
        if whole is None or not self._rides_unparsed(whole):
            self._parse(data, whole)

    def _rides_unparsed(self, whole: CompleteRequest) -> bool:
        """Whether it was taken by the fast lane past the parser, which stays as it is: between two requests."""
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
        headers = self._edge.known_heads.headers(whole)
        if headers is None:
            self._patience -= 1
            return False
        self._patience = PATIENCE
        self._request_count += 1
        self._begin(FastPathRequest(fast_path, self, headers, [whole.authorization]), whole.body)
        return True

    def _parse(self, data: bytes, whole: CompleteRequest | None) -> None:
        """Have aiohttp parse it, and the fast lane or aiohttp's task answer what comes of it."""
        before, idle = self._request_count, self._is_idle()
        # Taken away for the moment, so that aiohttp's task is not woken for what a ride will answer.
        waiter, self._waiter = self._waiter, None
        self._feed(data, whole)
        self._waiter = waiter
        if self._request_count != before:
            self._edge.headers_watch.stop(self)
            if idle and len(self._messages) == 1 and self._rides(whole):
                return
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif not self._between:
            self._await_head()
        if waiter is None and self._messages and not self._buffer_paused:
            self._limit_read_ahead()

    def _feed(self, data: bytes, whole: CompleteRequest | None) -> None:
        """Give it to the parser, and find out whether a request is left begun, which the parser does not say.

        So the last byte is given by itself: where it ends a request, nothing is begun.
        """
        if not data and not self._held:  # Aiohttp goes on after a pause; there is nothing behind what was parsed.
            self._step(b"")
            return
        self._recent += data
        if whole is not None or (self._between and is_head(data)):
            self._feed_at_once(data)
        else:
            self._feed_all_but_last(data)
        if self._between:
            self._recent = b""
        elif not self._held:
            self._recent = self._recent[self._recent.rfind(b"\n") + 1 :][-LONGEST_LINE:]

    def _feed_at_once(self, data: bytes) -> None:
        """What looks like one whole request, or the head of one: mostly the parser finds that it is."""
        count = self._request_count
        super().data_received(data)
        self._between = False
        if self._request_count != count:
            self._take()
            self._between = is_all(data, *self._messages[-1])
            if not self._between:
                self._step(b"")

    def _feed_all_but_last(self, data: bytes) -> None:
        held, self._held = self._held, b""
        data = held + data
        self._between = False
        if held or len(data) > 1:
            self._step(data[:-1])
        if self._reading_paused or len(self._messages) >= self._max_msg_queue_size:
            self._held = data[-1:]
            return
        count, ended = self._request_count, self._body.is_eof()
        self._step(data[-1:])
        # It was the last byte of a body, or of a head without one.
        self._between = not self._broken and self._body.is_eof() and (not ended or self._request_count != count)

    def _step(self, data: bytes) -> None:
        """Have the parser read on, message by message, as long as there is room for them."""
        while not self._broken:
            count = self._request_count
            super().data_received(data)
            if self._request_count == count:
                return
            self._take()
            if self._reading_paused or self._upgraded or len(self._messages) >= self._max_msg_queue_size:
                return
            data = b""

    def _take(self) -> None:
        """Look at the message that was just parsed. An error stands as a message of its own behind what it broke."""
        message, body = self._messages[-1]
        if not isinstance(message, RawRequestMessage):
            self._broken = True
            if message.exc is not None:
                message.exc.__traceback__ = (
                    None  # It holds the frame that holds this message: a ring, with all that was sent.
                )
            if not self._body.is_eof():
                self._body.set_exception(web.RequestPayloadError())
            return
        self._body = body
        line = rtsp_line(message, self._recent)
        if line is not None:
            self._recent = self._recent[line.end() :]
        problem = refused(message, line)
        if problem is not None:
            self._broken = True
            self._messages[-1] = (_ErrInfo(400, RequestError(ErrorCode.INVALID_REQUEST, problem), ""), EMPTY_PAYLOAD)

    def _limit_read_ahead(self) -> None:
        """Bodies behind the request that is being answered are read by nobody yet: only so much of them is taken in."""
        if sum(body.total_bytes for _, body in self._messages) > READ_AHEAD:
            self._pause_reading_for_buffer()  # Aiohttp's task resumes it when it takes the next message.

    def _await_head(self) -> None:
        """A head that was begun is to end in time, once it is what the connection waits for."""
        if self._is_idle():
            self._edge.headers_watch.start(self, self._loop.time())

    def _rides(self, whole: CompleteRequest | None) -> bool:
        """Whether the one request that is there was taken by the fast lane; the next one like it need not be parsed."""
        fast_path = self._edge.fast_path
        message, payload = cast("tuple[RequestHead, StreamReader]", self._messages[0])
        if fast_path is None or self._paused or not fast_path.suits(message, payload):
            return False
        self._messages.clear()
        self._parser.message_consumed()  # type: ignore[union-attr]  # it parsed this a moment ago
        headers, between = message.headers, self._between
        fast_path_request = FastPathRequest(fast_path, self, headers, headers.getall("Authorization", []))
        self._begin(fast_path_request, payload.read_nowait())
        if whole is not None and between and fast_path_request.recognised:
            self._edge.known_heads.learn(whole, headers)
        return True

    def _begin(self, fast_path_request: FastPathRequest, body: bytes) -> None:
        self._fast_path_request = fast_path_request  # First, because it may be answered before `begin` returns.
        fast_path_request.begin(body)

    def arrive(self, answer: HttpResponse) -> None:
        """The answer of the ride: write it, and go on with what came meanwhile."""
        fast_path_request, self._fast_path_request = self._fast_path_request, None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        closing = self._close or answer.close or self._edge.drain_state.leaving or self._half_closed
        if self._edge.cors is not None and fast_path_request is not None:
            answer.lines += self._edge.cors.lines(fast_path_request.headers)
        transport.write(answer.head("close" if closing else "") + answer.body)
        if closing:
            self.force_close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._early:
            data, self._early = self._early, b""
            self._resume_transport_reading()
            self.data_received(data)
        elif not self._between:
            self._await_head()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Called by aiohttp to write an answer."""
        self._answering = True
        if self._half_closed and not self._messages:
            cast("HttpResponse", resp).close = True
        result = await super().finish_response(request, resp, start_time)
        self._answering = False
        if self._half_closed and not self._messages:
            self.close()
        elif not (self._between or self._messages) and resp.keep_alive and request.content.is_eof():
            self._edge.headers_watch.start(self, self._loop.time())
        return result

    @property
    def remote(self) -> str | None:
        """The client's address, as far as the transport knows it."""
        peer = self.peername
        return str(peer[0]) if isinstance(peer, tuple) else peer

    @property
    def pings(self) -> ProgressTimers[EventStream]:
        """The streams that are kept from falling silent."""
        return self._edge.ping_watch

    def fault(self, error: Exception, request_id: str, *, problem: bool) -> HttpResponse:
        """What a ride answers where it was not its client's fault, or where it is not known whose request it is."""
        if isinstance(error, RequestError):
            return self._edge.faults.answer(error, request_id, problem=problem)
        return self._edge.failed(error, request_id, problem=problem)

    def _process_keepalive(self) -> None:
        if self._fast_path_request is not None:  # aiohttp's task waits, but the connection does not.
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def _is_idle(self) -> bool:
        """Whether nothing that was asked here is unanswered.

        Between taking a message and running its handler aiohttp shows neither; but it waits for a message only when it
        has none, or has not begun to wait at all.
        """
        return (
            self._fast_path_request is None
            and not self._messages
            and (self._waiter is not None or not self._request_count)
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._edge.write_watch.start(self, self._loop.time())

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002  # aiohttp's signature
        """Called by aiohttp after every read of a body, where mostly nothing was paused and nothing is to be resumed."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._edge.write_watch.stop(self)

    def refuse(self, error: RequestError) -> None:
        """Answer outside of any request, and close."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            answer = self._edge.faults.answer(error, new_request_id())
            transport.write(answer.head("close") + answer.body)
        self.force_close()

    def body_started(self) -> None:
        """A handler waits for the rest of a body."""
        self._edge.body_watch.start(self, self._loop.time())

    def body_ended(self) -> None:
        """The body is there, or nobody waits for it any more."""
        self._edge.body_watch.stop(self)

    def fail_body(self, code: ErrorCode) -> None:
        """Wake the handler that waits for the rest of a body with this error, unless the rest has come."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(BodyEnded(code))

    def leave(self) -> None:
        """The gateway goes: close when nothing is asked here, else after the answer; no body is waited for."""
        if self._is_idle():
            self.force_close()
            return
        self.close()
        if self in self._edge.body_watch:
            self.fail_body(ErrorCode.DRAINING)

    def abort(self) -> None:
        """Drop a client that does not read."""
        if self._line is not None:
            self._line.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  # what the parser says quotes the client
    ) -> web.StreamResponse:
        """Called by aiohttp for what its parser refuses (400), and for faults that no handler caught."""
        request_id = new_request_id()
        if status == 400:  # There is no request yet that could have said which form it wants.
            error = RequestError(ErrorCode.INVALID_REQUEST, "The request is not valid HTTP.")
            if isinstance(exc, RequestError):  # Ours: it quotes nobody.
                error = exc
            answer = self._edge.faults.answer(error, request_id)
        else:
            answer = self._edge.failed(exc, request_id, problem=wants_problem(request.headers))
        answer.close = True
        return cast("web.StreamResponse", answer)

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002  # aiohttp's signature
        """Aiohttp logs whole exceptions, which may quote the client; only the kind is worth a line."""
        log.warning("connection closed after a fault", error=type(kw.get("exc_info")).__name__)
