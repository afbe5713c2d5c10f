"""One connection of the edge: aiohttp's handler, watched, with rides for what suits the fast lane.

A request that came whole, on a connection that does nothing else, may be answered by a ride (gateway/fast_lane.py):
aiohttp parses it, but its task for the connection is not woken, which costs as much as all that we do for a request.
"""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler

from gateway.answer import Answer
from gateway.event_stream import EventStream
from gateway.fast_lane import Message, Ride
from gateway.known_heads import Whole, is_all, taken_apart
from gateway.problem import wants_problem
from gateway.watch import Watch
from scheduler.errors import ErrorCode, RequestError
from scheduler.request_id import new_request_id

if TYPE_CHECKING:
    from gateway.edge import EdgeServer

log = structlog.get_logger("gateway")

PATIENCE = 16
"""After so many heads in a row that were not known, none more is looked for on a connection: its client never repeats one."""


class EdgeConnection(RequestHandler):
    """One connection."""

    __slots__ = ("_between", "_early", "_edge", "_patience", "_ride")

    def __init__(self, edge: "EdgeServer", **kwargs: Any) -> None:
        super().__init__(edge, **kwargs)
        self._edge = edge
        self._ride: Ride | None = None  # The request that is answered past aiohttp's task, if there is one.
        self._early = b""  # What came before its answer was written.
        self._between = True  # The parser stands between two requests: each came whole and by itself.
        self._patience = PATIENCE

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._edge.open_connections += 1
        super().connection_made(transport)
        if self._edge.open_connections > self._edge.max_connections:
            self.refuse(RequestError(ErrorCode.NO_CAPACITY, "Too many connections are open."))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._edge.open_connections -= 1
        for watch in (self._edge.headers_watch, self._edge.body_watch, self._edge.write_watch):
            watch.stop(self)
        super().connection_lost(exc)
        if (ride := self._ride) is not None:
            self._ride = None
            ride.client_left()

    def data_received(self, data: bytes) -> None:
        if self._ride is not None:
            self._early += data
            self._pause_transport_reading()  # Or a client that never reads could fill the memory.
            return
        whole = taken_apart(data) if self._between and self._patience else None
        if whole is None or not self._rides_unparsed(whole):
            self._parse(data, whole)

    def _rides_unparsed(self, whole: Whole) -> bool:
        """Whether it was taken by the fast lane past the parser, which stays as it is: between two requests."""
        lane = self._edge.lane
        if lane is None or not lane.open or self._paused or self._close or self._force_close or not self._is_idle():
            return False
        headers = self._edge.known_heads.headers(whole)
        if headers is None:
            self._patience -= 1
            return False
        self._patience = PATIENCE
        self._request_count += 1
        self._begin(Ride(lane, self, headers, [whole.authorization]), whole.body)
        return True

    def _parse(self, data: bytes, whole: Whole | None) -> None:
        """Have aiohttp parse it, and the fast lane or aiohttp's task answer what comes of it."""
        before, idle = self._request_count, self._is_idle()
        # Taken away for the moment, so that aiohttp's task is not woken for what a ride will answer.
        waiter, self._waiter = self._waiter, None
        between, self._between = self._between, False
        super().data_received(data)
        self._waiter = waiter
        if self._request_count != before:
            self._edge.headers_watch.stop(self)
            self._between = between and self._request_count == before + 1 and is_all(data, *self._messages[-1])
            if idle and len(self._messages) == 1 and self._rides(whole):
                return
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            # The parser reports a broken chunk as a message of its own, of which the waiting handler would not hear.
            self.fail_body(web.RequestPayloadError())
        elif data and self._is_idle():
            self._edge.headers_watch.start(self, self._loop.time())

    def _rides(self, whole: Whole | None) -> bool:
        """Whether the one request that is there was taken by the fast lane; the next one like it need not be parsed."""
        lane = self._edge.lane
        message, payload = cast("tuple[Message, StreamReader]", self._messages[0])
        if lane is None or self._paused or not lane.suits(message, payload):
            return False
        self._messages.clear()
        self._parser.message_consumed()  # type: ignore[union-attr]  # it parsed this a moment ago
        headers, between = message.headers, self._between
        ride = Ride(lane, self, headers, headers.getall("Authorization", []))
        self._begin(ride, payload.read_nowait())
        if whole is not None and between and ride.recognised:
            self._edge.known_heads.learn(whole, headers)
        return True

    def _begin(self, ride: Ride, body: bytes) -> None:
        self._ride = ride  # First, because it may be answered before `begin` returns.
        ride.begin(body)

    def arrive(self, answer: Answer) -> None:
        """The answer of the ride: write it, and go on with what came meanwhile."""
        self._ride = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        closing = self._close or answer.close or self._edge.doors.leaving
        transport.write(answer.head("close" if closing else "") + answer.body)
        if closing:
            self.force_close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._early:
            data, self._early = self._early, b""
            self._resume_transport_reading()
            self.data_received(data)

    @property
    def remote(self) -> str | None:
        """The client's address, as far as the transport knows it."""
        peer = self.peername
        return str(peer[0]) if isinstance(peer, tuple) else peer

    @property
    def pings(self) -> Watch[EventStream]:
        """The streams that are kept from falling silent."""
        return self._edge.ping_watch

    def fault(self, error: Exception, request_id: str, *, problem: bool) -> Answer:
        """What a ride answers where it was not its client's fault, or where it is not known whose request it is."""
        if isinstance(error, RequestError):
            return self._edge.faults.answer(error, request_id, problem=problem)
        return self._edge.failed(error, request_id, problem=problem)

    def _process_keepalive(self) -> None:
        if self._ride is not None:  # aiohttp's task waits, but the connection does not.
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def _is_idle(self) -> bool:
        """Whether nothing that was asked here is unanswered.

        Between taking a message and running its handler aiohttp shows neither; but it waits for a message only when it
        has none, or has not begun to wait at all.
        """
        return self._ride is None and not self._messages and (self._waiter is not None or not self._request_count)

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

    def fail_body(self, error: Exception) -> None:
        """Wake the handler that waits for the rest of a body with this error, unless the rest has come."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(error)

    def leave(self) -> None:
        """The gateway goes: close when nothing is asked here, else after the answer; no body is waited for."""
        if self._is_idle():
            self.force_close()
            return
        self.close()
        if self in self._edge.body_watch:
            self.fail_body(RequestError(ErrorCode.DRAINING))

    def abort(self) -> None:
        """Drop a client that does not read."""
        if self.transport is not None:
            self.transport.abort()

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
            answer = self._edge.faults.answer(error, request_id)
        else:
            answer = self._edge.failed(exc, request_id, problem=wants_problem(request.headers))
        answer.close = True
        return cast("web.StreamResponse", answer)

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002  # aiohttp's signature
        """Aiohttp logs whole exceptions, which may quote the client; only the kind is worth a line."""
        log.warning("connection closed after a fault", error=type(kw.get("exc_info")).__name__)
