"""SQL on a running stack, and customers with their own limits."""

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
"""Limits of a customer that only its tier and its pool limit."""


class NewCustomer(NamedTuple):
    """A customer of one test, and its API key."""

    id: str
    name: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


async def sql(stack: Stack, query: str, *values: object) -> list[asyncpg.Record]:
    """Run one statement and commit it; its rows."""
    connection = await asyncpg.connect(asyncpg_dsn(stack.info.database_url))
    try:
        return await connection.fetch(query, *values)
    finally:
        await connection.close()


async def add_customer(stack: Stack, name: str, tier: str, **limits: Any) -> NewCustomer:
    """Create a customer with a key, and wait until the gateway knows it; `limits` are columns of `customers`."""
    columns = ["name", "tier", *limits]
    places = ", ".join(f"${n + 1}" for n in range(len(columns)))
    insert = f"INSERT INTO customers ({', '.join(columns)}) VALUES ({places}) RETURNING id"
    (row,) = await sql(stack, insert, name, tier, *limits.values())
    (issued,) = await sql(stack, "SELECT issue_api_key($1, 'test') AS key", name)
    customer = NewCustomer(str(row["id"]), name, issued["key"])
    await known(customer, stack.url)
    return customer


async def announced(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers of a request that costs nothing: its body is no JSON, which is checked after the key."""
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/inference", data=b"no JSON") as response,
    ):
        return response.headers.copy()


async def known(customer: NewCustomer, url: str, times: int = 1) -> None:
    """Wait until the key is known at `url` in `times` successive requests: several gateways may share the port."""
    successes = 0

    async def is_known() -> bool:
        nonlocal successes
        successes = successes + 1 if LIMIT in await announced(url, customer.headers) else 0
        if not successes:
            await asyncio.sleep(0.2)  # Too many requests with an unknown key are limited by address.
        return successes >= times

    await eventually(is_known, f"the key of {customer.name} is known", 20.0)
