"""Whatever is sent as a body to the actions of the page for on-call: a 4xx that names the fault, as described, and nothing done."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from api_description import Described
from gateway.openapi.endpoints import ENDPOINTS
from gateway.operations.action_requests import MAX_BODY_BYTES
from integration.dashboard_bench import BEARER
from integration.gateway_fixtures import Stack, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from integration.test_hostile_bodies import BODIES, TEXT_FIELD, plain, post
from scheduler.errors import ErrorCode, RequestError

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
ASKED = {door.path: dict(door.example or {}) for door in ENDPOINTS if door.body is not None and door.token == "service"}
TEXT = {path: "worker" if "worker" in body else "tier" for path, body in ASKED.items()}
UNMINDED = {("tier", "no text"), ("tier", "null as text")}
"""What is no fault there: letters of no known tier, and of any."""


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with PostgreSQL."""
    async with running_stack(client, redis_url, database_url=database_url) as running:
        yield running


async def test_every_action_is_here() -> None:
    """Four take a body."""
    assert sorted(path.removeprefix("/internal/dashboard/") for path in ASKED) == [
        "dead-letters/purge", "dead-letters/requeue", "workers/cordon", "workers/uncordon",
    ]  # fmt: skip


@pytest.mark.parametrize("path", list(ASKED))
async def test_hostile_bodies_are_named(stack: Stack, db: Connection, path: str) -> None:
    """Status and field of each, headers and form as described; what is too large for an action is 413 before it is read."""
    async with stack.http.get(stack.url + "/openapi.json") as answer:
        described = Described(await answer.json())
    field = TEXT[path]
    wrong = []
    for hostile in (each for each in BODIES if (field, each.name) not in UNMINDED):
        raw = hostile.make(ASKED[path], field)
        large = len(raw) > MAX_BODY_BYTES
        status, headers, body = await post(stack, path, raw, BEARER | dict(hostile.headers))
        error = json.loads(body).get("error", {"param": None, "message": None})
        param = None if large else field if hostile.param == TEXT_FIELD else hostile.param
        if status != (413 if large else hostile.status) or error["param"] != param or not error["message"]:
            wrong.append((hostile.name, status, error["param"], error["message"]))
        wrong += [(hostile.name, fault) for fault in described.faults(path, "POST", status, headers, body)]

    assert wrong == []
    assert await db.fetchval("SELECT count(*) FROM config_changes WHERE changed_by LIKE 'dashboard%'") == 0
    status, headers, body = await post(stack, path, plain(ASKED[path], ""), BEARER)
    assert status in (404, 409) or path.endswith("/uncordon")
    assert described.faults(path, "POST", status, headers, body) == []


@pytest.mark.parametrize("text", ["a\0b", "\0", "a\x01", "a\n", "a\x7f", "a\x85b"])
@pytest.mark.parametrize("path", list(ASKED))
async def test_what_postgresql_cannot_keep_is_named(stack: Stack, path: str, text: str) -> None:
    """A control character in any text of an action is a 400 with its field: PostgreSQL never hears of it."""
    fields = [name for name, value in ASKED[path].items() if isinstance(value, str)]
    for field in {*fields, TEXT[path]}:
        raw = json.dumps(ASKED[path] | {field: text}).encode()
        status, _, body = await post(stack, path, raw, BEARER)

        error = json.loads(body)["error"]
        assert (status, error["param"], error["code"]) == (400, field, "invalid_request")
        assert error["message"] == f"`{field}` must have no control characters."


async def test_what_postgresql_refuses_all_the_same_is_no_outage(stack: Stack) -> None:
    """Its idea of a control character may be wider than ours: the request is at fault, and not PostgreSQL."""
    connect = stack.gateway.actions.dead_letters._transaction
    with pytest.raises(RequestError) as refused:
        async with connect.change("test") as connection:
            await connection.execute("INSERT INTO cordons (worker, reason) VALUES ('w', repeat('x', 501))")

    assert refused.value.code is ErrorCode.INVALID_REQUEST
    with pytest.raises(RequestError) as refused:
        async with connect.read() as connection:
            await connection.fetchval("SELECT $1::text", "a\0b")
    assert refused.value.code is ErrorCode.INVALID_REQUEST
