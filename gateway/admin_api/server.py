"""The server of the admin API: authentication, roles, bodies, transactions and errors around the handlers of its routes."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from aiohttp import web
from asyncpg import DataError

from gateway.admin_api.authentication import NO_CACHE, OperatorAuth
from gateway.admin_api.bodies import given_fields
from gateway.admin_api.oidc_provider import OidcConfig
from gateway.admin_api.page import add_page
from gateway.admin_api.roles import ROLE_ACTIONS, Action, least_role
from gateway.admin_api.route import AdminCall, AdminResult, AdminRoute
from gateway.admin_api.sessions import SessionHandlers
from gateway.auth.client_address import Network
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.error_responses import ErrorResponses
from gateway.http.pages import check_parameters
from gateway.http.problem_details import wants_problem
from gateway.http.response import JSON, HttpResponse
from gateway.http.router import method_not_allowed
from gateway.http.validation import invalid
from ledger.admin.changes import changing
from ledger.admin.errors import BadValue, ChangeRejected, MissingRow
from ledger.admin.operators import Operator
from ledger.admin.transaction import Blocked
from ledger.postgres import AWAY, Connection, reason
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0
CONNECTIONS = 8
"""Requests that use PostgreSQL at a time, each with a connection."""

MOST_WAITING = 100
"""Requests that wait for one of them; more get 503."""


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""Opens a connection that waits for locks for a bounded time. Raises AWAY and Blocked."""

log = structlog.get_logger("admin")
_encode = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """Configuration of the admin API. `auth_failures`: in the notation of `limits`; "off": unlimited.

    `callback_secret`: webhook secrets are derived from it; empty: there are none. `oidc`: None without a provider.
    """

    host: str
    port: int
    auth_failures: str
    trusted_proxies: Sequence[Network]
    callback_secret: bytes = field(repr=False)
    oidc: OidcConfig | None = None


class AdminServer:
    """Serves routes with connections that `connect` opens. `documents`: paths with a constant document, without a token."""

    def __init__(
        self, config: AdminConfig, connect: Connect, routes: Sequence[AdminRoute], documents: Mapping[str, object]
    ) -> None:
        self._config = config
        self._connect = connect
        self._auth = OperatorAuth(config.auth_failures, config.trusted_proxies)
        self._errors = ErrorResponses(random.random)
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._waiting = 0
        self._app = web.Application(middlewares=[self._answered], client_max_size=MAX_BODY_BYTES)
        for route in routes:
            self._app.router.add_route(route.method, route.path, self._handler_of(route))
        SessionHandlers(self._auth, self._connection, config.oidc).add_to(self._app.router)
        for path, document in documents.items():
            self._app.router.add_get(path, _constant(document), allow_head=False)
        add_page(self._app.router)
        self._app.router.add_get("/livez", _constant({"status": "ok"}))
        self._app.router.add_get("/readyz", self._ready)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Serve during the block, which gets the port. Raises OSError."""
        runner = web.AppRunner(self._app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._config.host, self._config.port).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    @web.middleware
    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The response of the handler, or that of its error, with the id of the request."""
        request_id = new_request_id()
        try:
            response: web.StreamResponse = await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - any fault is an error response
            fault, headers = _request_error(error)
            problem = wants_problem(request.headers)
            return _as_aiohttp(self._errors.answer(fault, request_id, headers, problem=problem))
        response.headers["x-request-id"] = request_id
        return response

    async def _ready(self, _: web.Request) -> web.Response:
        async with self._connection() as connection:
            await connection.execute("SELECT 1")
        return web.json_response({"status": "ok"})

    def _handler_of(self, route: AdminRoute) -> Any:
        decoder: Any = None if route.body is None else msgspec.json.Decoder(route.body)
        known = {each.name for each in route.query} | ({"dry_run"} if route.may_change else set())

        async def handle(request: web.Request) -> web.Response:
            credentials = self._auth.credentials(request)
            raw = await _body(request)  # Before a connection is used.
            async with self._connection() as connection:
                operator = await self._auth.operator(connection, request, credentials)
                _check_role(operator, route.least_action)
                query = _query(request, known)
                dry_run = _dry_run(query)
                values = _values(request, raw, route, decoder)
                _check_role(operator, route.action_for(values))
                call = AdminCall(
                    connection=connection,
                    operator=operator,
                    path=request.match_info,
                    query=query,
                    values=values,
                    dry_run=dry_run,
                    if_match=_if_match(request),
                    callback_secret=self._config.callback_secret,
                )
                if not route.may_change:
                    result = await route.handler(call)
                else:
                    async with changing(connection, operator.actor, dry_run=dry_run):
                        result = await route.handler(call)
            if route.may_change and not dry_run:
                log.info("admin_change", operator=operator.name, method=route.method, route=route.path)
            return _response(route, result, dry_run=dry_run)

        return handle

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """One of a bounded number of connections. Raises RequestError if too many requests wait for one, and AWAY."""
        if self._waiting >= MOST_WAITING:
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many requests of operators are open; try again.")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            async with self._connect() as connection:
                yield connection
        finally:
            self._slots.release()


def _constant(document: object) -> Any:
    body = _encode(document)

    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=JSON)

    return handle


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(ErrorCode.REQUEST_TIMEOUT) from None


def _values(request: web.Request, raw: bytes, route: AdminRoute, decoder: Any) -> dict[str, Any]:
    """The fields of the body. Raises RequestError."""
    if decoder is None:
        if raw.strip():
            raise invalid(None, "This address takes no body.")
        return {}
    if not raw.strip() and not route.body_required:
        return {}
    if request.content_type != JSON:
        raise RequestError(ErrorCode.UNSUPPORTED_MEDIA_TYPE)
    values = given_fields(decode(decoder, raw, absent=0))
    check_duplicates(raw)
    if route.method == "PATCH" and not values:
        raise invalid(None, "The body must have at least one field.")
    return values


def _query(request: web.Request, known: set[str]) -> dict[str, str]:
    """The parameters of the query. Raises RequestError."""
    check_parameters(request.query, known)
    for name in request.query:
        if not request.query[name]:
            raise invalid(name, f"The parameter `{name}` is empty: leave it out, or send a value.")
    return dict(request.query)


def _dry_run(query: Mapping[str, str]) -> bool:
    text = query.get("dry_run", "false")
    if text not in ("true", "false"):
        raise invalid("dry_run", "`dry_run` must be true or false.")
    return text == "true"


def _if_match(request: web.Request) -> tuple[str, ...] | None:
    """The ETags of If-Match; None without it. A weak one matches no row."""
    values = request.headers.getall("If-Match", ())
    return tuple(each.strip() for value in values for each in value.split(",")) if values else None


def _check_role(operator: Operator, action: Action) -> None:
    if action not in ROLE_ACTIONS.get(operator.role, frozenset()):
        message = f"The role {operator.role} of {operator.name} does not allow this: it needs {least_role(action)}."
        raise RequestError(ErrorCode.PERMISSION_DENIED, message)


def _response(route: AdminRoute, result: AdminResult, *, dry_run: bool) -> web.Response:
    headers = dict([NO_CACHE]) | ({} if result.etag is None or not route.etag else {"ETag": result.etag})
    status = 200 if dry_run else route.status
    return web.Response(status=status, body=_encode(result.document), content_type=JSON, headers=headers)


def _request_error(error: Exception) -> tuple[RequestError, list[tuple[str, str]] | None]:
    """The error of a request for any exception, with further headers. A fault of ours is logged."""
    headers = None
    match error:
        case RequestError():
            found = error
        case MissingRow():
            found = RequestError(ErrorCode.NOT_FOUND, str(error))
        case BadValue():
            found = invalid(error.field, str(error))
        case ChangeRejected() | Blocked():
            found = RequestError(ErrorCode.CONFLICT, str(error))
        case DataError() | UnicodeEncodeError():
            found = invalid(None, "A value of the request cannot be stored in PostgreSQL.")
        case web.HTTPNotFound():
            found = RequestError(ErrorCode.NOT_FOUND, "There is no such address: /admin/v1/openapi.json lists all.")
        case web.HTTPMethodNotAllowed():
            found, headers = method_not_allowed(error.allowed_methods)
        case web.HTTPRequestEntityTooLarge():
            found = RequestError(ErrorCode.REQUEST_TOO_LARGE)
        case web.HTTPException():
            found = invalid(None, f"{error.reason}.")
        case _ if isinstance(error, AWAY):
            log.warning("database_away", error=reason(error))
            found = RequestError(ErrorCode.CATALOG_UNAVAILABLE, "PostgreSQL does not respond; try again soon.")
        case _:
            log_fault("request of an operator", error)
            found = RequestError(ErrorCode.INTERNAL_ERROR)
    return found, headers


def _as_aiohttp(response: HttpResponse) -> web.Response:
    headers = [*response.headers, NO_CACHE]
    return web.Response(status=response.status, body=response.body, content_type=response.content_type, headers=headers)
