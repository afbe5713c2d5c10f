"""Sign-in to the admin API through a provider that this process plays: what a real one cannot be made to return.

tests/e2e/test_oidc.py has a real provider.
"""

import base64
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import jwt
import pytest
from aiohttp import web
from yarl import URL

from gateway.admin_api.oidc_provider import OidcConfig
from integration.admin_api_fixtures import served
from integration.ledger_fixtures import database_url, db, postgres_server
from jwt_issuer import jwk, private_key

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
ROLES = {"staff": "viewer", "ops": "operator", "root": "admin"}


@dataclass
class Provider:
    """A provider on a port of its own; what it returns can be changed."""

    url: str = ""
    issuer: str | None = None
    claims: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    key: int = 0
    token_response: tuple[int, dict[str, Any]] | None = None
    forms: list[dict[str, str]] = field(default_factory=list)
    authorization: str = ""
    nonce: str = ""

    async def metadata(self, _: web.Request) -> web.Response:
        paths = ("authorization", "token", "userinfo")
        document = {f"{name}_endpoint": f"{self.url}/{name}" for name in paths}
        return web.json_response(document | {"issuer": self.issuer or self.url, "jwks_uri": f"{self.url}/jwks"})

    async def jwks(self, _: web.Request) -> web.Response:
        return web.json_response({"keys": [jwk("ES256")]})

    async def token(self, request: web.Request) -> web.Response:
        self.forms.append({name: str(value) for name, value in (await request.post()).items()})
        self.authorization = request.headers["Authorization"]
        if self.token_response is not None:
            return web.json_response(self.token_response[1], status=self.token_response[0])
        now = int(time.time())
        claims = {"iss": self.url, "aud": "tierlane", "sub": "u-1", "iat": now, "exp": now + 300, "nonce": self.nonce}
        claims = {name: value for name, value in (claims | self.claims).items() if value is not None}
        token = jwt.encode(claims, private_key("ES256", self.key), "ES256", {"kid": "ES256-0"})
        return web.json_response({"id_token": token, "access_token": "a", "token_type": "Bearer"})

    async def userinfo(self, _: web.Request) -> web.Response:
        return web.json_response({"sub": "u-1"} | self.about)


class Browser:
    """A browser before the admin API, as far as its cookies and redirects matter."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.cookies: dict[str, str] = {}
        self._http = http

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        """Status, Location and text of a response."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers |= {"Cookie": cookies} if cookies else {}
        url = URL(self.url + path, encoded=True)
        async with self._http.get(url, headers=headers, allow_redirects=False) as response:
            for text in response.headers.getall("Set-Cookie", ()):
                for cookie in SimpleCookie(text).values():
                    self.cookies[cookie.key] = cookie.value
            return response.status, response.headers.get("Location", ""), await response.text()

    async def start(self, query: str = "") -> dict[str, str]:
        """The query that the provider gets."""
        status, location, text = await self.get(f"/admin/oidc/start{query}")
        assert status == 303, text
        return {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}


async def signed_in(browser: Browser, provider: Provider) -> tuple[int, str]:
    """The status and the message of a whole sign-in; "" for one that succeeded."""
    query = await browser.start()
    provider.nonce = query["nonce"]
    status, _, text = await browser.get(f"/admin/oidc/callback?code=c-1&state={query['state']}")
    return status, json.loads(text)["error"]["message"] if text else ""


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    """A running provider."""
    provider = Provider()
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", provider.metadata)
    app.router.add_get("/jwks", provider.jwks)
    app.router.add_post("/token", provider.token)
    app.router.add_get("/userinfo", provider.userinfo)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield provider
    await runner.cleanup()


@pytest.fixture
async def browser(provider: Provider, database_url: str) -> AsyncIterator[Browser]:
    """A browser before an admin API with this provider."""
    async with served(database_url, oidc=config_for(provider.url)) as url, aiohttp.ClientSession() as http:
        yield Browser(url, http)


def config_for(issuer: str) -> OidcConfig:
    """A configuration; its secret needs the encoding of RFC 6749."""
    return OidcConfig(
        issuer=issuer,
        client_id="tierlane",
        client_secret="s+e c:r",
        scopes="openid email",
        groups_claim="groups",
        roles=ROLES,
    )


async def test_a_sign_in_from_start_to_session(browser: Browser, provider: Provider, db: Connection) -> None:
    """With PKCE, state and nonce; the person is named by the email, has the highest role, and returns to its page."""
    provider.claims = {"email": "ann@example.com", "groups": ["staff", "ops", "other"]}
    query = await browser.start("?next=/admin/%3Fq%3D1%23/customers/acme")
    provider.nonce = query["nonce"]
    status, location, _ = await browser.get(f"/admin/oidc/callback?code=c-1&state={query['state']}")
    session = json.loads((await browser.get("/admin/v1/session"))[2])
    sign_in = json.loads((await browser.get("/admin/v1/sign-in"))[2])
    (form,) = provider.forms
    challenge = base64.urlsafe_b64encode(sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()

    assert (status, location) == (303, "/admin/?q=1#/customers/acme")
    assert (session["operator"], session["role"], sign_in) == ("oidc:ann@example.com", "operator", {"oidc": True})
    assert (query["code_challenge"], query["code_challenge_method"]) == (challenge, "S256")
    assert query["redirect_uri"] == form["redirect_uri"] == f"{browser.url}/admin/oidc/callback"
    assert (query["scope"], form["code"], form["grant_type"]) == ("openid email", "c-1", "authorization_code")
    assert base64.b64decode(provider.authorization.removeprefix("Basic ")) == b"tierlane:s%2Be%20c%3Ar"
    assert browser.cookies["tierlane_admin_oidc"] == ""
    assert await db.fetchval("SELECT person FROM operator_sessions") == "oidc:ann@example.com"


async def test_changes_are_recorded_under_the_person(browser: Browser, provider: Provider, db: Connection) -> None:
    """Within the role."""
    provider.claims = {"email": "ann@example.com", "groups": "root"}
    assert await signed_in(browser, provider) == (303, "")
    cookies = f"tierlane_admin_session={browser.cookies['tierlane_admin_session']}"
    body = {"json": {"name": "acme", "tier": "paid"}, "headers": {"Cookie": cookies, "X-Tierlane-Request": "1"}}
    async with aiohttp.ClientSession() as http, http.post(f"{browser.url}/admin/v1/customers", **body) as response:
        assert response.status == 201

    changed_by = await db.fetchval("SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1")
    assert changed_by == "operator:oidc:ann@example.com"


@pytest.mark.parametrize(
    ("claims", "about", "name", "role"),
    [
        ({"email": "a@b.c"}, {"groups": ["root"]}, "oidc:a@b.c", "admin"),
        ({"groups": ["staff"]}, {}, "oidc:u-1", "viewer"),
        ({"groups": ["staff"], "email": "a@b.c", "email_verified": False}, {}, "oidc:u-1", "viewer"),
        ({"groups": ["staff"], "email": "a b"}, {}, "oidc:u-1", "viewer"),
    ],
)
async def test_names_and_groups(
    browser: Browser, provider: Provider, claims: dict[str, Any], about: dict[str, Any], name: str, role: str
) -> None:
    """Groups from the userinfo endpoint, and `sub` without an email address that is verified."""
    provider.claims, provider.about = claims, about
    assert await signed_in(browser, provider) == (303, "")
    session = json.loads((await browser.get("/admin/v1/session"))[2])

    assert (session["operator"], session["role"]) == (name, role)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        (
            {"claims": {"groups": ["guests"], "email": "a@b.c"}},
            403,
            "No group of a@b.c in the claim `groups` has a role: ",
        ),
        ({"claims": {"groups": {"root": 1}}}, 403, "TIERLANE_ADMIN_OIDC_ROLES maps staff, ops, root."),
        ({"claims": {"aud": "other"}}, 401, "another client than TIERLANE_ADMIN_OIDC_CLIENT_ID (aud)"),
        ({"claims": {"aud": ["tierlane", "other"], "azp": "other"}}, 401, "another client (azp)"),
        ({"claims": {"iss": "http://other"}}, 401, "another issuer than TIERLANE_ADMIN_OIDC_ISSUER"),
        ({"claims": {"nonce": "other"}}, 401, "another sign-in (nonce)"),
        ({"claims": {"exp": 1_000_000_000}}, 401, "has expired: compare the clocks"),
        ({"claims": {"iat": 4_000_000_000}}, 401, "not valid yet: compare the clocks"),
        ({"claims": {"exp": None}}, 401, "missing or malformed"),
        ({"claims": {"sub": "é", "groups": "root"}}, 401, "did not name the person"),
        ({"key": 1}, 401, "signature of the ID token is not valid"),
        ({"about": {"sub": "u-2", "groups": ["root"]}}, 401, "another person"),
        ({"token_response": (400, {"error": "invalid_grant"})}, 401, "used up or expired"),
        ({"token_response": (401, {"error": "invalid_client"})}, 401, "TIERLANE_ADMIN_OIDC_CLIENT_SECRET"),
        ({"token_response": (200, {"id_token": "x"})}, 401, "missing or malformed"),
        ({"token_response": (502, {})}, 503, "/token returned status 502"),
    ],
)
async def test_faults_are_one_sentence(
    browser: Browser, provider: Provider, db: Connection, changes: dict[str, Any], status: int, words: str
) -> None:
    """And no session."""
    for name, value in changes.items():
        setattr(provider, name, value)
    got, message = await signed_in(browser, provider)

    assert got == status
    assert words in message
    assert await db.fetchval("SELECT count(*) FROM operator_sessions") == 0


async def test_clocks_may_differ_by_a_minute(browser: Browser, provider: Provider) -> None:
    """An ID token from the near future, and one that has just expired, are valid."""
    now = int(time.time())
    provider.claims = {"groups": "root", "iat": now + 40, "nbf": now + 40, "exp": now + 300}
    assert await signed_in(browser, provider) == (303, "")
    provider.claims = {"groups": "root", "iat": now - 100, "exp": now - 20}
    assert await signed_in(browser, provider) == (303, "")


async def test_a_callback_belongs_to_the_sign_in_of_its_browser(browser: Browser, provider: Provider) -> None:
    """Another state, a second use, no cookie, an expired one, and a refusal of the provider."""
    provider.claims = {"groups": "root"}
    query = await browser.start()
    bad = await browser.get("/admin/oidc/callback?code=c-1&state=x")
    await signed_in(browser, provider)
    used = await browser.get(f"/admin/oidc/callback?code=c-1&state={query['state']}")
    query = await browser.start()
    kept = browser.cookies["tierlane_admin_oidc"]
    browser.cookies["tierlane_admin_oidc"] = kept[:-2] + "AA"
    forged = await browser.get(f"/admin/oidc/callback?code=c-1&state={query['state']}")
    query = await browser.start()
    refused = await browser.get(f"/admin/oidc/callback?error=access_denied<b>&state={query['state']}")

    for status, _, text in (bad, used, forged):
        assert (status, json.loads(text)["error"]["code"]) == (401, "sign_in_failed")
        assert "begin it again" in text
    assert "did not sign in: access_deniedb." in refused[2]
    assert len(provider.forms) == 1


async def test_a_browser_gets_errors_as_a_page(browser: Browser, provider: Provider) -> None:
    """Which can begin again, and in which nothing of the provider is markup."""
    provider.claims = {"groups": ["guests"], "email": "<b>@x"}
    query = await browser.start()
    provider.nonce = query["nonce"]
    path = f"/admin/oidc/callback?code=c-1&state={query['state']}"
    status, _, text = await browser.get(path, Accept="text/html,*/*")

    assert (status, text[:15]) == (403, "<!doctype html>")
    assert "&lt;b&gt;@x" in text
    assert "href=/admin/oidc/start" in text


@pytest.mark.parametrize("page", ["https://evil.example", "//evil.example", "/\\evil.example", "/a%0d%0ab:c", "a", ""])
async def test_the_page_after_the_sign_in_is_of_this_server(browser: Browser, page: str) -> None:
    """Another address is rejected before the sign-in begins."""
    status, location, text = await browser.get(f"/admin/oidc/start?next={page}")

    assert (status, location, json.loads(text)["error"]["param"]) == (400, "", "next")


async def test_a_provider_that_is_away_or_another_one(provider: Provider, database_url: str, db: Connection) -> None:
    """503 with its address; it is asked again at the next sign-in. Without a provider: 404."""
    async with aiohttp.ClientSession() as http:
        async with served(database_url, oidc=config_for("http://127.0.0.1:1")) as url:
            away = await Browser(url, http).get("/admin/oidc/start")
        async with served(database_url, oidc=config_for(provider.url)) as url:
            provider.issuer = "http://other"
            other = await Browser(url, http).get("/admin/oidc/start")
            provider.issuer = None
            assert (await Browser(url, http).start())["client_id"] == "tierlane"
        async with served(database_url) as url:
            none = [await Browser(url, http).get(f"/admin/oidc/{path}") for path in ("start", "callback?code=1")]

    assert (away[0], other[0]) == (503, 503)
    assert "http://127.0.0.1:1/.well-known/openid-configuration does not respond" in away[2]
    assert "calls itself another issuer" in other[2]
    assert [(status, "TIERLANE_ADMIN_OIDC_ISSUER is not set" in text) for status, _, text in none] == [(404, True)] * 2
