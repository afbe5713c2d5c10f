"""The actions of the page for on-call in a test's hands: a stack with PostgreSQL, and requests as a browser sends them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from redis.asyncio import Redis

from gateway.operations.session import COOKIE, issue
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack

BASE = "/internal/dashboard"
BEARER = {"Authorization": f"Bearer {SERVICE_TOKEN}"}
Connection = Any
Said = tuple[int, dict[str, Any]]


def browser(stack: Stack, **changes: str) -> dict[str, str]:
    """The headers of a browser that has logged in, on our own page."""
    value = issue(SERVICE_TOKEN, 4e9)  # In 2096: no clock is near.
    return {"Cookie": f"{COOKIE}={value}", "Origin": stack.url, "Sec-Fetch-Site": "same-origin"} | changes


@asynccontextmanager
async def acting_stack(client: Redis, redis_url: str, database_url: str, **changes: Any) -> AsyncIterator[Stack]:
    """A ready gateway with PostgreSQL for the actions."""
    async with running_stack(client, redis_url, database_url=database_url, **changes) as stack:
        yield stack


async def act(stack: Stack, path: str, body: Any, headers: dict[str, str] | None = None) -> Said:
    """POST an action, as the service token unless `headers` say who; status and document. `body` may be bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | (BEARER if headers is None else headers)
    async with aiohttp.request("POST", f"{stack.url}{BASE}{path}", data=raw, headers=sent) as answer:
        return answer.status, await answer.json()


async def groups(stack: Stack) -> Said:
    """How many dead letters the page shows."""
    async with aiohttp.request("GET", f"{stack.url}{BASE}/dead-letters", headers=BEARER) as answer:
        return answer.status, await answer.json()


async def record(db: Connection, table: str) -> list[tuple[Any, ...]]:
    """Who changed what, as `config_changes` has it, oldest first."""
    rows = await db.fetch(
        "SELECT changed_by, row_key, old, new FROM config_changes WHERE table_name = $1 ORDER BY id", table
    )
    return [(row[0], row[1], *(None if each is None else json.loads(each) for each in row[2:])) for row in rows]
