"""Sessions of browsers in the admin API: the cookie, its life, and the check against requests of other sites."""

from http.cookies import SimpleCookie
from ipaddress import ip_network
from typing import Any

import aiohttp

from integration.admin_api_fixtures import AdminApi, Reply, api, running_admin_api, served
from integration.admin_fixtures import customer
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.admin.operators import Operator
from ledger.admin.sessions import MOST_SESSIONS, begin_session

__all__ = ["api", "database_url", "db", "postgres_server"]

Connection = Any
SAME_PAGE = {"X_Tierlane_Request": "1"}


async def signed_in(api: AdminApi, role: str = "admin", **headers: str) -> tuple[Reply, str]:
    """The response to a sign-in, and the value of the Cookie header that a browser sends from then on."""
    reply = await api("POST", "/session", role=role, **headers)
    (cookie,) = SimpleCookie(reply.headers["Set-Cookie"]).values()
    return reply, f"{cookie.key}={cookie.value}"


async def test_a_session_from_sign_in_to_sign_out(api: AdminApi, db: Connection) -> None:
    """The cookie authenticates the operator, is not the token, and is not stored; after the sign-out it is rejected."""
    await customer(db)
    reply, cookie = await signed_in(api)
    shown = await api("GET", "/session", role=None, Cookie=cookie)
    read = await api("GET", "/customers", role=None, Cookie=cookie)
    changed = await api("PATCH", "/customers/acme", {"burst": 5}, role=None, Cookie=cookie, **SAME_PAGE)
    actor = await db.fetchval("SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1")
    stored = str([dict(row) for row in await db.fetch("SELECT * FROM operator_sessions")])
    lasts = await db.fetchval("SELECT expires_at - now() FROM operator_sessions")
    left = await api("DELETE", "/session", role=None, Cookie=cookie, **SAME_PAGE)
    after = [await api("GET", path, role=None, Cookie=cookie) for path in ("/session", "/customers")]

    assert (reply.status, reply.headers["Cache-Control"]) == (200, "no-store")
    assert (reply.body["operator"], reply.body["role"]) == ("admin", "admin")
    assert (shown.body, read.status, changed.status, actor) == (reply.body, 200, 200, "operator:admin")
    assert 7.9 < lasts.total_seconds() / 3600 <= 8
    assert api.tokens["admin"] not in cookie
    assert cookie.partition("=")[2] not in stored
    assert (left.status, 'tierlane_admin_session=""; ' in left.headers["Set-Cookie"]) == (204, True)
    assert [(each.status, each.code) for each in after] == [(401, "invalid_api_key")] * 2
    assert (await api("DELETE", "/session", role=None)).status == 204


async def test_the_cookie_is_for_tls_only_where_the_browser_uses_tls(database_url: str, db: Connection) -> None:
    """As a trusted proxy says; what others say counts nothing. Cookies without TLS are not accepted over TLS."""
    https = {"X_Forwarded_Proto": "https"}
    async with running_admin_api(database_url, db) as api:
        plain, cookie = await signed_in(api, **https)
        tokens = api.tokens
    async with (
        served(database_url, trusted_proxies=(ip_network("127.0.0.0/8"),)) as url,
        aiohttp.ClientSession() as http,
    ):
        proxied = AdminApi(url, tokens, http)
        secure, prefixed = await signed_in(proxied, **https)
        shown = await proxied("GET", "/session", role=None, Cookie=prefixed, **https)
        planted = await proxied("GET", "/session", role=None, Cookie=cookie, **https)
        without = await proxied("GET", "/session", role=None, Cookie=cookie)

    value = cookie.partition("=")[2]
    assert plain.headers["Set-Cookie"] == (
        f"tierlane_admin_session={value}; HttpOnly; Max-Age=28800; Path=/; SameSite=Strict"
    )
    assert secure.headers["Set-Cookie"] == (f"{prefixed}; HttpOnly; Max-Age=28800; Path=/; SameSite=Strict; Secure")
    assert prefixed.startswith("__Host-tierlane_admin_session=")
    assert [shown.status, planted.status, without.status] == [200, 401, 200]


async def test_changes_with_a_cookie_need_the_header(api: AdminApi) -> None:
    """Which a page of another origin cannot send; a token needs none, and a token beside the cookie is what counts."""
    _, cookie = await signed_in(api)
    body = {"name": "acme", "tier": "paid"}
    refused = [
        await api("POST", "/customers", body, role=None, Cookie=cookie),
        await api("POST", "/customers", body, role=None, Cookie=cookie, X_Tierlane_Request="true"),
        await api("DELETE", "/session", role=None, Cookie=cookie),
    ]
    viewer = await api("POST", "/customers", body, role="viewer", Cookie=cookie, **SAME_PAGE)

    assert {(reply.status, reply.code) for reply in refused} == {(403, "cross_site")}
    assert "`X-Tierlane-Request: 1`" in refused[0].body["error"]["message"]
    assert viewer.code == "permission_denied"
    assert (await api("POST", "/customers", body, role="admin", Cookie=cookie)).status == 201


async def test_sessions_follow_the_operator(api: AdminApi) -> None:
    """A changed role applies at once; a rotated or revoked token ends its sessions."""
    api.tokens["ann"] = (await api.done("POST", "/operators", {"name": "ann", "role": "viewer"}))["token"]
    _, cookie = await signed_in(api, "ann")
    await api.done("PATCH", "/operators/ann", {"role": "admin"})
    promoted = await api("GET", "/session", role=None, Cookie=cookie)
    works = await api("POST", "/customers", {"name": "a", "tier": "free"}, role=None, Cookie=cookie, **SAME_PAGE)
    api.tokens["ann"] = (await api.done("POST", "/operators/ann/rotate"))["token"]
    rotated = await api("GET", "/session", role=None, Cookie=cookie)
    _, cookie = await signed_in(api, "ann")
    await api.done("DELETE", "/operators/ann")
    revoked = await api("GET", "/session", role=None, Cookie=cookie)

    assert (promoted.body["role"], works.status) == ("admin", 201)
    assert [rotated.status, revoked.status] == [401, 401]


async def test_a_session_expires_with_the_token_or_after_its_time(api: AdminApi, db: Connection) -> None:
    """The next sign-in deletes it."""
    created = await api.done("POST", "/operators", {"name": "ann", "role": "viewer", "expires_in": "1h"})
    api.tokens["ann"] = created["token"]
    short, _ = await signed_in(api, "ann")
    _, cookie = await signed_in(api)
    await db.execute("UPDATE operator_sessions SET expires_at = now() WHERE expires_at > now() + interval '2 hours'")
    expired = await api("GET", "/customers", role=None, Cookie=cookie)
    await signed_in(api)

    assert short.body["expires_at"] == created["changes"][0]["new"]["expires_at"]
    assert (expired.status, expired.body["error"]["message"]) == (
        401,
        "The session has ended, or there was none: sign in.",
    )
    assert await db.fetchval("SELECT count(*) FROM operator_sessions") == 2


async def test_any_process_knows_a_session(api: AdminApi, database_url: str) -> None:
    """Also one that started later: a restart signs nobody out."""
    first, cookie = await signed_in(api)
    async with served(database_url) as url, aiohttp.ClientSession() as http:
        second = await AdminApi(url, api.tokens, http)("GET", "/session", role=None, Cookie=cookie)

    assert second.body == first.body


async def test_an_old_cookie_is_no_failed_authentication(database_url: str, db: Connection) -> None:
    """A page that stays open locks nobody out; wrong tokens at the sign-in count."""
    async with running_admin_api(database_url, db, "2/minute") as api:
        old = [await api("GET", "/session", role=None, Cookie="tierlane_admin_session=old") for _ in range(4)]
        none = await api("GET", "/session", role=None)
        wrong = [await api("POST", "/session", role=None, Authorization="Bearer tlo_x") for _ in range(3)]
        ways = await api("GET", "/sign-in", role=None)

    assert [reply.status for reply in (*old, none)] == [401] * 5
    assert [reply.status for reply in wrong] == [401, 401, 429]
    assert (ways.status, ways.body) == (200, {"oidc": False})


async def test_the_sessions_of_one_owner_are_limited(db: Connection) -> None:
    """The oldest are deleted; those of others stay."""
    others = Operator("oidc:bob@example.com", "viewer")
    await begin_session(db, others)
    for _ in range(MOST_SESSIONS + 2):
        await begin_session(db, Operator("oidc:ann@example.com", "admin"))

    counts = await db.fetch("SELECT person, count(*) FROM operator_sessions GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in counts] == [("oidc:ann@example.com", MOST_SESSIONS), (others.name, 1)]
