"""What limits remember of requests that nobody waits for any more: nothing that would be missing later."""

import asyncio
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from redis.asyncio import Redis

from admin import LIMIT, NewCustomer, add_customer, announced, known, sql
from eventually import eventually
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from second_gateway import second_gateway
from stack import Stack, start_stack

LONG_MS = "30000"
SLOW = ("--backend", "simulated:1500", "--workers", "1", "--max-batch-size", "1")
FREE_AGAIN_S = 5.0
CLIENTS = 32


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One GPU that takes 1.5 s for each request, of which each has half a minute: four would need 6 s."""
    environment = {"TIERLANE_TOTAL_REQUEST_MS": LONG_MS}
    with start_stack(tmp_path_factory.mktemp("slow"), *SLOW, environment=environment) as stack:
        yield stack


@pytest.fixture
async def redis(slow_stack: Stack) -> AsyncIterator[Redis]:
    """A client of the slow stack's Redis."""
    client = command_client(slow_stack.redis_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def capacity_on_paper(client: Redis) -> AsyncIterator[None]:
    """A GPU that says it is quick and never takes a batch: so capacity refuses nobody, and the queue still stands."""
    presence, heartbeat = (
        Presence(client, Keys()),
        WorkerReport("paper", "ready", 0.0, 0, 1000.0, 50.0, "simulated", "v1"),
    )

    async def beats() -> None:
        while True:
            await presence.worker_beat(heartbeat)
            await asyncio.sleep(0.25)

    beating = asyncio.create_task(beats())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await presence.worker_gone("paper")


def leases(customer: NewCustomer) -> str:
    return f"rl:leases:{customer.id}"


async def ask(url: str, customer: NewCustomer) -> tuple[int, str]:
    """Status and error code; status 0 where the connection broke."""
    timeout = aiohttp.ClientTimeout(total=40)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=customer.headers) as session,
            session.post(f"{url}/v1/inference", json={"input": "abc"}) as answer,
        ):
            body = await answer.json()
            return answer.status, (body.get("error") or {}).get("code", "")
    except aiohttp.ClientError:
        return 0, ""


async def held(client: Redis, customer: NewCustomer) -> int:
    """Leases that count now."""
    seconds, microseconds = await client.time()
    return int(await client.zcount(leases(customer), f"({seconds * 1000 + microseconds // 1000}", "+inf"))


async def fill(client: Redis, url: str, customer: NewCustomer) -> "list[asyncio.Task[tuple[int, str]]]":
    """Four requests under way at this gateway: all that the customer may have."""
    asking = [asyncio.create_task(ask(url, customer)) for _ in range(4)]

    async def full() -> bool:
        return await held(client, customer) == 4

    await eventually(full, "four leases")
    return asking


async def test_a_killed_gateway_holds_no_concurrency(slow_stack: Stack, redis: Redis, tmp_path: Path) -> None:
    """Four of four under way there: here 429; killed: within five seconds four enter here, and the fifth does not."""
    stack = slow_stack
    customer = await add_customer(stack, "four", "enterprise", max_concurrency=4, max_queue_ms=30_000)
    async with capacity_on_paper(redis):
        await stack.healthy(2)
        async with second_gateway(stack, tmp_path) as (process, url):
            await known(customer, url)
            lost = await fill(redis, url, customer)
            assert await ask(stack.url, customer) == (429, "rate_limit_exceeded")
            process.kill()
            killed = time.monotonic()
            assert await asyncio.gather(*lost) == [(0, "")] * 4
        assert await held(redis, customer) >= 3  # Nobody gave them back on the way out.

        async def free() -> bool:
            return await held(redis, customer) == 0

        await eventually(free, "no lease is held", FREE_AGAIN_S)
        took_s = time.monotonic() - killed
        asking = await fill(redis, stack.url, customer)
        fifth = await ask(stack.url, customer)
        print(f"the leases of a killed gateway were free after {took_s:.2f} s")

        assert took_s < FREE_AGAIN_S
        assert fifth == (429, "rate_limit_exceeded")
        assert await asyncio.gather(*asking) == [(200, "")] * 4


async def leave(stack: Stack, customer: NewCustomer, times: int, patience: random.Random) -> None:
    """Ask and hang up without a word, each time on a connection of its own: before, while or after it is looked at."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    body = b'{"input":"nobody waits for this"}'
    head = f"POST /v1/inference HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {customer.key}\r\n"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for _ in range(times):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        await asyncio.sleep(patience.choice((0.0, 0.002, 0.01, 0.03, 0.06)))
        # A reset: what only ends its sending side may still wait for the answer.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def nothing_counts(client: Redis, customer: NewCustomer, stack: Stack) -> bool:
    """No lease of the customer is left, key and all, and nothing waits or runs."""
    batches = await client.zcard("leases")
    return not await client.exists(leases(customer)) and not batches and not (await stack.health())["queue_depth"]


MANY = pytest.param(10_000, marks=[pytest.mark.chaos, pytest.mark.timeout(300)])


@pytest.mark.parametrize("count", [1000, MANY])
async def test_clients_that_left_leave_no_counter(simulated: Stack, count: int) -> None:
    """Their leases are gone with their key, and a fresh burst is what the bucket says: ten, not one more or less."""
    limits = {"requests_per_second": 50_000, "burst": 50_000, "max_concurrency": 10_000, "tokens_per_minute": 10**12}
    customer = await add_customer(simulated, f"leaves-{count}", "enterprise", **limits)
    client = command_client(simulated.redis_url)
    patience = random.Random(count)
    began = time.monotonic()
    await asyncio.gather(*[leave(simulated, customer, count // CLIENTS + 1, patience) for _ in range(CLIENTS)])
    took_s = time.monotonic() - began
    await eventually(lambda: nothing_counts(client, customer, simulated), "no counter is left", 10.0)
    rows = await eventually(lambda: ends(simulated, customer), "every row is closed", 30.0)
    print(f"{count} asked and left in {took_s:.1f} s, of them let in and ended: {dict(rows)}")

    assert rows["cancelled"] > 0.1 * count
    assert set(rows) <= {"cancelled", "completed"}

    small = "UPDATE customers SET requests_per_second = 0.01, burst = 10, max_concurrency = 10 WHERE name = $1"
    await sql(simulated, small, customer.name)

    async def obeyed() -> bool:
        return (await announced(simulated.url, customer.headers))[LIMIT] == "10"

    await eventually(obeyed, "the new limit is announced", 3.0)
    burst = Counter(await asyncio.gather(*[ask(simulated.url, customer) for _ in range(30)]))
    assert burst == {(200, ""): 10, (429, "rate_limit_exceeded"): 20}
    assert await eventually(lambda: nothing_counts(client, customer, simulated), "no counter is left")
    await client.aclose()


async def ends(stack: Stack, customer: NewCustomer) -> Counter[str]:
    """How the customer's requests ended, once all have."""
    query = "SELECT status, error_code, count(*) AS n FROM requests WHERE customer_id = $1 GROUP BY 1, 2"
    rows = await sql(stack, query, customer.id)
    if any(row["status"] in ("queued", "processing") for row in rows):
        return Counter()
    return Counter({row["error_code"] or "completed": row["n"] for row in rows})
