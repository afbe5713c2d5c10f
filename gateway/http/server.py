"""The HTTP edge: aiohttp's connection handler with deadlines, a connection cap, and errors that say nothing of input.

aiohttp waits forever for headers and bodies. Here watches (headers, body, unread answers, closing) are looked at by one
sweep; the fast path, where a request arrives in one piece, touches none of them. Errors of the parser become our
constant JSON; what the client sent is neither answered back nor logged.
"""

import asyncio
import contextlib
import os
import socket
from typing import cast

import aiohttp
import structlog
from aiohttp import http_parser, web
from aiohttp.web_protocol import RequestHandler

from gateway.config import GatewayConfig
from gateway.http.connection import EdgeConnection
from gateway.http.cors import Cors, serves_customers
from gateway.http.errors import ErrorResponses, wants_problem
from gateway.http.header_cache import HeaderCache
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, Methods, RoutedRequest, Router, path_of
from gateway.http.sse import PING_EVERY_S, EventStream, ProgressTimers
from gateway.inference.fast_path import FastPath
from scheduler.errors import ErrorCode, RequestError, StartError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

log = structlog.get_logger("gateway")

ACCEPTS = 8  # Connections that are accepted in one turn of the loop, see `listen`.
SWEEP_S = 0.25
PROBE_S = 0.25  # How long a client that ended its sending side is taken for one that waits, before it is probed.
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
        self,
        routes: Router,
        faults: ErrorResponses,
        drain_state: DrainState,
        config: GatewayConfig,
        fast_path: FastPath | None = None,
    ) -> None:
        """`fast_path` answers what suits it, `routes` everything else."""
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
        self.drain_state = drain_state
        self.fast_path = fast_path
        self.known_heads = HeaderCache()
        self.cors = Cors(config.cors_origins) if config.cors_origins else None
        self.headers_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.header_timeout_s)
        self.body_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.body_timeout_s)
        self.write_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.write_timeout_s)
        self.close_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.write_timeout_s)
        self.left_watch: ProgressTimers[EdgeConnection] = ProgressTimers(PROBE_S)
        self.watches = (self.headers_watch, self.body_watch, self.write_watch, self.close_watch, self.left_watch)
        self.ping_watch: ProgressTimers[EventStream] = ProgressTimers(PING_EVERY_S)
        self.max_connections = config.max_connections
        self.open_connections = 0

    def __call__(self) -> RequestHandler:
        return EdgeConnection(self, loop=self._loop, **self._kwargs)

    async def _answer(self, request: web.BaseRequest) -> HttpResponse:
        request_id = new_request_id()
        try:
            answer = await self._routed(request, request_id)
        except RequestError as error:
            answer = self.faults.answer(error, request_id, problem=wants_problem(request.headers))
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets our 500
            answer = self.failed(error, request_id, problem=wants_problem(request.headers))
        if self.cors is not None and serves_customers(path_of(request.raw_path)):
            answer.lines += self.cors.lines(request.headers)
        # The rest of an unread body would be taken for the next request, and aiohttp's parser drops or misreads what
        # comes in one piece with an Upgrade, whatever the protocol.
        upgrade = "Upgrade" in request.headers or request.method == "CONNECT"
        if self.drain_state.leaving or not request.content.is_eof() or upgrade:
            answer.close = True
        # A body that was ended by an error gives only that error again.
        answer.abort = request.content.exception() is not None
        return answer

    async def _routed(self, request: web.BaseRequest, request_id: str) -> HttpResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            raise RequestError(ErrorCode.INVALID_REQUEST, "This server does not upgrade connections.", "Upgrade")
        found = self.routes.find(request.raw_path)
        if found is None:
            raise RequestError(ErrorCode.NOT_FOUND)
        methods, tail = found
        handler = methods.get(request.method)
        if handler is None:
            if request.method == "OPTIONS" and (preflight := self._preflight(request, methods, request_id)):
                return preflight
            allowed = [("Allow", ", ".join(sorted(methods)))]
            error = RequestError(ErrorCode.METHOD_NOT_ALLOWED)
            return self.faults.answer(error, request_id, allowed, problem=wants_problem(request.headers))
        return await handler(RoutedRequest(request, request_id, tail))

    def _preflight(self, request: web.BaseRequest, methods: Methods, request_id: str) -> HttpResponse | None:
        if self.cors is None or not serves_customers(path_of(request.raw_path)):
            return None
        return self.cors.preflight(request.headers, methods, request_id)

    def failed(self, error: BaseException | None, request_id: str, *, problem: bool = False) -> HttpResponse:
        """Answer 500 for a fault of ours, and log where it happened: the message may hold what a client sent."""
        log_fault("request failed", error, request_id=request_id)
        return self.faults.answer(RequestError(ErrorCode.INTERNAL_ERROR), request_id, problem=problem)

    def sweep(self, now: float) -> None:
        """End what is overdue at `now` (the loop's clock)."""
        for connection in self.headers_watch.expired(now):
            connection.refuse(RequestError(ErrorCode.REQUEST_TIMEOUT))
        for connection in self.body_watch.expired(now):
            connection.fail_body(ErrorCode.REQUEST_TIMEOUT)
        for connection in (*self.write_watch.expired(now), *self.close_watch.expired(now)):
            connection.abort()
        for connection in self.left_watch.expired(now):
            connection.probe(now)
        for stream in self.ping_watch.expired(now):
            stream.ping(now)

    def leave(self) -> None:
        """Close idle connections now, and the others after the answer that they wait for."""
        for connection in self.connections:
            cast("EdgeConnection", connection).leave()

    async def sweep_forever(self) -> None:
        """The one timer of all connections."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self._loop.time())


async def serve(server: EdgeServer, config: GatewayConfig) -> tuple[web.ServerRunner, int]:
    """Listen as `config` says. Returns what to clean up, and the port (the kernel's choice where it was 0)."""
    runner = web.ServerRunner(server, shutdown_timeout=0.5)
    await runner.setup()
    try:
        port = await listen(runner, config.host, config.port, config.backlog, reuse_port=config.reuse_port)
    except OSError as error:
        with contextlib.suppress(Exception):
            await runner.cleanup()
        raise StartError(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.") from error
    return runner, port


async def listen(runner: web.ServerRunner, host: str, port: int, backlog: int, *, reuse_port: bool = False) -> int:
    """Accept connections for `runner`, several in each turn of the loop. Returns the port. Raises OSError.

    libuv accepts one connection in each turn for each listening descriptor. A busy loop turns a few hundred times a second,
    and clients that open connections as fast as they can would keep everybody else's waiting until the backlog overflows.
    So each socket is registered several times, under descriptors of its own.
    """
    loop = asyncio.get_running_loop()
    bound = await loop.create_server(
        cast("web.Server", runner.server),
        host,
        port,
        reuse_port=reuse_port or None,
        start_serving=False,
    )
    try:
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in bound.sockets for _ in range(ACCEPTS)]
        found = sockets[0].getsockname()[1]
    finally:
        bound.close()
    try:
        for each in sockets:
            await web.SockSite(runner, each, backlog=backlog).start()
    except OSError:
        for each in sockets:
            each.close()
        raise
    return int(found)
