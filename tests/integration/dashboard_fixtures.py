"""A gateway with the dashboard's actions, and requests as a browser sends them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import aiohttp
from redis.asyncio import Redis

from gateway.operations.session import COOKIE, issue
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack

BASE = "/internal/dashboard"
BEARER = {"Authorization": f"Bearer {SERVICE_TOKEN}"}
Connection = Any
Response: TypeAlias = tuple[int, dict[str, Any]]


def browser(stack: Stack, **changes: str) -> dict[str, str]:
    """The headers of a browser with a session, from the dashboard itself."""
    value = issue(SERVICE_TOKEN, 4e9)  # Valid until 2096.
    return {"Cookie": f"{COOKIE}={value}", "Origin": stack.url, "Sec-Fetch-Site": "same-origin"} | changes


@asynccontextmanager
async def acting_stack(client: Redis, redis_url: str, database_url: str, **changes: Any) -> AsyncIterator[Stack]:
    """A ready gateway with PostgreSQL."""
    async with running_stack(client, redis_url, database_url=database_url, **changes) as stack:
        yield stack


async def act(stack: Stack, path: str, body: Any, headers: dict[str, str] | None = None) -> Response:
    """POST an action, with the service token unless there are `headers`; status and document."""
    sent = {"Content-Type": "application/json"} | (BEARER if headers is None else headers)
    async with stack.http.post(f"{stack.url}{BASE}{path}", data=json.dumps(body), headers=sent) as response:
        return response.status, await response.json()


async def groups(stack: Stack) -> Response:
    """GET the groups of dead letters."""
    async with aiohttp.request("GET", f"{stack.url}{BASE}/dead-letters", headers=BEARER) as response:
        return response.status, await response.json()


async def record(db: Connection, table: str) -> list[tuple[Any, ...]]:
    """The recorded changes of a table, oldest first: actor, row, old and new values."""
    rows = await db.fetch(
        "SELECT changed_by, row_key, old, new FROM config_changes WHERE table_name = $1 ORDER BY id", table
    )
    return [(row[0], row[1], *(None if each is None else json.loads(each) for each in row[2:])) for row in rows]


async def call(stack: Stack, path: str = "", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers in lower case, text; without cookies."""
    async with aiohttp.request(method, stack.url + BASE + path, headers=headers) as response:
        return response.status, {n.lower(): v for n, v in response.headers.items()}, await response.text()
