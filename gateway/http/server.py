"""The HTTP server: its connections with their timeouts and caps, and errors that do not quote the input.

One sweep checks the timers of all connections (headers, body, unread responses, closing, idle); the fast path, for requests
in one piece, starts none of them. Input is neither returned nor logged.
"""

import asyncio

import aiohttp
from aiohttp import http_parser

from gateway.config import GatewayConfig
from gateway.http.connection import EdgeConnection, FastPathHandler
from gateway.http.cors import Cors, serves_customers
from gateway.http.error_responses import ErrorResponses
from gateway.http.header_cache import HeaderCache
from gateway.http.listening import ListeningPort, listen
from gateway.http.parsed_request import ParsedRequest
from gateway.http.problem_details import wants_problem
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import CustomerConnections, DrainState, RoutedRequest, Router, method_not_allowed, path_of
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


class EdgeServer:
    """Creates the protocol of each connection, and handles their requests by `routes`, or by `fast_path` if it accepts them.

    `now`: the loop's clock at the last sweep. `requests_count`: requests that were handled in a task.
    """

    def __init__(
        self,
        routes: Router,
        error_responses: ErrorResponses,
        drain_state: DrainState,
        config: GatewayConfig,
        fast_path: FastPathHandler | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time()
        self.routes = routes
        self.error_responses = error_responses
        self.drain_state = drain_state
        self.fast_path = fast_path
        self.header_cache = HeaderCache()
        self.cors = Cors(config.cors_origins) if config.cors_origins else None
        self.headers_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.header_timeout_s)
        self.body_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.body_timeout_s)
        self.linger_watch: ProgressTimers[EdgeConnection] = ProgressTimers(LINGER_S)
        self.write_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.write_timeout_s)
        self.close_watch: ProgressTimers[EdgeConnection] = ProgressTimers(config.write_timeout_s)
        self.watches = (self.headers_watch, self.body_watch, self.linger_watch, self.write_watch, self.close_watch)
        self.ping_watch: ProgressTimers[EventStream] = ProgressTimers(PING_EVERY_S)
        self.idle_timeout_s = config.idle_timeout_s
        self.max_connections = config.max_connections
        self.connections: set[EdgeConnection] = set()
        self.customer_connections = CustomerConnections(config.customer_connections)
        self.requests_count = 0

    def __call__(self) -> EdgeConnection:
        return EdgeConnection(self)

    @property
    def open_connections(self) -> int:
        """The number of open connections."""
        return len(self.connections)

    async def handle(self, request: ParsedRequest) -> HttpResponse:
        """Handle a request in the task of its connection. Every exception becomes a response."""
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
        # The rest of an unread body would be parsed as the next request, and aiohttp's parser drops or misreads data behind
        # an Upgrade of any protocol.
        upgrade = "Upgrade" in request.headers or request.method == "CONNECT"
        if self.drain_state.leaving or not request.content.is_eof() or upgrade:
            response.close = True
        # A body that ended with an error returns only that error.
        response.abort = request.content.exception() is not None
        return response

    async def _route(self, request: ParsedRequest, request_id: str) -> HttpResponse:
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
            error, allowed = method_not_allowed(methods)
            return self._error(request, error, request_id, allowed)
        return await route.handler(RoutedRequest(request, request_id, tail, auxiliary=not route.queued))

    def _error(
        self, request: ParsedRequest, error: RequestError, request_id: str, headers: Headers | None = None
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
        self.now = now
        for connection in self.headers_watch.expired(now):
            connection.reject(RequestError(ErrorCode.REQUEST_TIMEOUT))
        for connection in (*self.body_watch.expired(now), *self.linger_watch.expired(now)):
            connection.fail_body(ErrorCode.REQUEST_TIMEOUT)
        for connection in (*self.write_watch.expired(now), *self.close_watch.expired(now)):
            connection.abort()
        for stream in self.ping_watch.expired(now):
            stream.ping(now)
        since = now - self.idle_timeout_s - SWEEP_S  # `idle_since` is early by a sweep at most.
        for connection in [each for each in self.connections if each.idle_since < since and each.idle]:
            connection.close()

    def used_within(self, seconds: float) -> bool:
        """Whether a connection has a request, or had one so recently."""
        since = self.loop.time() - seconds - SWEEP_S
        return any(each.idle_since > since or not each.idle for each in self.connections)

    def leave(self) -> None:
        """Close idle connections now, and the others after their response."""
        for connection in list(self.connections):
            connection.leave()

    async def shutdown(self, timeout_s: float) -> None:
        """Close all connections. Handlers get this time to end, then they are cancelled."""
        for connection in list(self.connections):
            if connection.task is None:
                connection.close()
            else:
                connection.close_after_response()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self.connections):
            connection.close()

    async def sweep_forever(self) -> None:
        """Check the timers of all connections, forever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self.loop.time())


async def serve(server: EdgeServer, config: GatewayConfig) -> ListeningPort:
    """Listen on the address in `config`. Raises StartError."""
    try:
        return await listen(server, config.host, config.port, config.backlog, reuse_port=config.reuse_port)
    except OSError as error:
        raise StartError(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.") from error
