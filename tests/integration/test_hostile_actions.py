"""Whatever is sent as a body to the actions of the page for on-call: a 4xx that names the fault, as described, and nothing done."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from api_description import Described
from gateway.action_door import MAX_BODY_BYTES
from gateway.openapi_doors import DOORS
from integration.dashboard_bench import BEARER
from integration.gateway_fixtures import Stack, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from integration.test_hostile_bodies import BODIES, TEXT_FIELD, plain, post

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
ASKED = {door.path: dict(door.example or {}) for door in DOORS if door.body is not None and door.wants == "service"}
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
