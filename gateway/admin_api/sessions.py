"""Sign-in of browsers: a session in a cookie, for the token of an operator or through an identity provider."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

import msgspec
import structlog
from aiohttp import web

from gateway.admin_api.authentication import (
    ENDED,
    NO_CACHE,
    REQUEST_HEADER,
    SESSION_COOKIE,
    Credentials,
    OperatorAuth,
    check_request_header,
    live_session,
)
from gateway.admin_api.oidc import CALLBACK_PATH, START_PATH, OidcSignIn
from gateway.admin_api.oidc_provider import OidcConfig
from gateway.admin_api.route import PREFIX
from gateway.http.response import JSON
from gateway.openapi.endpoint_kinds import ANY_PATH_ERRORS
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription
from gateway.openapi.schemas import NOT_EMPTY, only
from ledger.admin.sessions import OperatorSession, begin_session, end_session, session_hash
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RequestError

SESSION_PATH, SIGN_IN_PATH = f"{PREFIX}/session", f"{PREFIX}/sign-in"
_HEADERS = ("x-request-id", "Cache-Control")
_SENT = ResponseDescription(description="Sent on.", headers=(*_HEADERS, "Location", "Set-Cookie"))
_AUTHENTICATED = frozenset({ErrorCode.INVALID_API_KEY, ErrorCode.CATALOG_UNAVAILABLE})

log = structlog.get_logger("admin")


class SessionState(msgspec.Struct):
    """A session: who signed in, with which role, and when it ends."""

    operator: str
    role: str
    expires_at: datetime


class SignIn(msgspec.Struct):
    """How to sign in beside the token of an operator."""

    oidc: bool


class SessionHandlers:
    """The addresses of sessions. `connection` opens one of the connections of the server."""

    def __init__(
        self,
        auth: OperatorAuth,
        connection: Callable[[], AbstractAsyncContextManager[Connection]],
        oidc: OidcConfig | None,
    ) -> None:
        self._auth = auth
        self._connection = connection
        self._has_oidc = oidc is not None
        self._oidc = OidcSignIn(oidc, auth, connection)

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post(SESSION_PATH, self.sign_in)
        router.add_get(SESSION_PATH, self.show, allow_head=False)
        router.add_delete(SESSION_PATH, self.sign_out)
        router.add_get(SIGN_IN_PATH, self.ways, allow_head=False)
        router.add_get(START_PATH, self._oidc.start, allow_head=False)
        router.add_get(CALLBACK_PATH, self._oidc.callback, allow_head=False)

    async def sign_in(self, request: web.Request) -> web.Response:
        """Begin a session of the operator with the token in `Authorization`."""
        given = Credentials(self._auth.token_hash(request), is_token=True)
        async with self._connection() as connection:
            operator = await self._auth.operator(connection, request, given)
            secret = await begin_session(connection, given.hashed)
            session = await live_session(connection, session_hash(secret))
        log.info("admin_sign_in", operator=operator.name, role=operator.role)
        response = _session_response(session)
        self._auth.set_cookie(request, response, SESSION_COOKIE, secret)
        return response

    async def show(self, request: web.Request) -> web.Response:
        """The session of the cookie."""
        hashed = self._auth.cookie_hash(request)
        if hashed is None:
            raise RequestError(ErrorCode.INVALID_API_KEY, ENDED)
        async with self._connection() as connection:
            return _session_response(await live_session(connection, hashed))

    async def sign_out(self, request: web.Request) -> web.Response:
        """End the session of the cookie, if there is one."""
        hashed = self._auth.cookie_hash(request)
        if hashed is not None or REQUEST_HEADER in request.headers:
            check_request_header(request)
        if hashed is not None:
            async with self._connection() as connection:
                await end_session(connection, hashed)
        response = web.Response(status=204, headers=[NO_CACHE])
        self._auth.set_cookie(request, response, SESSION_COOKIE, "")
        return response

    async def ways(self, _: web.Request) -> web.Response:
        """How to sign in. It needs no token, and no database."""
        return web.json_response({"oidc": self._has_oidc}, headers=[NO_CACHE])


def _session_response(session: OperatorSession) -> web.Response:
    state = SessionState(session.operator.name, session.operator.role, session.expires_at)
    return web.Response(body=msgspec.json.encode(state), content_type=JSON, headers=[NO_CACHE])


def _endpoint(path: str, method: str, summary: str, success: ResponseDescription, **fields: Any) -> ApiEndpoint:
    errors = ANY_PATH_ERRORS | fields.pop("errors", frozenset())
    status = 200 if success.content else 303 if "Location" in success.headers else 204
    return ApiEndpoint(
        path=path,
        methods=(method,),
        tag="sessions",
        summary=summary,
        responses={status: success},
        errors=errors,
        **fields,
    )


_BEGUN = ResponseDescription(description="Signed in.", content={JSON: SessionState}, headers=(*_HEADERS, "Set-Cookie"))
ENDPOINTS = (
    _endpoint(
        SESSION_PATH,
        "POST",
        "Sign in with the token of an operator: set the cookie of a session of 8 hours",
        _BEGUN,
        errors=_AUTHENTICATED | {ErrorCode.RATE_LIMIT_EXCEEDED},
        token="operator",  # noqa: S106 - the kind of token
    ),
    _endpoint(
        SESSION_PATH,
        "GET",
        "Show the session of the cookie",
        ResponseDescription(description="Signed in.", content={JSON: SessionState}, headers=_HEADERS),
        errors=_AUTHENTICATED,
    ),
    _endpoint(
        SESSION_PATH,
        "DELETE",
        "Sign out: end the session of the cookie",
        ResponseDescription(description="Signed out.", headers=(*_HEADERS, "Set-Cookie")),
        errors=frozenset({ErrorCode.CROSS_SITE, ErrorCode.CATALOG_UNAVAILABLE}),
        parameters=(Parameter(REQUEST_HEADER, "header", "Needed with the cookie.", only("1")),),
    ),
    _endpoint(
        SIGN_IN_PATH,
        "GET",
        "How to sign in beside the token of an operator",
        ResponseDescription(description="Found.", content={JSON: SignIn}, headers=_HEADERS),
    ),
    _endpoint(
        START_PATH,
        "GET",
        "Begin the sign-in through the identity provider: send the browser there",
        _SENT,
        errors=frozenset({ErrorCode.NOT_FOUND, ErrorCode.IDENTITY_PROVIDER_UNAVAILABLE}),
        parameters=(Parameter("next", "query", "The page after the sign-in; default: /admin/.", NOT_EMPTY),),
    ),
    _endpoint(
        CALLBACK_PATH,
        "GET",
        "End it with a session, when the provider sends the browser back",
        _SENT,
        errors=frozenset(
            {
                ErrorCode.NOT_FOUND,
                ErrorCode.SIGN_IN_FAILED,
                ErrorCode.PERMISSION_DENIED,
                ErrorCode.IDENTITY_PROVIDER_UNAVAILABLE,
                ErrorCode.CATALOG_UNAVAILABLE,
            }
        ),
    ),
)
"""The description of the addresses."""
