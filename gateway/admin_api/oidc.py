"""Sign-in of browsers through an OpenID Connect provider: the authorization code flow with PKCE, state and nonce.

Between its two requests a sign-in is in a signed cookie, so that any process can end it and nothing is stored for those that
never return. `SameSite=Lax`: the provider sends the browser back from its own site.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from html import escape
from typing import Any

import jwt
import structlog
from aiohttp import web
from jwt.exceptions import PyJWTError

from gateway.admin_api.authentication import NO_CACHE, SESSION_COOKIE, CookieKind, OperatorAuth
from gateway.admin_api.oidc_provider import OidcConfig, OidcProvider, SignInRequest, failed
from gateway.admin_api.roles import ROLE_ACTIONS
from gateway.http.validation import invalid
from ledger.admin.operators import Operator
from ledger.admin.sessions import begin_session
from ledger.postgres import Connection
from scheduler.errors import HTTP, ErrorCode, RequestError

START_PATH, CALLBACK_PATH = "/admin/oidc/start", "/admin/oidc/callback"
HOME = "/admin/"
LASTS_S = 600
"""From the start of a sign-in to its end."""

COOKIE = CookieKind("tierlane_admin_oidc", LASTS_S, "Lax")

MOST_CALLBACKS = 8
"""Sign-ins that wait for the provider at a time; more get 503."""

PURPOSE = b"tierlane admin sign-in 1"
SIGNED = "HS256"
NOT_CONFIGURED = "There is no identity provider: TIERLANE_ADMIN_OIDC_ISSUER is not set."
BEGIN_AGAIN = "The sign-in has expired, was begun in another browser or tab, or has ended already: begin it again."
LOCAL_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""Printable ASCII without backslash, which browsers read as a slash: no address of another host."""

NAME = re.compile(r"[!-~]{1,200}")

log = structlog.get_logger("admin")


class OidcSignIn:
    """The addresses of the sign-in. Without a configuration they return 404."""

    def __init__(
        self,
        config: OidcConfig | None,
        auth: OperatorAuth,
        connection: Callable[[], AbstractAsyncContextManager[Connection]],
    ) -> None:
        self._config = config
        self._provider = None if config is None else OidcProvider(config)
        self._key = b"" if config is None else hmac.digest(config.client_secret.encode(), PURPOSE, "sha256")
        self._auth = auth
        self._connection = connection
        self._callbacks = 0

    async def start(self, request: web.Request) -> web.Response:
        """Send the browser to the provider. `next`: the local path of the page after the sign-in."""
        if self._provider is None:
            raise RequestError(ErrorCode.NOT_FOUND, NOT_CONFIGURED)
        page = request.query.get("next", HOME)
        if LOCAL_PATH.fullmatch(page) is None:
            raise invalid("next", "`next` must be a path of this server, such as /admin/.")
        redirect_uri = f"{'https' if self._auth.is_secure(request) else 'http'}://{request.host}{CALLBACK_PATH}"
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        sign_in = SignInRequest(state, nonce, verifier, redirect_uri)
        response = _redirect(await self._provider.authorization_url(sign_in))
        kept = sign_in._asdict() | {"next": page, "exp": int(time.time()) + LASTS_S}
        self._auth.set_cookie(request, response, COOKIE, jwt.encode(kept, self._key, SIGNED))
        return response

    async def callback(self, request: web.Request) -> web.Response:
        """End the sign-in with a session, and open the page that it was begun for; for browsers, errors are a page."""
        try:
            response = await self._callback(request)
        except RequestError as error:
            log.info("admin_sign_in_failed", reason=error.message)
            if "text/html" not in request.headers.get("Accept", ""):
                raise
            response = _error_page(error)
        self._auth.set_cookie(request, response, COOKIE, "")
        return response

    async def _callback(self, request: web.Request) -> web.Response:
        if self._config is None or self._provider is None:
            raise RequestError(ErrorCode.NOT_FOUND, NOT_CONFIGURED)
        query = request.query
        try:
            kept = jwt.decode(self._auth.cookie(request, COOKIE) or "", self._key, [SIGNED])
        except PyJWTError as error:
            raise failed(BEGIN_AGAIN) from error
        page = kept.pop("next")
        sign_in = SignInRequest(**{name: kept[name] for name in SignInRequest._fields})
        if not hmac.compare_digest(query.get("state", "").encode(), sign_in.state.encode()):
            raise failed(BEGIN_AGAIN)
        if "error" in query or "code" not in query:
            reason = re.sub(r"[^\w .-]", "", query.get("error", "no code"))[:100]
            raise failed(f"The identity provider did not sign in: {reason}.")
        if self._callbacks >= MOST_CALLBACKS:
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many sign-ins wait for the identity provider; try again.")
        self._callbacks += 1
        try:
            claims = await self._provider.claims(query["code"], sign_in)
        finally:
            self._callbacks -= 1
        person = person_of(claims, self._config)
        async with self._connection() as connection:
            secret = await begin_session(connection, person)
        log.info("admin_sign_in", operator=person.name, role=person.role)
        response = _redirect(page)
        self._auth.set_cookie(request, response, SESSION_COOKIE, secret)
        return response


def person_of(claims: Mapping[str, Any], config: OidcConfig) -> Operator:
    """The person with these claims, named by the email address unless it is not verified, with the highest role of the groups.

    Raises RequestError where no group has a role.
    """
    email = None if claims.get("email_verified") is False else claims.get("email")
    names = [each for each in (email, claims["sub"]) if isinstance(each, str) and NAME.fullmatch(each)]
    if not names:
        raise failed("The identity provider did not name the person: neither email nor sub is printable ASCII.")
    found = claims.get(config.groups_claim, ())
    groups = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    roles = {role for group, role in config.roles.items() if group in groups}
    if not roles:
        message = (
            f"No group of {names[0]} in the claim `{config.groups_claim}` has a role: "
            f"TIERLANE_ADMIN_OIDC_ROLES maps {', '.join(config.roles)}."
        )
        raise RequestError(ErrorCode.PERMISSION_DENIED, message)
    return Operator(f"oidc:{names[0]}", max(roles, key=list(ROLE_ACTIONS).index))


def _redirect(url: str) -> web.Response:
    return web.Response(status=303, headers=[("Location", url), NO_CACHE])


def _error_page(error: RequestError) -> web.Response:
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Sign-in failed</title><h1>Sign-in failed</h1>"
        f"<p>{escape(error.message)}</p><p><a href={START_PATH}>Sign in again</a></p></html>"
    )
    headers = [NO_CACHE, ("Content-Security-Policy", "default-src 'none'"), ("Referrer-Policy", "no-referrer")]
    return web.Response(status=HTTP[error.code].status, text=text, content_type="text/html", headers=headers)
