"""Cordon and uncordon on the page for on-call: recorded, confirmed by what was seen, and refused to everybody else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.dashboard_bench import BEARER, act, acting_stack, browser, record
from integration.gateway_fixtures import Stack, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
CORDON = "/workers/cordon"
UNCORDON = "/workers/uncordon"
ONE = {"worker": "worker-1", "healthy_left": 0}


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with one worker, and PostgreSQL."""
    async with acting_stack(client, redis_url, database_url) as running:
        yield running


async def cordoned(db: Connection) -> dict[str, str]:
    return {row[0]: row[1] for row in await db.fetch("SELECT worker, reason FROM cordons")}


async def test_it_is_done_once_and_recorded(stack: Stack, db: Connection) -> None:
    """By a browser on our page, twice, and undone; each change is a row with who, what and why."""
    body = ONE | {"reason": "its fan is loud"}

    assert await act(stack, CORDON, body, browser(stack)) == (
        200, {"worker": "worker-1", "cordoned": True, "changed": True},
    )  # fmt: skip
    assert await cordoned(db) == {"worker-1": "its fan is loud"}
    assert (await act(stack, CORDON, ONE))[1]["changed"] is False
    assert await cordoned(db) == {"worker-1": "its fan is loud"}
    assert await act(stack, UNCORDON, {"worker": "worker-1"}, browser(stack)) == (
        200, {"worker": "worker-1", "cordoned": False, "changed": True},
    )  # fmt: skip
    assert (await act(stack, UNCORDON, {"worker": "worker-1"}))[1]["changed"] is False
    assert await cordoned(db) == {}
    (added, removed) = await record(db, "cordons")
    assert (added[0], added[1], added[2], added[3]["reason"]) == (
        "dashboard (127.0.0.1)", "worker-1", None, "its fan is loud",
    )  # fmt: skip
    assert (removed[0], removed[1], removed[2]["reason"], removed[3]) == (
        "dashboard (127.0.0.1)", "worker-1", "its fan is loud", None,
    )  # fmt: skip


async def test_the_page_shows_whom_postgresql_has_cordoned(stack: Stack) -> None:
    """At once, with each worker's part of the capacity, by which the page says what an action means."""
    await stack.worker.heartbeat("worker-2")
    snapshot = stack.catalog.snapshot
    assert snapshot is not None
    stack.catalog.snapshot = type(snapshot)(
        2, snapshot.tiers, {}, snapshot.keys, snapshot.models, (), frozenset({"worker-1"})
    )

    async with stack.http.get(f"{stack.url}/internal/dashboard/events", headers=BEARER) as answer:
        shown = await answer.json()

    assert {each["id"]: each["cordoned"] for each in shown["workers"]}["worker-1"]
    whole = sum(each["capacity_rps"] for each in shown["workers"])
    assert whole == pytest.approx(shown["capacity_rps"], abs=1.0)
    assert whole > 0


async def test_fewer_healthy_workers_than_was_confirmed(stack: Stack, db: Connection) -> None:
    """The operator was told of one more than there is by now: nothing is done."""
    status, said = await act(stack, CORDON, ONE | {"healthy_left": 1}, browser(stack))

    assert (status, said["error"]["code"], said["error"]["param"]) == (409, "changed_meanwhile", "healthy_left")
    assert said["error"]["message"] == (
        "1 healthy workers were confirmed to remain in the pool, but 0 would; nothing was changed. Reload and try again."
    )
    assert await cordoned(db) == {}


@pytest.mark.parametrize("path", [CORDON, UNCORDON])
async def test_a_worker_that_nobody_knows(stack: Stack, db: Connection, path: str) -> None:
    """It is 404, and nothing is written."""
    body = {"worker": "nobody"} | ({"healthy_left": 0} if path == CORDON else {})
    status, said = await act(stack, path, body)

    assert (status, said["error"]["code"], said["error"]["param"]) == (404, "not_found", "worker")
    assert await record(db, "cordons") == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "", "Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "", "Origin": "null"},
        {"Sec-Fetch-Site": "", "Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "", "Origin": ""},
    ],
)
async def test_another_page_acts_in_vain(stack: Stack, db: Connection, headers: dict[str, str]) -> None:
    """Though the browser sent the cookie along; nor does one that does not say where it comes from."""
    sent = {name: value for name, value in browser(stack, **headers).items() if value}
    status, said = await act(stack, CORDON, ONE, sent)

    assert (status, said["error"]["code"]) == (403, "cross_site")
    assert await record(db, "cordons") == []


async def test_an_older_browser_says_origin_alone(stack: Stack, db: Connection) -> None:
    """Which is enough, where it is the host that was asked."""
    sent = browser(stack)
    del sent["Sec-Fetch-Site"]

    assert (await act(stack, CORDON, ONE, sent))[0] == 200
    assert await cordoned(db) == {"worker-1": ""}


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "tierlane_session=9999999999.x"}]
)
async def test_who_has_not_logged_in_does_nothing(stack: Stack, db: Connection, headers: dict[str, str]) -> None:
    """Nor is anything told, whatever page it comes from."""
    status, said = await act(stack, CORDON, ONE, headers | {"Sec-Fetch-Site": "same-origin"})

    assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    assert await record(db, "cordons") == []


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"worker": "worker-1"}, "healthy_left", "required"),
        ({"healthy_left": 0}, "worker", "required"),
        (ONE | {"sure": True}, "sure", "not known"),
        (ONE | {"worker": 7}, "worker", "`str`"),
        (ONE | {"worker": ""}, "worker", "length >= 1"),
        (ONE | {"healthy_left": -1}, "healthy_left", ">= 0"),
        (ONE | {"reason": "x" * 501}, "reason", "length <= 500"),
        (ONE | {"reason": "a\x00b"}, "reason", "control characters"),
        (b'{"worker": "worker-1", "worker": "worker-2", "healthy_left": 0}', "worker", "twice"),
        (b"[]", None, "`object`"),
        (b"{", None, "not valid JSON"),
    ],
)
async def test_a_body_that_cannot_be_meant(
    stack: Stack, db: Connection, body: Any, param: str | None, message: str
) -> None:
    """400, and the field and the fault by name."""
    status, said = await act(stack, CORDON, body)

    assert (status, said["error"]["code"], said["error"]["param"]) == (400, "invalid_request", param)
    assert message in said["error"]["message"]
    assert await record(db, "cordons") == []


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"Content-Type": "text/plain"}, ONE, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, ONE, 415),
        ({}, ONE | {"reason": "x" * 5000}, 413),
    ],
)
async def test_forms_and_large_bodies_are_refused(
    stack: Stack, headers: dict[str, str], body: Any, expected: int
) -> None:
    """A page of another site can send a form without asking; JSON it cannot."""
    assert (await act(stack, CORDON, body, browser(stack) | headers))[0] == expected


async def test_other_methods_are_refused(stack: Stack) -> None:
    """A link cannot act."""
    async with stack.http.get(f"{stack.url}/internal/dashboard{CORDON}", headers=BEARER) as answer:
        assert answer.status == 405


async def test_without_postgresql_nothing_is_done(client: Redis, redis_url: str) -> None:
    """What cannot be recorded is refused in one sentence, whether PostgreSQL is away or this gateway has none."""
    away = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"
    async with acting_stack(client, redis_url, away) as stack:
        status, said = await act(stack, CORDON, ONE)
        assert (status, said["error"]["code"]) == (503, "catalog_unavailable")
        assert said["error"]["message"].startswith("PostgreSQL is not available (")
        assert said["error"]["message"].endswith("), so nothing was changed.")
    async with running_stack(client, redis_url) as stack:
        status, said = await act(stack, UNCORDON, {"worker": "worker-1"})
        assert (status, said["error"]["message"]) == (
            503,
            "This gateway does not use PostgreSQL, so nothing was changed.",
        )


async def test_few_at_a_time(stack: Stack, db: Connection) -> None:
    """Those that wait for a locked row fill the room; the next one is told to come again, and they end when they may."""
    async with db.transaction():
        await db.execute("LOCK TABLE cordons")
        waiting = [asyncio.create_task(act(stack, CORDON, ONE)) for _ in range(4)]
        running = stack.gateway.actions._guard._running
        await eventually(lambda: len(running) == 4, "four are under way")
        status, said = await act(stack, CORDON, ONE)
        assert (status, said["error"]["code"]) == (503, "no_capacity")

    assert sorted(said["changed"] for _, said in await asyncio.gather(*waiting)) == [False, False, False, True]


async def test_an_action_outlives_its_client(stack: Stack, db: Connection) -> None:
    """Who closes the page while it is done finds it done."""
    async with db.transaction():
        await db.execute("LOCK TABLE cordons")
        waiting = asyncio.create_task(act(stack, CORDON, ONE))
        running = stack.gateway.actions._guard._running
        await eventually(lambda: running, "it is under way")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: not running, "it has ended")

    assert await cordoned(db) == {"worker-1": ""}
