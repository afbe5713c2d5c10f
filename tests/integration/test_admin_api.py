"""The admin API: each resource, roles, ETags, dry runs, parts of lists, errors, and secrets."""

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from gateway.admin_api.roles import ROLE_ACTIONS, Action
from gateway.admin_api.route import AdminRoute
from gateway.admin_api.routes import ROUTES
from gateway.jobs.webhook_security import customer_key, secret_text
from integration.admin_api_fixtures import CALLBACK_SECRET, AdminApi, api, running_admin_api
from integration.admin_fixtures import Admin, acme, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["acme", "api", "database_url", "db", "postgres_server"]

Connection = Any
LAST_ACTOR = "SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1"


async def test_a_customer_from_creation_to_deletion(api: AdminApi, db: Connection) -> None:
    """Each change shows the row before and after, and is recorded under the name of the operator."""
    created = await api("POST", "/customers", {"name": "acme", "tier": "paid", "burst": 200})
    by_name = await api("GET", "/customers/acme")
    by_id = await api("GET", f"/customers/{by_name.body['id']}")
    changed = await api("PATCH", "/customers/acme", {"tier": "free", "burst": None}, If_Match=by_name.etag)
    actor = await db.fetchval(LAST_ACTOR)
    deleted = await api("DELETE", "/customers/acme", If_Match=changed.etag)
    gone = await api("GET", "/customers/acme")

    assert (created.status, created.body["dry_run"], created.etag) == (201, False, by_name.etag)
    assert by_name.body == by_id.body == created.body["changes"][0]["new"]
    assert (by_name.body["tier"], by_name.body["burst"], by_name.body["status"]) == ("paid", 200, "active")
    (change,) = changed.body["changes"]
    assert (change["thing"], change["name"], change["old"]) == ("customer", "acme", by_name.body)
    assert (change["new"]["tier"], change["new"]["burst"]) == ("free", None)
    assert (deleted.status, deleted.body["changes"][0]["new"]) == (200, None)
    assert (gone.status, gone.code, actor) == (404, "not_found", "operator:admin")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/customers", {"name": "beta", "tier": "free"}),
        ("PATCH", "/customers/acme", {"burst": 300}),
        ("DELETE", "/customers/acme", None),
        ("POST", "/keys", {"customer": "acme", "name": "ci"}),
        ("PATCH", "/keys/<key>", {"name": "other"}),
        ("DELETE", "/keys/<key>", None),
        ("POST", "/keys/<key>/rotate", {}),
        ("POST", "/models", {"name": "org/big"}),
        ("PATCH", "/models/tiny", {"enabled": False}),
        ("DELETE", "/models/tiny", None),
        ("PATCH", "/tiers/free", {"burst": 300}),
        ("DELETE", "/tiers/free", None),
    ],
)
async def test_a_dry_run_shows_the_change_and_does_not_make_it(
    api: AdminApi, db: Connection, acme: str, method: str, path: str, body: object
) -> None:
    """No row changes and no secret is shown; the real request makes the change that was shown."""
    await api.done("POST", "/models", {"name": "tiny"})
    key = (await api.done("POST", "/keys", {"customer": acme, "name": "ci"}))["key"]
    path = path.replace("<key>", key[3:15])
    before = await db.fetchval("SELECT count(*) FROM config_changes")

    dry = await api(method, f"{path}?dry_run=true", body)
    after = await db.fetchval("SELECT count(*) FROM config_changes")
    real = await api.done(method, path, body)

    assert (dry.status, dry.body["dry_run"], real["dry_run"]) == (200, True, False)
    assert (before, dry.body.get("key"), bool(real.get("key"))) == (after, None, "key" in real)
    assert [each["thing"] for each in dry.body["changes"]] == [each["thing"] for each in real["changes"]] != []
    assert await db.fetchval("SELECT count(*) FROM config_changes") > after


async def test_of_two_operators_who_change_one_row_the_second_gets_412(api: AdminApi, db: Connection) -> None:
    """At once, too: the ETag is compared with the locked row. A use of a key does not change its ETag."""
    await customer(db)
    await api.done("POST", "/models", {"name": "tiny"})
    key = (await api.done("POST", "/keys", {"customer": "acme", "name": "ci"}))["changes"][0]["new"]["id"]
    for path, body in (
        ("/customers/acme", {"burst": 300}),
        (f"/keys/{key}", {"name": "new"}),
        ("/models/tiny", {"max_wait_ms": 3}),
        ("/tiers/free", {"burst": 12}),
    ):
        etag = (await api("GET", path)).etag
        await db.execute("UPDATE api_keys SET last_used_at = now()")
        replies = await asyncio.gather(*(api("PATCH", path, body | {}, If_Match=etag) for _ in range(2)))
        lost = next(reply for reply in replies if reply.status != 200)
        again = await api("PATCH", path, body, If_Match=f'"x", {(await api("GET", path)).etag}')

        assert sorted(reply.status for reply in replies) == [200, 412], path
        assert (lost.code, again.status) == ("precondition_failed", 200)
        assert (await api("DELETE", path, If_Match=etag)).status == 412


async def test_a_key_is_shown_once_rotated_with_an_overlap_expired_and_revoked(
    api: AdminApi, db: Connection, acme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The secret is in the response of its creation only, which no cache may store, and in no log line."""
    limits = {"requests_per_second": 5, "weight": 2}
    created = await api("POST", "/keys", {"customer": acme, "name": "ci", "expires_in": "90d", **limits})
    key_id = created.body["key"][3:15]
    row = (await api.done("GET", f"/keys/{key_id}")) | {"last_used_at": None}
    rotated = await api.done("POST", f"/keys/{key_id}/rotate", {"grace": "2h"})
    old = await api.done("GET", f"/keys/{key_id}")
    await api.done("PATCH", f"/keys/{rotated['key'][3:15]}", {"expires_at": "2126-01-01T00:00:00Z"})
    new = await api.done("GET", f"/keys/{rotated['key'][3:15]}")
    await api.done("DELETE", f"/keys/{key_id}", role="operator")
    listed = await api.done("GET", "/keys?customer=acme")
    stored = str([dict(each) for each in await db.fetch("SELECT * FROM config_changes")])

    assert (created.headers["Cache-Control"], row["burst"], row["customer"]) == ("no-store", 5, "acme")
    assert (old["state"], old["expires_at"] < row["expires_at"]) == ("live", True)
    assert (new["expires_at"], new["requests_per_second"], new["name"]) == ("2126-01-01T00:00:00Z", 5, "ci")
    assert [(each["id"] == key_id, each["state"]) for each in listed["data"]] == [(False, "live"), (True, "revoked")]
    output = "".join(capfd.readouterr()) + stored + json.dumps(listed)
    assert "admin_change" in output
    assert not [secret for secret in (created.body["key"], rotated["key"], *api.tokens.values()) if secret in output]


async def test_the_webhook_secret_of_a_customer_is_shown_and_rotated(
    api: AdminApi, acme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only admins see it, and no log line has it; at most five are valid, and If-Match holds as for other changes."""
    path = f"/customers/{acme}/webhook-secret"
    first = await api("GET", path)
    denied = [await api("GET", path, role=role) for role in ("viewer", "operator")]
    dry = await api.done("POST", f"{path}/rotate?dry_run=true", {"grace": "2h"})
    rotated = await api("POST", f"{path}/rotate", If_Match=first.etag)
    lost = await api("POST", f"{path}/rotate", If_Match=first.etag)
    second = await api.done("GET", path)
    invalid = await api("POST", f"{path}/rotate", {"grace": "5m"})
    more = [await api("POST", f"{path}/rotate") for _ in range(4)]

    assert first.body == {
        "customer": "acme",
        "secret": secret_text(customer_key(CALLBACK_SECRET, acme)),
        "number": 1,
    }
    assert second["secret"] == secret_text(customer_key(CALLBACK_SECRET, acme, 2))
    assert [reply.status for reply in denied] == [403, 403]
    assert (dry["changes"][0]["new"]["webhook_secret"], rotated.status, lost.status) == (2, 200, 412)
    assert (invalid.status, invalid.body["error"]["param"]) == (400, "grace")
    assert [reply.status for reply in more] == [200, 200, 200, 409]
    assert "5 webhook secrets are valid" in more[-1].body["error"]["message"]
    output = "".join(capfd.readouterr())
    assert not [secret for secret in (first.body["secret"], second["secret"]) if secret in output]


async def test_lists_are_paged_by_key(api: AdminApi, db: Connection) -> None:
    """Each row is in one part, in order, also while rows are added before."""
    names = [f"c{n:02}" for n in range(7)]
    for name in names:
        await customer(db, name)
        await db.execute("SELECT issue_api_key($1, 'ci')", name)
    for path, field, order in (("/customers", "name", names), ("/keys", "customer", [*reversed(names)])):
        found, after = [], ""
        while after is not None:
            page = await api.done("GET", f"{path}?limit=3{after and f'&after={after}'}")
            found += [row[field] for row in page["data"]]
            after = page["next"]
            if len(found) == 3:
                await customer(db, "a")
                await db.execute("SELECT issue_api_key('a', 'ci'); DELETE FROM customers WHERE name = 'a'")
        assert found == order
    tiers = [row["name"] for row in (await api.done("GET", "/tiers"))["data"]]
    first = await api.done("GET", "/tiers?limit=1")
    rest = await api.done("GET", f"/tiers?after={first['next']}")

    assert [row["name"] for row in first["data"] + rest["data"]] == tiers == ["enterprise", "paid", "free"]
    assert (await api("GET", "/tiers?after=x")).body["error"]["param"] == "after"
    assert (await api("GET", "/customers?limit=0")).body["error"]["param"] == "limit"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param", "words"),
    [
        ("PATCH", "/customers/acme", {"bursts": 1}, 400, "invalid_request", "bursts", "did you mean `burst`?"),
        ("PATCH", "/customers/acme", {"burst": "1"}, 400, "invalid_request", "burst", "must be a number or null"),
        ("PATCH", "/customers/acme", {"burst": 0}, 400, "invalid_request", "burst", "must be 1 to 10,000,000, not 0"),
        ("PATCH", "/customers/acme", {}, 400, "invalid_request", None, "at least one field"),
        ("PATCH", "/customers/acme", {"tier": "gold"}, 409, "conflict", None, "there are enterprise, paid, free"),
        ("PATCH", "/customers/acme", b"{", 415, "unsupported_media_type", None, "Content-Type"),
        ("PATCH", "/customers/acme?by=me", {"burst": 1}, 400, "invalid_request", "by", "not known"),
        ("PATCH", "/customers/acme?dry_run=1", {"burst": 1}, 400, "invalid_request", "dry_run", "true or false"),
        ("PATCH", "/customers/nobody", {"burst": 1}, 404, "not_found", None, "There is no customer named nobody."),
        ("POST", "/customers", {"name": "acme", "tier": "paid"}, 409, "conflict", None, "already a customer named"),
        ("POST", "/customers", {"name": "x\u0000", "tier": "paid"}, 400, "invalid_request", None, "cannot be stored"),
        ("POST", "/customers", {"name": "beta"}, 400, "invalid_request", "tier", "`tier` is required"),
        ("POST", "/keys", {"customer": "acme", "name": "ci", "burst": 3}, 400, "invalid_request", None, "with burst"),
        (
            "POST",
            "/keys",
            {"customer": "acme", "name": "ci", "expires_in": "soon"},
            400,
            "invalid_request",
            "expires_in",
            "such as 24h or 30d",
        ),
        ("POST", "/operators/admin/rotate", {"expires_in": ""}, 400, "invalid_request", "expires_in", "such as 24h"),
        ("GET", "/customers?tier=", None, 400, "invalid_request", "tier", "is empty"),
        ("GET", "/requests?status=done", None, 400, "invalid_request", "status", "queued or processing or completed"),
        ("GET", "/requests?error_code=nothing", None, 400, "invalid_request", "error_code", "such as queue_timeout"),
        ("GET", "/quotas?tier=gold", None, 404, "not_found", None, "There is no tier named gold"),
        ("DELETE", "/tiers/paid", None, 409, "conflict", None, "customer"),
        ("DELETE", "/customers/acme", {"sure": True}, 400, "invalid_request", None, "takes no body"),
        ("PUT", "/customers/acme", {}, 405, "method_not_allowed", None, "DELETE, GET, PATCH"),
        ("GET", "/nothing", None, 404, "not_found", None, "openapi.json"),
        ("POST", "/customers", b" " * 100_000, 413, "request_too_large", None, "too large"),
    ],
)
async def test_errors_are_sentences_in_the_form_of_all_errors(
    api: AdminApi, acme: str, method: str, path: str, body: Any, status: int, code: str, param: str, words: str
) -> None:
    """With the field, and the words of the command line."""
    reply = await api(method, path, body)
    error = reply.body["error"]

    assert (reply.status, error["code"]) == (status, code), error
    assert words in error["message"]
    assert error["request_id"] == reply.headers["x-request-id"]
    assert param is None or error["param"] == param
    assert not {"SELECT", "violates", "constraint"} & set(error["message"].split())


async def test_sentences_are_those_of_the_command_line(api: AdminApi, database_url: str, acme: str) -> None:
    """A value out of range, a name in use, a missing row."""
    admin = Admin(database_url)
    for method, path, body, words in (
        ("PATCH", "/customers/acme", {"weight": 0}, ("customer", "set", "acme", "--weight", "0")),
        ("POST", "/customers", {"name": "acme", "tier": "free"}, ("customer", "create", "acme", "--tier", "free")),
        ("DELETE", "/keys/0123456789ab", None, ("key", "revoke", "0123456789ab")),
        (
            "PATCH",
            "/customers/acme",
            {"time_zone": "Mars/Base"},
            ("customer", "set", "acme", "--time-zone", "Mars/Base"),
        ),
        ("PATCH", "/customers/acme", {"alert_url": "ftp://h"}, ("customer", "set", "acme", "--alert-url", "ftp://h")),
        (
            "POST",
            "/quotas",
            {"customer": "acme", "quota": "5/minute", "alert_shares": [0.5]},
            ("quota", "set", "acme", "5/minute", "--alert-shares", "0.5"),
        ),
        (
            "POST",
            "/quotas",
            {"customer": "acme", "quota": "5/day", "alert_shares": [1.5]},
            ("quota", "set", "acme", "5/day", "--alert-shares", "1.5"),
        ),
        ("PATCH", "/tiers/free", {"guaranteed_share": 0.99}, ("tier", "set", "free", "--guaranteed-share", "0.99")),
    ):
        reply = await api(method, path, body)
        result = await admin.run(*words)

        assert f"{reply.body['error']['message']}\n" == result.stderr


async def test_only_tokens_of_operators_are_accepted(api: AdminApi, db: Connection, acme: str) -> None:
    """No key of a customer, no other text, no revoked token; probes need none."""
    key = await db.fetchval("SELECT issue_api_key('acme', 'ci')")
    await db.execute("UPDATE operators SET revoked_at = now() WHERE name = 'viewer'")
    admin = api.tokens["admin"]
    other = admin[:-1] + ("y" if admin.endswith("x") else "x")
    replies = [
        await api("GET", "/customers", role=None, Authorization=f"Bearer {token}")
        for token in (key, "service-token-of-16", "", other, api.tokens["viewer"])
    ]
    without = await api("GET", "/customers", role=None)

    assert {(reply.status, reply.code) for reply in (*replies, without)} == {(401, "invalid_api_key")}
    assert without.headers["WWW-Authenticate"] == "Bearer"
    assert [(await api("GET", path, role=None)).status for path in ("/livez", "/readyz")] == [200, 200]


async def test_failed_authentications_are_limited(database_url: str, db: Connection) -> None:
    """By address; an operator with a valid token is not affected."""
    async with running_admin_api(database_url, db, "2/minute") as api:
        replies = [await api("GET", "/tiers", role=None) for _ in range(3)]
        valid = await api("GET", "/tiers")

    assert [reply.status for reply in replies] == [401, 401, 429]
    assert int(replies[-1].headers["Retry-After"]) > 0
    assert valid.status == 200


def filled(path: str) -> str:
    """A path of a route without the prefix, with parts that name nothing."""
    return re.sub(r"\{\w+\}", "0", path.removeprefix("/admin/v1"))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_each_role_is_allowed_what_its_table_says(api: AdminApi, route: AdminRoute) -> None:
    """At each address: 403 before anything is read of the body, else another status."""
    denied = {role for role in ROLE_ACTIONS if (await api(route.method, filled(route.path), role=role)).status == 403}

    assert denied == {role for role, actions in ROLE_ACTIONS.items() if route.least_action not in actions}


async def test_viewers_read_and_operators_handle_incidents(api: AdminApi, acme: str) -> None:
    """An operator suspends a customer and drains a cell, but changes no other column; the message names the role."""
    suspended = await api.done("PATCH", "/customers/acme", {"status": "suspended"}, role="operator")
    refused = await api("PATCH", "/customers/acme", {"status": "active", "tier": "free"}, role="operator")
    weighted = await api("PATCH", "/cells/default", {"weight": 2}, role="operator")
    viewer = await api("PATCH", "/customers/acme", {"status": "active"}, role="viewer")

    assert suspended["changes"][0]["new"]["status"] == "suspended"
    assert {(reply.status, reply.code) for reply in (refused, weighted, viewer)} == {(403, "permission_denied")}
    assert refused.body["error"]["message"].endswith("it needs admin.")
    assert viewer.body["error"]["message"].endswith("it needs operator.")
    assert {method: actions for method, actions in ROLE_ACTIONS.items() if Action.ADMINISTER in actions} == {
        "admin": frozenset(Action)
    }


async def test_alert_shares_of_quotas_and_alerts(api: AdminApi, db: Connection, acme: str) -> None:
    """Shares stay when the amount is replaced; alerts are listed by part, the newest first, in the unit of their quota."""
    await api.done("POST", "/quotas", {"customer": "acme", "quota": "100 usd/month", "alert_shares": [0.5]})
    await api.done("POST", "/quotas", {"customer": "acme", "quota": "200 usd/month"})
    (kept,) = (await api.done("GET", "/quotas?customer=acme"))["data"]
    await api.done("POST", "/quotas", {"customer": "acme", "quota": "200 usd/month", "alert_shares": None})
    (usual,) = (await api.done("GET", "/quotas?customer=acme"))["data"]
    for number, share in enumerate((0.5, 0.8, 1.0)):
        await db.execute(
            "INSERT INTO quota_alerts (id, customer_id, tier, quota, period, period_start, period_end, share, amount, used, "
            "reached_at) SELECT $1, id, tier, '1month:usd', 1, now(), now(), $2, 200000000000, 150500000000, "
            "now() + make_interval(secs => $3) FROM customers WHERE name = 'acme'",
            f"alert_{number}",
            share,
            float(number),
        )
    first = await api.done("GET", "/quota-alerts?limit=2")
    rest = await api.done("GET", f"/quota-alerts?limit=2&customer=acme&after={first['next']}")

    assert (kept["quota"], kept["alert_shares"], usual["alert_shares"]) == ("200 usd/month", [0.5], None)
    assert [row["share"] for row in first["data"]] == [1.0, 0.8]
    assert ([row["share"] for row in rest["data"]], rest["next"]) == ([0.5], None)
    row = rest["data"][0]
    assert (row["customer"], row["quota"], row["amount"], row["used"], row["unit"]) == (
        "acme",
        "month",
        200.0,
        150.5,
        "usd",
    )


async def test_quotas_and_budgets(api: AdminApi, acme: str) -> None:
    """A new amount replaces that of the same period; a budget is a quota in USD; a quota that changed is not deleted."""
    await api.done("POST", "/quotas", {"customer": acme, "quota": "100 usd/month"})
    await api.done("POST", "/quotas", {"tier": "paid", "quota": "1000/day"})
    replaced = await api.done("POST", "/quotas", {"customer": "acme", "quota": "200 usd/month"})
    listed = (await api.done("GET", "/quotas?customer=acme"))["data"]
    (own,) = [row for row in listed if row["customer"]]
    read = await api("GET", f"/quotas/{own['id']}")
    tried = await api.done("DELETE", f"/quotas/{own['id']}?dry_run=true")
    await api.done("POST", "/quotas", {"customer": "acme", "quota": "300 usd/month"})
    lost = await api("DELETE", f"/quotas/{own['id']}", If_Match=read.etag)
    deleted = await api.done("DELETE", f"/quotas/{own['id']}")
    bad = await api("POST", "/quotas", {"customer": "acme", "quota": "many"})
    both = await api("POST", "/quotas", {"customer": "acme", "tier": "paid", "quota": "1/day"})

    assert (replaced["changes"][0]["old"]["quota"], own["quota"]) == ("100 usd/month", "200 usd/month")
    assert [row["quota"] for row in listed if row["tier"]] == ["1000/day"]
    assert (read.body["quota"], tried["changes"][0]["new"], lost.status) == ("200 usd/month", None, 412)
    assert deleted["changes"][0]["name"] == "300 usd/month of acme"
    assert (bad.status, both.status, both.body["error"]["param"]) == (400, 400, "customer")
    assert (await api("GET", "/quotas/x")).status == (await api("GET", f"/quotas/{10**30}")).status == 404


async def test_prices(api: AdminApi) -> None:
    """From now or a later time on; a model may have a slash in its name."""
    await api.done("POST", "/models", {"name": "org/big", "capabilities": None})
    await api.done("POST", "/prices", {"model": "org/big", "usd_per_gpu_s": 0.002})
    await api.done(
        "POST", "/prices", {"model": "org/big", "usd_per_1000_tokens": 1, "valid_from": "2126-01-01T00:00:00Z"}
    )
    later, now = (await api.done("GET", "/prices?model=org/big"))["data"]
    first = await api.done("GET", "/prices?limit=1")
    second = await api.done("GET", f"/prices?after={first['next']}")
    removed = await api.done("DELETE", "/prices/org%2Fbig/2126-01-01T00:00:00Z")
    none = await api("POST", "/prices", {"model": "org/big"})

    assert [(row["state"], row["usd_per_gpu_s"], row["usd_per_1000_tokens"]) for row in (later, now)] == [
        ("later", 0.002, 1),
        ("now", 0.002, 0),
    ]
    assert first["data"] + second["data"] == [later, now]
    assert (removed["changes"][0]["new"], none.status) == (None, 400)
    assert (await api.done("GET", "/models/org%2Fbig"))["name"] == "org/big"
    assert (await api("DELETE", "/prices/org%2Fbig/2126-01-01")).status == 409


async def test_cells_cordons_and_pools(api: AdminApi, db: Connection) -> None:
    """A cell is drained and opened again, unless it is the last or closed; a worker is cordoned, with a reason."""
    await db.execute("INSERT INTO cells (name, redis_url) VALUES ('west', 'redis://west:6379/0')")
    await db.execute("INSERT INTO cells (name, redis_url, state) VALUES ('old', 'redis://old:6379/0', 'closed')")
    await db.execute("INSERT INTO models (name, pool, enabled) VALUES ('a', 'large', true), ('b', 'large', false)")
    etag = (await api("GET", "/cells/default")).etag
    drained = await api("PATCH", "/cells/default", {"state": "draining"}, role="operator", If_Match=etag)
    lost = await api("PATCH", "/cells/default", {"weight": 3}, If_Match=etag)
    last = await api("PATCH", "/cells/west", {"state": "draining"})
    opened = await api("PATCH", "/cells/default", {"state": "open", "weight": 2}, If_Match=drained.etag)
    closed = await api("PATCH", "/cells/old", {"state": "open"})
    cordoned = await api("PUT", "/cordons/worker-1", {"reason": "fan"}, role="operator")
    read = await api("GET", "/cordons/worker-1")
    again = await api("PUT", "/cordons/worker-1", {"reason": "disk"}, If_Match=read.etag)
    stale = await api("DELETE", "/cordons/worker-1", If_Match=read.etag)
    deleted = await api.done("DELETE", "/cordons/worker-1", role="operator")

    assert (drained.status, lost.status, last.status, opened.status, closed.status) == (200, 412, 409, 200, 409)
    assert [(row["name"], row["state"], row["weight"]) for row in (await api.done("GET", "/cells"))["data"]] == [
        ("default", "open", 2),
        ("old", "closed", 1),
        ("west", "open", 1),
    ]
    assert (cordoned.etag, again.status, stale.status) == (read.etag, 200, 412)
    assert (deleted["changes"][0]["old"]["reason"], deleted["changes"][0]["new"]) == ("disk", None)
    assert (await api("DELETE", "/cordons/worker-1")).status == 404
    assert (await api.done("GET", "/pools"))["data"] == [
        {"name": "large", "models": ["a", "b"], "enabled_models": ["a"]}
    ]


async def test_operators_are_managed_by_admins(api: AdminApi) -> None:
    """A new operator works at once, with a changed role too, and not after a rotation or a revocation."""
    created = await api("POST", "/operators", {"name": "ann", "role": "viewer", "expires_in": "90d"})
    api.tokens["ann"] = created.body["token"]
    first = await api("GET", "/tiers", role="ann")
    promoted = await api("PATCH", "/operators/ann", {"role": "admin"}, If_Match=created.etag)
    await api.done("POST", "/customers", {"name": "acme", "tier": "paid"}, role="ann")
    by = (await api.done("GET", "/config-changes?table=customers"))["data"][0]["changed_by"]
    rotated = await api.done("POST", "/operators/ann/rotate")
    old = await api("GET", "/tiers", role="ann")
    api.tokens["ann"] = rotated["token"]
    new = await api("GET", "/tiers", role="ann")
    await api.done("DELETE", "/operators/ann")
    revoked = await api("GET", "/tiers", role="ann")

    assert [reply.status for reply in (first, promoted, old, new, revoked)] == [200, 200, 401, 200, 401]
    assert (by, created.headers["Cache-Control"]) == ("operator:ann", "no-store")
    assert [(row["name"], row["state"]) for row in (await api.done("GET", "/operators"))["data"]] == [
        ("admin", "live"),
        ("ann", "revoked"),
        ("operator", "live"),
        ("viewer", "live"),
    ]
    assert "hash" not in str(await api.done("GET", "/operators/ann"))


async def test_changes_wait_for_a_lock_only_for_a_while(api: AdminApi, db: Connection, acme: str) -> None:
    """The error names who holds it."""
    async with db.transaction():
        await db.execute("UPDATE customers SET burst = 1 WHERE name = 'acme'")
        reply = await api("PATCH", "/customers/acme", {"burst": 2})

    assert (reply.status, reply.code) == (409, "conflict")
    assert "An open transaction holds a lock" in reply.body["error"]["message"]


async def test_the_page_needs_no_token_and_loads_only_its_own_files(api: AdminApi) -> None:
    """Its policy forbids everything else, it is not stored, and a file is sent again only if it has changed."""
    async with aiohttp.ClientSession(api.url) as http:
        async with http.get("/", allow_redirects=False) as front:
            assert (front.status, front.headers["Location"]) == (308, "/admin/")
        async with http.get("/admin") as page:
            text = await page.text()
            address, policy = str(page.url.path), page.headers["Content-Security-Policy"]
        assert (page.status, address, page.headers["Cache-Control"]) == (200, "/admin/", "no-store")
        assert policy.startswith("default-src 'self'; ")
        for name in re.findall(r'"/admin/assets/([^"]+)"', text):
            async with http.get(f"/admin/assets/{name}") as asset:
                tag = asset.headers["ETag"]
            async with http.get(f"/admin/assets/{name}", headers={"If-None-Match": tag}) as again:
                assert (asset.status, again.status) == (200, 304), name
        async with http.get("/admin/assets/..%2Fpage.html") as missing:
            assert missing.status == 404
