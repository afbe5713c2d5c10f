"""The HTTP edge: aiohttp's connection handler with deadlines, a connection cap, and errors that say nothing of input.

aiohttp waits forever for headers and bodies. Here three watches (headers, body, unread answers) are looked at by one
sweep; the fast path, where a request arrives in one piece, touches none of them. Errors of the parser become our
constant JSON; what the client sent is neither answered back nor logged.

A request that came whole, on a connection that does nothing else, may be answered by a ride (gateway/fast_lane.py):
aiohttp parses it, but its task for the connection is not woken, which costs as much as all that we do for a request.
"""

import asyncio
import contextlib
from typing import Any, cast

import aiohttp
import structlog
from aiohttp import StreamReader, http_parser, web
from aiohttp.web_protocol import RequestHandler

from gateway.answer import Answer
from gateway.config import GatewayConfig
from gateway.doors import Doors
from gateway.fast_lane import FastLane, Message, Ride
from gateway.faults import Faults
from gateway.problem import wants_problem
from gateway.routes import Call, Routes
from gateway.watch import Watch
from scheduler.errors import ErrorCode, RequestError, StartError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

log = structlog.get_logger("gateway")

SWEEP_S = 0.25
LINGER_S = 2.0  # How long the rest of a refused body is read, so that the client sees the answer and not a reset.


MINIMUM_AIOHTTP = (3, 14, 3)  # The first without the known request smuggling and heap read.


def check_parser() -> None:
    """Raises StartError where aiohttp is too old or runs on its pure-Python parser: both let smuggled requests in."""
    version = tuple(int(part) for part in aiohttp.__version__.split(".")[:3] if part.isdigit())
    if version < MINIMUM_AIOHTTP:
        raise StartError(f"aiohttp {aiohttp.__version__} is too old: install 3.14.3 or later.")
    if http_parser.HttpRequestParser.__module__ != "aiohttp._http_parser":
        raise StartError("aiohttp runs without its C parser: install its wheel and unset AIOHTTP_NO_EXTENSIONS.")


class EdgeServer(web.Server):
    """Accepts connections and answers each request by `routes`."""

    def __init__(
        self, routes: Routes, faults: Faults, doors: Doors, config: GatewayConfig, lane: FastLane | None = None
    ) -> None:
        """`lane` answers what suits it, `routes` everything else."""
        super().__init__(
            self._answer,  # type: ignore[arg-type]  # an Answer stands in for aiohttp's response
            handler_cancellation=True,
            keepalive_timeout=config.idle_timeout_s,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGER_S,
        )
        self.routes = routes
        self.faults = faults
        self.doors = doors
        self.lane = lane
        self.headers_watch: Watch[EdgeConnection] = Watch(config.header_timeout_s)
        self.body_watch: Watch[EdgeConnection] = Watch(config.body_timeout_s)
        self.write_watch: Watch[EdgeConnection] = Watch(config.write_timeout_s)
        self.max_connections = config.max_connections
        self.open_connections = 0

    def __call__(self) -> RequestHandler:
        return EdgeConnection(self, loop=self._loop, **self._kwargs)

    async def _answer(self, request: web.BaseRequest) -> Answer:
        request_id = new_request_id()
        try:
            answer = await self._routed(request, request_id)
        except RequestError as error:
            answer = self.faults.answer(error, request_id, problem=wants_problem(request.headers))
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets our 500
            answer = self.failed(error, request_id, problem=wants_problem(request.headers))
        # The rest of an unread body would be taken for the next request, and aiohttp's parser drops or misreads what
        # comes in one piece with an Upgrade, whatever the protocol.
        if self.doors.leaving or not request.content.is_eof() or "Upgrade" in request.headers:
            answer.close = True
        # A body that was ended by an error gives only that error again.
        answer.abort = request.content.exception() is not None
        return answer

    async def _routed(self, request: web.BaseRequest, request_id: str) -> Answer:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            raise RequestError(ErrorCode.INVALID_REQUEST, "This server does not upgrade connections.", "Upgrade")
        found = self.routes.find(request.raw_path)
        if found is None:
            raise RequestError(ErrorCode.NOT_FOUND)
        methods, tail = found
        handler = methods.get(request.method)
        if handler is None:
            allowed = [("Allow", ", ".join(sorted(methods)))]
            error = RequestError(ErrorCode.METHOD_NOT_ALLOWED)
            return self.faults.answer(error, request_id, allowed, problem=wants_problem(request.headers))
        return await handler(Call(request, request_id, tail))

    def failed(self, error: BaseException | None, request_id: str, *, problem: bool = False) -> Answer:
        """Answer 500 for a fault of ours, and log where it happened: the message may hold what a client sent."""
        log_fault("request failed", error, request_id=request_id)
        return self.faults.answer(RequestError(ErrorCode.INTERNAL_ERROR), request_id, problem=problem)

    def sweep(self, now: float) -> None:
        """End what is overdue at `now` (the loop's clock)."""
        for connection in self.headers_watch.expired(now):
            connection.refuse(RequestError(ErrorCode.REQUEST_TIMEOUT))
        for connection in self.body_watch.expired(now):
            connection.fail_body(RequestError(ErrorCode.REQUEST_TIMEOUT))
        for connection in self.write_watch.expired(now):
            connection.abort()

    def leave(self) -> None:
        """Close idle connections now, and the others after the answer that they wait for."""
        for connection in self.connections:
            cast("EdgeConnection", connection).leave()

    async def sweep_forever(self) -> None:
        """The one timer of all connections."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self._loop.time())


class EdgeConnection(RequestHandler):
    """One connection."""

    __slots__ = ("_early", "_edge", "_ride")

    def __init__(self, edge: EdgeServer, **kwargs: Any) -> None:
        super().__init__(edge, **kwargs)
        self._edge = edge
        self._ride: Ride | None = None  # The request that is answered past aiohttp's task, if there is one.
        self._early = b""  # What came before its answer was written.

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
        before, idle = self._request_count, self._is_idle()
        # Taken away for the moment, so that aiohttp's task is not woken for what a ride will answer.
        waiter, self._waiter = self._waiter, None
        super().data_received(data)
        self._waiter = waiter
        if self._request_count != before:
            self._edge.headers_watch.stop(self)
            if idle and len(self._messages) == 1 and self._rides():
                return
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            # The parser reports a broken chunk as a message of its own, of which the waiting handler would not hear.
            self.fail_body(web.RequestPayloadError())
        elif data and self._is_idle():
            self._edge.headers_watch.start(self, self._loop.time())

    def _rides(self) -> bool:
        """Whether the one request that is there was taken by the fast lane."""
        lane = self._edge.lane
        message, payload = cast("tuple[Message, StreamReader]", self._messages[0])
        if lane is None or self._paused or not lane.suits(message, payload):
            return False
        self._messages.clear()
        self._parser.message_consumed()  # type: ignore[union-attr]  # it parsed this a moment ago
        self._ride = ride = Ride(lane, self, message.headers)
        ride.begin(payload.read_nowait())
        return True

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


async def serve(server: EdgeServer, config: GatewayConfig) -> tuple[web.ServerRunner, int]:
    """Listen as `config` says. Returns what to clean up, and the port (the kernel's choice where it was 0)."""
    runner = web.ServerRunner(server, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port, backlog=config.backlog, reuse_port=config.reuse_port or None)
    try:
        await site.start()
    except OSError as error:
        with contextlib.suppress(Exception):
            await runner.cleanup()
        raise StartError(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.") from error
    return runner, site.port
