"""An admin's hand in tests: SQL on a running stack, and customers with limits of their own."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import asyncpg

from eventually import eventually
from ledger.postgres import asyncpg_dsn
from stack import Stack

LIMIT = "x-ratelimit-limit-requests"
NO_LIMITS = {"requests_per_second": 1e6, "burst": 1e6, "max_concurrency": 100_000, "tokens_per_minute": 10**12}
"""Of a customer that nothing of its own stops, so that what stops it is the tier's or the pool's."""


class NewCustomer(NamedTuple):
    """A customer that was made for one test, and its key."""

    id: str
    name: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


async def sql(stack: Stack, query: str, *values: object) -> list[asyncpg.Record]:
    """What one statement returns; it is committed when this returns."""
    connection = await asyncpg.connect(asyncpg_dsn(stack.read()["database_url"]))
    try:
        return await connection.fetch(query, *values)
    finally:
        await connection.close()


async def add_customer(stack: Stack, name: str, tier: str, **limits: Any) -> NewCustomer:
    """A new customer, once the gateway on the stack's port knows its key; `limits` are columns of `customers`."""
    columns = ["name", "tier", *limits]
    places = ", ".join(f"${n + 1}" for n in range(len(columns)))
    insert = f"INSERT INTO customers ({', '.join(columns)}) VALUES ({places}) RETURNING id"
    (row,) = await sql(stack, insert, name, tier, *limits.values())
    (issued,) = await sql(stack, "SELECT issue_api_key($1, 'test') AS key", name)
    customer = NewCustomer(str(row["id"]), name, issued["key"])
    await known(customer, stack.url)
    return customer


async def announced(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers of an answer that costs nothing: what comes is no JSON, which is said after the key was looked at."""
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/inference", data=b"what are my limits?") as answer,
    ):
        return answer.headers.copy()


async def known(customer: NewCustomer, url: str, times: int = 1) -> None:
    """Wait until the key is known at `url`, on `times` connections one after the other: gateways may share the port."""
    seen = 0

    async def let_in() -> bool:
        nonlocal seen
        seen = seen + 1 if LIMIT in await announced(url, customer.headers) else 0
        if not seen:
            await asyncio.sleep(0.2)  # Asking with an unknown key too often is held against an address.
        return seen >= times

    await eventually(let_in, f"the key of {customer.name} is known", 20.0)
