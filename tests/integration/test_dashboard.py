"""The dashboard: login, pages, event stream, and actions that are confirmed by what was shown."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from eventually import eventually
from gateway.operations.dashboard import subscribers as dashboard_subscribers
from gateway.operations.dashboard.history_points import history_point
from gateway.operations.dashboard.page import ASSETS
from gateway.operations.session import COOKIE, LASTS_S, issue
from integration.dashboard_fixtures import BASE, BEARER, act, acting_stack, browser, call, groups, record
from integration.dead_letter_fixtures import customer, letter
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.snapshot import WorkerCordon
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.protocol.history import WEEK
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server"]

BROWSER = {"Accept": "text/html,application/xhtml+xml"}
STREAM = {"Accept": "text/event-stream"}
Connection = Any
CORDON, UNCORDON = "/workers/cordon", "/workers/uncordon"
PURGE, REQUEUE = "/dead-letters/purge", "/dead-letters/requeue"
ONE = {"worker": "worker-1", "healthy_left": 0}
ALL = {"count": 1, "up_to": 1}
BODIES: dict[str, dict[str, Any]] = {CORDON: ONE, UNCORDON: {"worker": "worker-1"}, PURGE: ALL, REQUEUE: ALL}
ACTOR = "dashboard (127.0.0.1)"
AWAY = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"
DLQ = Keys().dlq


def respond(member: ClaimedRequest) -> Outcome:
    """The input backwards; "bad" fails."""
    text = decode_payload(member.body).input
    return Outcome(member.id, "poison_request" if text == "bad" else "", 1.5, 3, "v1", text[::-1])


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with one worker, PostgreSQL, and a low limit of failed logins."""
    limits: dict[str, Any] = {"auth_failures": "5/minute", "write_timeout_s": 1.0}
    async with acting_stack(client, redis_url, database_url, **limits) as running:
        running.worker.answerer = respond
        yield running


async def test_without_a_login_only_the_form_is_shown(stack: Stack) -> None:
    """The form is a 401 that does not count as a failed login; everything else is an error document."""
    for _ in range(8):
        status, headers, text = await call(stack, **BROWSER)
        assert (status, "login.js" in text, "dashboard.js" in text) == (401, True, False)
    assert headers["content-type"] == "text/html; charset=utf-8"
    status, _, text = await call(stack, "/events", **STREAM)
    assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
    assert (await call(stack))[0] == 401
    assert (await call(stack, "/session", "DELETE"))[0] == 401


async def test_the_session_cookie_opens_the_dashboard_only(stack: Stack) -> None:
    """The service token is exchanged for a cookie, which other internal endpoints reject; logging out deletes it.

    The dashboard's document agrees with the health document.
    """
    status, headers, _ = await call(stack, "/session", "POST", **BEARER, **{"X-Forwarded-Proto": "https"})
    cookie = headers["set-cookie"].partition(";")[0]

    assert (status, "; Secure" in headers["set-cookie"]) == (200, True)
    assert re.fullmatch(r"tierlane_session=\d+\.[0-9a-f]{64}", cookie)
    status, _, text = await call(stack, Cookie=cookie, **BROWSER)
    assert (status, "dashboard.js" in text) == (200, True)
    status, _, text = await call(stack, "/events", Cookie=cookie)
    _, health = await stack.internal("/internal/health")
    document = json.loads(text)
    assert (status, document["gateway"], document["status"]) == (200, "g1", health["status"])
    assert 0 <= health["age_s"] <= 1.25
    async with aiohttp.request("GET", f"{stack.url}/internal/health", headers={"Cookie": cookie}) as response:
        assert response.status == 401
    _, headers, _ = await call(stack, "/session", "DELETE", Cookie=cookie)
    assert headers["set-cookie"].startswith("tierlane_session=; Path=/internal/dashboard; Max-Age=0")


async def test_the_history_of_days(stack: Stack) -> None:
    """Points of five minutes in the form of the event `history`, of one pool if named; a number of days that is not kept is refused."""
    snapshots = stack.gateway.snapshots
    state = (await snapshots.current()).state
    hour = [history_point(replace(state, at_ms=state.at_ms - ago), []) for ago in (2 * WEEK.step_ms, WEEK.step_ms, 0)]
    await snapshots.history.week.add(hour, writes=False)

    status, _, text = await call(stack, "/history?days=1&pool=default", **BEARER)
    assert (status, [row[0] for row in json.loads(text)]) == (200, [each.at_ms for each in hour[:2]])
    status, _, text = await call(stack, "/history?days=8", **BEARER)
    assert (status, json.loads(text)["error"]["param"]) == (400, "days")
    assert (await call(stack, "/history"))[0] == 401


async def test_failed_logins_are_limited(stack: Stack) -> None:
    """Wrong tokens and forged cookies count together; the right token is still accepted."""
    codes = []
    for attempt in range(8):
        if attempt % 2:
            codes.append((await call(stack, "/session", "POST", Authorization="Bearer wrong"))[0])
        else:
            codes.append((await call(stack, "/events", Cookie="tierlane_session=1.x"))[0])

    assert codes == [401] * 5 + [429] * 3
    assert (await call(stack, "/session", "POST", **BEARER))[0] == 200


async def test_pages_contain_no_secret_and_load_only_their_assets(stack: Stack) -> None:
    """A strict content security policy without exceptions, nothing inline, and every named file exists."""
    cookie = f"{COOKIE}={issue(SERVICE_TOKEN, 4e9)}"
    secrets = [
        SERVICE_TOKEN,
        stack.gateway.config.redis_url,
        cookie,
        *(key.text for key in stack.catalog.keys.values()),
    ]
    for sent in (BROWSER, BROWSER | {"Cookie": cookie}):
        _, headers, text = await call(stack, **sent)
        assert headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<style|style=|<script>|\son\w+=|javascript:", text)
        named = re.findall(r'<(?:script|link) [^>]*(?:src|href)="([^"]+)"', text)
        assert {name.rpartition("/")[0] for name in named} == {f"{BASE}/assets"}
        assert {name.rpartition("/")[2] for name in named} <= set(ASSETS)
        assert [secret for secret in secrets if secret in text] == []
    for name in ASSETS:
        status, headers, text = await call(stack, f"/assets/{name}")
        assert (status, headers["content-type"]) == (200, ASSETS[name])
        assert [secret for secret in secrets if secret in text] == []
    assert (await call(stack, "/assets/page.html"))[0] == 404


async def next_event(response: aiohttp.ClientResponse, kind: str) -> Any:
    """The data of the next event of this kind."""
    async with asyncio.timeout(5.0):
        while (await response.content.readline()).decode().strip() != f"event: {kind}":
            assert not response.content.at_eof(), "the stream has ended"
        return json.loads((await response.content.readline()).removeprefix(b"data: "))


async def test_the_stream_sends_history_and_then_the_state(stack: Stack) -> None:
    """All subscribers get the same document each second; a lost worker is in it within two seconds, with an event."""
    await stack.worker.heartbeat("worker-2")
    async with aiohttp.ClientSession(headers=STREAM | BEARER) as http:
        responses = [await http.get(f"{stack.url}{BASE}/events") for _ in range(3)]
        for response in responses:
            assert isinstance(await next_event(response, "history"), list)
            await next_event(response, "state")
        states = [await next_event(response, "state") for response in responses]
        newest = max(state["at_ms"] for state in states)
        for number, response in enumerate(responses):
            while states[number]["at_ms"] < newest:
                states[number] = await next_event(response, "state")
        assert states[0] == states[1] == states[2]

        lost: dict[str, Any] = {}
        while not lost:
            state = await next_event(responses[0], "state")
            lost = {each["id"]: each for each in state["workers"] if not each["healthy"]}
        assert lost["worker-2"]["age_ms"] < 2000
        assert any(text.startswith("worker-2 was lost") for _, _, text, *_ in state["events"])
        assert state["status"] == "degraded"
        for response in responses:
            response.close()
    await eventually(lambda: not len(stack.gateway.snapshots.subscribers), "they are removed")


async def test_the_number_of_subscribers_is_limited(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more gets a 503, and is accepted after another has left."""
    monkeypatch.setattr(dashboard_subscribers, "MAX_SUBSCRIBERS", 1)
    url, subscribers = f"{stack.url}{BASE}/events", stack.gateway.snapshots.subscribers
    async with aiohttp.ClientSession(headers=STREAM | BEARER) as http:
        first = await http.get(url)
        await eventually(lambda: len(subscribers) == 1, "the first is subscribed")
        async with http.get(url) as second:
            assert (second.status, (await second.json())["error"]["code"]) == (503, "no_capacity")
        first.close()
        await eventually(lambda: len(subscribers) == 0, "it has left")
        async with http.get(url) as third:
            assert third.status == 200


async def test_a_subscriber_that_does_not_read_is_dropped(stack: Stack) -> None:
    """Events are not kept for it, its connection is closed, and the others still get theirs."""
    subscribers = stack.gateway.snapshots.subscribers
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", stack.gateway.port))
    head = f"GET {BASE}/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n"
    slow.sendall(f"{head}Authorization: Bearer {SERVICE_TOKEN}\r\n\r\n".encode())
    await eventually(lambda: len(subscribers) == 1, "the slow one is subscribed")
    async with (
        aiohttp.ClientSession(headers=STREAM | BEARER) as http,
        http.get(f"{stack.url}{BASE}/events") as response,
    ):
        await eventually(lambda: len(subscribers) == 2, "the other one, too")
        reading = asyncio.create_task(response.content.read())

        def misses() -> bool:
            subscribers.publish(b"event: state\ndata: " + b"x" * 100_000 + b"\n\n")
            return subscribers.missed > 0

        await eventually(misses, "the slow one misses an event")
        await eventually(lambda: len(subscribers) == 1, "it is dropped", 5.0)
        assert not reading.done()
        reading.cancel()
    slow.close()


async def test_streams_end_with_the_gateway_and_with_the_session(stack: Stack) -> None:
    """Each ends with its last chunk, so that a page reconnects at once; an expired session gets a 401."""
    url = f"{stack.url}{BASE}/events"
    cookie = f"{COOKIE}={issue(SERVICE_TOKEN, time.time() - LASTS_S + 2)}"
    async with aiohttp.ClientSession(headers=STREAM) as http:
        async with http.get(url, headers={"Cookie": cookie}) as response, asyncio.timeout(5):
            await next_event(response, "state")
            await response.content.read()  # It raises if the last chunk is missing.
        async with http.get(url, headers={"Cookie": cookie}) as response:
            assert response.status == 401
        async with http.get(url, headers=BEARER) as response, asyncio.timeout(5):
            await next_event(response, "state")
            await stack.gateway.drain()
            await response.content.read()
    assert len(stack.gateway.snapshots.subscribers) == 0


async def shown(stack: Stack, group: int | None = None) -> dict[str, Any]:
    """The body that confirms what is shown: all dead letters, or one group."""
    _, document = await groups(stack)
    row = document if group is None else document["groups"][group]
    names = ("count",) if group is None else ("count", "tier", "model", "error_code")
    return {name: row[name] for name in names} | {"up_to": document["up_to"]}


async def left(db: Connection) -> set[str]:
    return {row[0] for row in await db.fetch("SELECT request_id FROM dead_letters")}


def code(response: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    return response[0], response[1]["error"]["code"]


async def test_a_worker_is_cordoned_and_uncordoned_once(stack: Stack, db: Connection) -> None:
    """A repetition changes nothing; each change is recorded with actor and reason, and the dashboard shows the cordon."""
    body, headers = ONE | {"reason": "a loud fan"}, browser(stack)
    responses = [await act(stack, CORDON, body, headers), await act(stack, CORDON, ONE)]
    assert await db.fetchval("SELECT worker || ': ' || reason FROM cordons") == "worker-1: a loud fan"
    responses += [await act(stack, UNCORDON, {"worker": "worker-1"}, each) for each in (headers, None)]

    assert [(status, document["cordoned"], document["changed"]) for status, document in responses] == [
        (200, True, True), (200, True, False), (200, False, True), (200, False, False),
    ]  # fmt: skip
    changes = [(by, key, (old or new)["reason"], new is None) for by, key, old, new in await record(db, "cordons")]
    assert changes == [(ACTOR, "worker-1", "a loud fan", removed) for removed in (False, True)]
    snapshot = stack.catalog.snapshot
    assert snapshot is not None
    stack.catalog.snapshot = type(snapshot)(
        2, snapshot.tiers, {}, snapshot.keys, snapshot.models, (), {"worker-1": WorkerCordon("a loud fan", "ann")}
    )
    async with stack.http.get(f"{stack.url}{BASE}/events", headers=BEARER) as response:
        assert [each["cordoned"] for each in (await response.json())["workers"]] == [True]


@pytest.mark.parametrize("path", BODIES)
async def test_requests_without_a_login_or_of_another_site_change_nothing(
    stack: Stack, db: Connection, path: str
) -> None:
    """A cookie from another site, a form, and a link are rejected, though a browser sends the cookie along."""
    await letter(db, customer_id=await customer(db))
    body, same = BODIES[path], {"Sec-Fetch-Site": "same-origin"}
    for headers in (same, same | {"Authorization": "Bearer wrong"}, same | {"Cookie": "tierlane_session=9999999999.x"}):
        assert code(await act(stack, path, body, headers)) == (401, "invalid_api_key")
    crossing = browser(stack, **{"Sec-Fetch-Site": "cross-site"})
    assert code(await act(stack, path, body, crossing)) == (403, "cross_site")
    form = browser(stack) | {"Content-Type": "application/x-www-form-urlencoded"}
    assert (await act(stack, path, body, form))[0] == 415
    async with stack.http.get(f"{stack.url}{BASE}{path}", headers=BEARER) as response:
        assert response.status == 405
    async with stack.http.get(f"{stack.url}{BASE}/dead-letters") as response:
        assert response.status == 401

    assert await record(db, "cordons") == await record(db, "dead_letters") == []
    assert await db.fetchval("SELECT count(*) FROM dead_letters WHERE requeued_as IS NULL") == 1


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CORDON, {"healthy_left": -1}, "healthy_left"),
        (CORDON, {"worker": ""}, "worker"),
        (CORDON, {"reason": "x" * 501}, "reason"),
        (PURGE, {"count": 0}, "count"),
        (PURGE, {"count": 10_001}, "count"),
        (PURGE, {"up_to": 2**63}, "up_to"),
        (PURGE, {"after": 1}, "after"),
        (REQUEUE, {"after": -1}, "after"),
        (REQUEUE, {"count": "1"}, "count"),
    ],
)
async def test_an_invalid_body_is_rejected(stack: Stack, path: str, change: dict[str, Any], param: str) -> None:
    """A 400 names the field."""
    status, document = await act(stack, path, BODIES[path] | change)

    assert (status, document["error"]["code"], document["error"]["param"]) == (400, "invalid_request", param)


async def test_a_state_that_has_changed_is_a_conflict(stack: Stack, db: Connection) -> None:
    """With fewer healthy workers, or another number of dead letters than was shown, nothing is changed."""
    assert code(await act(stack, CORDON, ONE | {"healthy_left": 1})) == (409, "changed_meanwhile")
    assert code(await act(stack, UNCORDON, {"worker": "nobody"})) == (404, "not_found")
    first, second = await letter(db), await letter(db)
    body = await shown(stack)
    await letter(db, id=-1)  # It has a lower number, but was committed only now.
    assert code(await act(stack, PURGE, body)) == (409, "changed_meanwhile")
    await db.execute("DELETE FROM dead_letters WHERE id = -1 OR request_id = $1", second)
    for path in (PURGE, REQUEUE):
        assert code(await act(stack, path, body)) == (409, "changed_meanwhile")

    assert await left(db) == {first}
    assert await record(db, "cordons") == await record(db, "dead_letters") == []


async def test_without_postgresql_nothing_is_changed(client: Redis, redis_url: str) -> None:
    """Each action gets a 503, if PostgreSQL is not available and if the gateway has none."""
    await client.lpush(DLQ, "req_x")
    async with acting_stack(client, redis_url, AWAY) as stack:
        for response in [await groups(stack), *[await act(stack, path, body) for path, body in BODIES.items()]]:
            assert code(response) == (503, "catalog_unavailable")
    async with running_stack(client, redis_url) as stack:
        assert (await act(stack, UNCORDON, {"worker": "worker-1"}))[0] == 503
    assert await client.lrange(DLQ, 0, -1) == [b"req_x"]


async def test_concurrent_actions_are_limited_and_outlive_their_clients(stack: Stack, db: Connection) -> None:
    """More than four get a 503; an action whose client disconnects is completed."""
    running = stack.gateway.actions._guard._running
    async with db.transaction():
        await db.execute("LOCK TABLE cordons")
        waiting = [asyncio.create_task(act(stack, CORDON, ONE)) for _ in range(4)]
        await eventually(lambda: len(running) == 4, "four are under way")
        assert code(await act(stack, CORDON, ONE)) == (503, "no_capacity")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await eventually(lambda: not running, "they have ended")

    assert await db.fetchval("SELECT count(*) FROM cordons") == 1
    assert len(await record(db, "cordons")) == 1


async def test_dead_letters_are_counted_by_tier_model_and_code(stack: Stack, db: Connection) -> None:
    """The largest group is first; those that can be requeued are counted separately."""
    assert (await groups(stack))[1] == {"up_to": 0, "count": 0, "requeueable": 0, "groups": []}
    acme = await customer(db)
    requeued = {"requeued_as": "req_" + "0" * 32, "requeued_at": await db.fetchval("SELECT now()")}
    for changes in ({}, {"body": None}, requeued):
        await letter(db, customer_id=acme, **changes)
    await letter(db, customer_id=None, tier=None, model=None, error_code="poison_request")
    await letter(db, customer_id=acme, tier="free", model="gone", error_code="poison_request")

    status, document = await groups(stack)

    assert (status, document["count"], document["requeueable"]) == (200, 5, 1)
    assert document["up_to"] == await db.fetchval("SELECT max(id) FROM dead_letters")
    names = ("tier", "model", "error_code", "count", "requeueable")
    assert [tuple(each[name] for name in names) for each in document["groups"]] == [
        ("paid", "tiny", "worker_lost", 3, 1), ("", "", "poison_request", 1, 0), ("free", "gone", "poison_request", 1, 0),
    ]  # fmt: skip


async def test_purge_deletes_the_dead_letters_that_were_shown(stack: Stack, db: Connection) -> None:
    """One group without later ones, from PostgreSQL and Redis, recorded with every id; no tier is a group of its own."""
    old = [await letter(db) for _ in range(3)]
    other, without_tier = await letter(db, error_code="poison_request"), await letter(db, tier=None, model=None)
    body = await shown(stack, 0)
    late = await letter(db)
    await stack.redis.lpush(DLQ, *old, other, late)

    assert await act(stack, PURGE, body, browser(stack)) == (200, {"purged": 3, "warning": ""})
    assert await left(db) == {other, without_tier, late}
    assert {each.decode() for each in await stack.redis.lrange(DLQ, 0, -1)} == {other, late}
    group = {"count": 1, "up_to": body["up_to"], "tier": "", "model": "", "error_code": "worker_lost"}
    assert (await act(stack, PURGE, group))[1]["purged"] == 1
    assert await left(db) == {other, late}
    first, second = await record(db, "dead_letters")
    key = f"paid tiny worker_lost up to {body['up_to']}"
    assert first == (ACTOR, key, {"count": 3, "request_ids": sorted(old)}, None)
    assert second[2]["request_ids"] == [without_tier]


async def test_requeue_runs_the_dead_letters_that_were_shown(
    stack: Stack, client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """Of two gateways one runs them; each result is returned and recorded; a failure is a new dead letter."""
    acme = await customer(db)
    good, bad = await letter(db, customer_id=acme), await letter(db, customer_id=acme, text="bad")
    await stack.redis.lpush(DLQ, good, bad)
    body = await shown(stack)
    async with acting_stack(client, redis_url, database_url, worker=False, gateway_id="g2") as other:
        both = await asyncio.gather(*(act(each, REQUEUE, body, browser(each)) for each in (stack, other)))

    (_, document), conflict = sorted(both, key=lambda response: response[0])
    assert code(conflict) == (409, "changed_meanwhile")
    ends = {each["request_id"]: each["ended"] for each in document["reruns"]}
    assert ends == {good: "completed", bad: "poison_request"}
    assert (document["left"], document["after"], document["warning"]) == (0, body["up_to"], "")
    names = {each["request_id"]: each["requeued_as"] for each in document["reruns"]}
    assert dict(await db.fetch("SELECT request_id, requeued_as FROM dead_letters")) == names
    assert await stack.redis.lrange(DLQ, 0, -1) == [names[bad].encode()]
    assert await record(db, "dead_letters") == [
        (ACTOR, f"all up to {body['up_to']}", {"count": 2, "requeued_as": None}, {"count": 2, "requeued_as": names})
    ]


async def test_many_dead_letters_are_requeued_in_several_requests(stack: Stack, db: Connection) -> None:
    """At most thirty-two in each; the next one continues after the last."""
    acme = await customer(db)
    ids = {await letter(db, customer_id=acme) for _ in range(40)}
    body = await shown(stack)

    _, first = await act(stack, REQUEUE, body)
    assert (len(first["reruns"]), first["left"]) == (32, 8)
    _, second = await act(stack, REQUEUE, body | {"count": first["left"], "after": first["after"]})

    assert (len(second["reruns"]), second["left"], second["after"]) == (8, 0, body["up_to"])
    reruns = first["reruns"] + second["reruns"]
    assert ({each["request_id"] for each in reruns}, {each["ended"] for each in reruns}) == (ids, {"completed"})


async def test_dead_letters_that_cannot_be_queued_stay(
    client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """Without a healthy worker nothing is marked; if Redis is full the mark is removed, and both are recorded."""
    await letter(db, customer_id=await customer(db))
    async with acting_stack(client, redis_url, database_url, worker=False) as stack:
        body = await shown(stack)
        await stack.worker.heartbeat(status="down")
        assert code(await act(stack, REQUEUE, body)) == (503, "no_capacity")
        assert await record(db, "dead_letters") == []
        await stack.worker.heartbeat()
        await client.config_set("maxmemory", 1)
        try:
            assert code(await act(stack, REQUEUE, body)) == (503, "no_capacity")
        finally:
            await client.config_set("maxmemory", 0)

    marked, unmarked = await record(db, "dead_letters")
    assert unmarked[2:] == ({"requeued_as": marked[3]["requeued_as"]}, {"requeued_as": None})
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None


async def test_without_redis_purge_works_and_requeue_is_rejected(
    tmp_path: Path, database_url: str, db: Connection
) -> None:
    """PostgreSQL has the dead letters; the warning says that health still counts the purged ones."""
    await letter(db, customer_id=await customer(db))
    server = EmbeddedRedis(tmp_path, tmp_path / "redis.sock", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    try:
        async with acting_stack(client, server.url, database_url, worker=False) as stack:
            body = await shown(stack)
            await server.stop()
            assert code(await act(stack, REQUEUE, body)) == (503, "no_capacity")
            assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None
            status, document = await act(stack, PURGE, body)
    finally:
        await client.aclose()
        await server.stop()

    assert (status, document["purged"], bool(document["warning"])) == (200, 1, True)
    assert [new for _, _, _, new in await record(db, "dead_letters")] == [None]
