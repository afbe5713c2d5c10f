"""The HTTP server: aiohttp's connection handler with timeouts, a connection cap, and errors that do not quote the input.

aiohttp waits forever for headers and bodies. Here one sweep checks the timers of all connections (headers, body, unread
responses, closing); the fast path, for requests in one piece, starts none of them. Parser errors become constant JSON;
input is neither returned nor logged.
"""

import asyncio
import contextlib
from typing import cast

import aiohttp
from aiohttp import http_parser, web
from aiohttp.web_protocol import RequestHandler

from gateway.config import GatewayConfig
from gateway.http.connection import EdgeConnection, FastPathHandler
from gateway.http.cors import Cors, serves_customers
from gateway.http.error_responses import ErrorResponses
from gateway.http.header_cache import HeaderCache
from gateway.http.listening import ListeningPort, listen
from gateway.http.problem_details import wants_problem
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import CustomerConnections, DrainState, RoutedRequest, Router, path_of
from gateway.http.sse import PING_EVERY_S, EventStream, ProgressTimers
from scheduler.errors import ErrorCode, RequestError, StartError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

SWEEP_S = 0.25
LINGER_S = 2.0  # Time to read the rest of a rejected body, so that the client gets the response and not a reset.
MINIMUM_AIOHTTP = (3, 14, 3)  # The first version without the known request smuggling and heap read.


def check_parser() -> None:
    """Raises StartError if aiohttp is too old or uses its Python parser: both accept smuggled requests."""
    version = tuple(int(part) for part in aiohttp.__version__.split(".")[:3] if part.isdigit())
    if version < MINIMUM_AIOHTTP:
        raise StartError(f"aiohttp {aiohttp.__version__} is too old: install 3.14.3 or later.")
    if http_parser.HttpRequestParser.__module__ != "aiohttp._http_parser":
        raise StartError("aiohttp runs without its C parser: install its wheel and unset AIOHTTP_NO_EXTENSIONS.")


class EdgeServer(web.Server):
    """Accepts connections and handles their requests by `routes`, or by `fast_path` if it accepts them."""

    def __init__(
        self,
        routes: Router,
        error_responses: ErrorResponses,
        drain_state: DrainState,
        config: GatewayConfig,
        fast_path: FastPathHandler | None = None,
    ) -> None:
        super().__init__(
            self._handle,  # type: ignore[arg-type]  # HttpResponse instead of aiohttp's response
            handler_cancellation=True,
            keepalive_timeout=config.idle_timeout_s,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGER_S,
        )
        self.routes = routes
        self.error_responses = error_responses
        self.drain_state = drain_state
        self.fast_path = fast_path
        self.header_cache = HeaderCache()
        self.cors = Cors(config.cors_origins) if config.cors_origins else None
        self.headers_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.header_timeout_s)
        self.body_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.body_timeout_s)
        self.write_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.write_timeout_s)
        self.close_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.write_timeout_s)
        self.watches = (self.headers_watch, self.body_watch, self.write_watch, self.close_watch)
        self.ping_watch: ProgressTimers[EventStream] = ProgressTimers(PING_EVERY_S)
        self.max_connections = config.max_connections
        self.open_connections = 0
        self.customer_connections = CustomerConnections(config.customer_connections)

    def __call__(self) -> RequestHandler:
        return EdgeConnection(self, loop=self._loop, **self._kwargs)

    async def _handle(self, request: web.BaseRequest) -> HttpResponse:
        request_id = new_request_id()
        try:
            response = await self._route(request, request_id)
        except RequestError as error:
            response = self._error(request, error, request_id)
        except Exception as error:  # noqa: BLE001  # every exception becomes a 500
            log_fault("request failed", error, request_id=request_id)
            response = self._error(request, RequestError(ErrorCode.INTERNAL_ERROR), request_id)
        if self.cors is not None and serves_customers(path_of(request.raw_path)):
            response.lines += self.cors.lines(request.headers)
        # The rest of an unread body would be parsed as the next request, and aiohttp's parser drops or misreads data that
        # arrives in one piece with an Upgrade of any protocol.
        upgrade = "Upgrade" in request.headers or request.method == "CONNECT"
        if self.drain_state.leaving or not request.content.is_eof() or upgrade:
            response.close = True
        # A body that ended with an error returns only that error.
        response.abort = request.content.exception() is not None
        return response

    async def _route(self, request: web.BaseRequest, request_id: str) -> HttpResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            raise RequestError(ErrorCode.INVALID_REQUEST, "This server does not upgrade connections.", "Upgrade")
        found = self.routes.find(request.raw_path)
        if found is None:
            raise self.routes.not_found(request.raw_path)
        methods, tail = found
        route = methods.get(request.method)
        if route is None:
            cors = self.cors if serves_customers(path_of(request.raw_path)) else None
            if cors is not None and request.method == "OPTIONS":
                preflight = cors.preflight(request.headers, methods, request_id)
                if preflight is not None:
                    return preflight
            allowed = [("Allow", ", ".join(sorted(methods)))]
            return self._error(request, RequestError(ErrorCode.METHOD_NOT_ALLOWED), request_id, allowed)
        return await route.handler(RoutedRequest(request, request_id, tail, auxiliary=not route.queued))

    def _error(
        self, request: web.BaseRequest, error: RequestError, request_id: str, headers: Headers | None = None
    ) -> HttpResponse:
        """The response for `error`, in the form that the client expects."""
        problem, form = wants_problem(request.headers), self.routes.form(request.raw_path)
        return self.error_responses.answer(error, request_id, headers, problem=problem, form=form)

    def internal_error(self, error: BaseException | None, request_id: str, *, problem: bool = False) -> HttpResponse:
        """The 500 of an exception. Logs where it was raised, without its message, which may quote the client."""
        log_fault("request failed", error, request_id=request_id)
        return self.error_responses.answer(RequestError(ErrorCode.INTERNAL_ERROR), request_id, problem=problem)

    def sweep(self, now: float) -> None:
        """Handle the timers that expired at `now` (the loop's clock)."""
        for connection in self.headers_watch.expired(now):
            connection.reject(RequestError(ErrorCode.REQUEST_TIMEOUT))
        for connection in self.body_watch.expired(now):
            connection.fail_body(ErrorCode.REQUEST_TIMEOUT)
        for connection in (*self.write_watch.expired(now), *self.close_watch.expired(now)):
            connection.abort()
        for stream in self.ping_watch.expired(now):
            stream.ping(now)

    def used_within(self, seconds: float) -> bool:
        """Whether a connection has a request, or had one so recently."""
        now = self._loop.time()
        return any(cast("EdgeConnection", each).idle_s(now) < seconds for each in self.connections)

    def leave(self) -> None:
        """Close idle connections now, and the others after their response."""
        for connection in self.connections:
            cast("EdgeConnection", connection).leave()

    async def sweep_forever(self) -> None:
        """Check the timers of all connections, forever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self._loop.time())


async def serve(server: EdgeServer, config: GatewayConfig) -> tuple[web.ServerRunner, ListeningPort]:
    """Listen on the address in `config`. Returns the runner and the port."""
    runner = web.ServerRunner(server, shutdown_timeout=0.5)
    await runner.setup()
    try:
        port = await listen(runner, config.host, config.port, config.backlog, reuse_port=config.reuse_port)
    except OSError as error:
        with contextlib.suppress(Exception):
            await runner.cleanup()
        raise StartError(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.") from error
    return runner, port
