"""A customer whose home changes under load, with two gateways, two Redis servers and catalogs that change at different times."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
from redis.asyncio import Redis

from conftest import PATIENCE_S
from eventually import eventually
from integration.gateway_fixtures import LiteralCatalog, Stack, TestWorker, model, running_stack, tier
from ledger.catalog.snapshot import CellRow, Customer
from overshoot import TICK_MS, allowance, always, most_missing
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from tierlane.embedded.redis import EmbeddedRedis

RATE, BURST = 40.0, 20.0
SECONDS, MOVE_S, LATE_S = 10.0, 0.5, 0.4
CONNECTIONS = 12


class Answers:
    """The responses of a load, by status."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.longest_s = 0.0


class Cells(NamedTuple):
    """Two gateways, and two cells, each with a worker."""

    gateways: Sequence[Stack]
    east: Redis
    west: Redis
    west_server: EmbeddedRedis

    def move(self, gateway: int, version: int, cell: str, west: str = "open") -> None:
        """The catalog of one gateway changes."""
        catalog = self.gateways[gateway].catalog
        assert catalog.snapshot is not None
        free = next(row for row in catalog.snapshot.tiers if row.name == "free")
        customer = Customer("customer-free", "free", "free", False, free.limits, free.max_queue_ms, cell=cell)  # noqa: FBT003
        rows = (CellRow("default", None, "open", 1.0), CellRow("west", self.west_server.url, west, 1.0))
        catalog.snapshot = msgspec.structs.replace(
            catalog.snapshot, version=version, cells=rows, customers={customer.id: customer}
        )

    async def served(self) -> None:
        """Both gateways serve the second cell."""
        for each in self.gateways:
            places = each.gateway.pools

            def all_served(places: Any = places) -> bool:
                return any(parts.config.cell == "west" and parts.subscriber.was_subscribed for parts in places.all)

            await eventually(all_served, "the cell is served")

    async def admitted_ms(self) -> list[int]:
        """The times of all admissions in both cells."""
        found: list[int] = []
        for client, prefix in ((self.east, "request:"), (self.west, "{cell:west}:request:")):
            names = [name async for name in client.scan_iter(f"{prefix}*", count=1000)]
            rows = [await client.hmget(name, "who", "env", "code") for name in names]
            found += [int(env[:13]) for who, env, code in rows if who.split(b" ")[1] == b"customer-free" and not code]
        return sorted(found)


@pytest.fixture
async def west_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedRedis]:
    """The Redis of the second cell."""
    home = tmp_path_factory.mktemp("west")
    server = EmbeddedRedis(home, home / "socket", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def cells(client: Redis, redis_url: str, west_server: EmbeddedRedis) -> AsyncIterator[Cells]:
    """Both gateways serve both cells; no bucket was lost."""
    async with both(client, redis_url, west_server) as found:
        yield found


@asynccontextmanager
async def both(client: Redis, redis_url: str, west_server: EmbeddedRedis) -> AsyncIterator[Cells]:
    """Two gateways in two cells."""
    limits = {"requests_per_second": RATE, "burst": BURST}
    tiers = (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25), tier("free", 3, 0.1, **limits))
    catalogs = [LiteralCatalog(), LiteralCatalog()]
    catalogs[1].keys = catalogs[0].keys
    for catalog in catalogs:
        catalog.set(tiers, (model(rps_per_gpu=1e5, rps_per_gpu_fixed=True),))
    url = f"{west_server.url}#west"
    west = command_client(url, PATIENCE_S)
    worker = TestWorker(west, Keys.at(url))
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(running_stack(client, redis_url, catalog=catalog, gateway_id=f"g{n}"))
            for n, catalog in enumerate(catalogs)
        ]
        found = Cells(gateways, client, west, west_server)
        for gateway in range(2):
            found.move(gateway, 2, "default")
        working = asyncio.create_task(worker.run())
        try:
            await found.served()
            yield found
        finally:
            await end_all([working])
    await west.aclose()


async def send(stack: Stack, answers: Answers) -> int:
    """One request; its status."""
    begun = time.monotonic()
    async with aiohttp.ClientSession() as session:
        url = f"{stack.url}/v1/inference"
        async with session.post(url, json={"input": "again"}, headers=stack.key("free")) as response:
            body = await response.json()
    answers.statuses[response.status] += 1
    answers.bodies.append(body)
    answers.longest_s = max(answers.longest_s, time.monotonic() - begun)
    return response.status


async def load(cells: Cells, answers: Answers, until: float) -> None:
    """Send to both gateways in turn, far above the limit."""
    for number in range(1_000_000):
        if time.monotonic() >= until:
            return
        await send(cells.gateways[number % 2], answers)
        await asyncio.sleep(0.01)


async def move_back_and_forth(cells: Cells, until: float) -> int:
    """Move the customer; one of the gateways learns it late. Returns how often."""
    draw, version = random.Random(1), 2
    while time.monotonic() < until:
        version += 1
        cell = "west" if version % 2 else "default"
        first = draw.randrange(2)
        cells.move(first, version, cell)
        late = draw.uniform(0.0, LATE_S)
        await asyncio.sleep(late)
        cells.move(1 - first, version, cell)
        await asyncio.sleep(MOVE_S - late)
    return version - 2


async def test_a_customer_whose_home_changes_is_never_admitted_above_its_limit(cells: Cells) -> None:
    """Every request has a response, and none fails for another reason than the limit."""
    answers, until = Answers(), time.monotonic() + SECONDS

    moves, *_ = await asyncio.gather(
        move_back_and_forth(cells, until), *(load(cells, answers, until) for _ in range(CONNECTIONS))
    )

    times = await cells.admitted_ms()
    bound = BURST + allowance(always(RATE), times[0], times[-1] + TICK_MS)
    print(
        f"{moves} moves, {answers.statuses.total()} sent, {len(times)} admitted, bound {bound:.2f}, the bucket lacks "
        f"{most_missing(times, BURST, always(RATE)):.3f} at worst, longest response {answers.longest_s:.3f} s"
    )
    assert set(answers.statuses) == {200, 429}
    assert answers.statuses[200] == len(times) <= bound
    assert most_missing(times, BURST, always(RATE)) <= RATE * TICK_MS / 1000
    assert await cells.east.hget("rl:customer:customer-free", "home") is not None
    assert await cells.west.hget("{cell:west}:rl:customer:customer-free", "home") is not None
