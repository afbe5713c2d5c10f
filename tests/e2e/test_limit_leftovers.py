"""Concurrency leases and counters of requests whose client left are released."""

import asyncio
import random
import socket
import struct
import time
from collections import Counter

import aiohttp
import pytest
from redis.asyncio import Redis

from admin import LIMIT, NewCustomer, add_customer, announced, sql
from eventually import eventually
from scheduler.redis_client.connections import command_client, tag_at
from stack import Stack

CLIENTS = 32
BODY = b'{"input":"abandoned"}'


async def send(url: str, customer: NewCustomer) -> tuple[int, str]:
    """Status and error code."""
    async with (
        aiohttp.ClientSession(headers=customer.headers) as session,
        session.post(f"{url}/v1/inference", json={"input": "abc"}) as response,
    ):
        body = await response.json()
        return response.status, (body.get("error") or {}).get("code", "")


async def time_of_a_request(stack: Stack, customer: NewCustomer) -> float:
    """Seconds of a request that is answered, connection included, while as many clients send as will leave."""
    began = time.monotonic()
    assert Counter(await asyncio.gather(*[send(stack.url, customer) for _ in range(CLIENTS)])) == {(200, ""): CLIENTS}
    return time.monotonic() - began


async def leave(stack: Stack, customer: NewCustomer, times: int, chance: random.Random, answered_s: float) -> None:
    """Send a request and reset its connection, before, while or after it is admitted."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    head = f"POST /v1/inference HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {customer.key}\r\n"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    for _ in range(times):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        await asyncio.sleep(answered_s * chance.choice((0.0, 0.04, 0.07, 0.1, 0.2, 1.0)))
        # A reset, since a client that only ends its sending side may still read the response.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def nothing_counts(client: Redis, customer: NewCustomer, stack: Stack) -> bool:
    """The customer has no lease key, and no request is queued or running."""
    tag = tag_at(client)
    batches, leases = await client.zcard(f"{tag}leases"), await client.exists(f"{tag}rl:leases:{customer.id}")
    return not leases and not batches and not (await stack.health())["queue_depth"]


async def ends(stack: Stack, customer: NewCustomer) -> Counter[str]:
    """How the requests of the customer ended, once all have."""
    query = "SELECT status, error_code, count(*) AS n FROM requests WHERE customer_id = $1 GROUP BY 1, 2"
    rows = await sql(stack, query, customer.id)
    if any(row["status"] in ("queued", "processing") for row in rows):
        return Counter()
    return Counter({row["error_code"] or "completed": row["n"] for row in rows})


MANY = pytest.param(10_000, marks=[pytest.mark.chaos, pytest.mark.timeout(300)])


@pytest.mark.parametrize("count", [1000, MANY])
async def test_clients_that_left_leave_no_counter(simulated: Stack, count: int) -> None:
    """Their leases are released, and a burst of the customer gets exactly the size of its bucket."""
    limits = {"requests_per_second": 50_000, "burst": 50_000, "max_concurrency": 10_000, "tokens_per_minute": 10**12}
    customer = await add_customer(simulated, f"leaves-{count}", "enterprise", **limits)
    client, chance = command_client(simulated.home_url(customer.id)), random.Random(count)
    times, rows = count // CLIENTS + 1, Counter[str]()
    while rows["cancelled"] <= 0.1 * count:  # Once, unless the speed of the machine changes meanwhile.
        answered_s = await time_of_a_request(simulated, customer)
        await asyncio.gather(*[leave(simulated, customer, times, chance, answered_s) for _ in range(CLIENTS)])
        await eventually(lambda: nothing_counts(client, customer, simulated), "no counter is left", 10.0)
        rows = await eventually(lambda: ends(simulated, customer), "every row is closed", 30.0)
        assert set(rows) <= {"cancelled", "completed"}

    small = "UPDATE customers SET requests_per_second = 0.01, burst = 10, max_concurrency = 10 WHERE name = $1"
    await sql(simulated, small, customer.name)

    async def applied() -> bool:
        return (await announced(simulated.url, customer.headers))[LIMIT] == "10"

    await eventually(applied, "the new limit is announced", 3.0)
    burst = Counter(await asyncio.gather(*[send(simulated.url, customer) for _ in range(30)]))
    assert burst == {(200, ""): 10, (429, "rate_limit_exceeded"): 20}
    assert await eventually(lambda: nothing_counts(client, customer, simulated), "no counter is left")
    await client.aclose()
