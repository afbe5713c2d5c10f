"""A customer whose home changes under load, with two gateways, two Redis servers and catalogs that change at different times."""

import asyncio
import json
import os
import random
import signal
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
from customer_limits import in_force
from eventually import eventually
from integration.batch_fixtures import StartBatches, line, start_batches
from integration.gateway_fixtures import (
    LiteralCatalog,
    Stack,
    TestWorker,
    model,
    reverse_or_vector,
    running_stack,
    tier,
)
from integration.jobs_fixtures import customer_id
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.snapshot import CellRow, Customer
from overshoot import TICK_MS, allowance, always, most_missing
from scheduler.protocol.handover import ArrivingLimits, LimitsHandover, Wanted
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server", "start_batches"]

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
        moved(self.gateways[gateway], version, cell, self.west_server.url, west)

    def held(self, gateway: int) -> int:
        """The requests that wait at a gateway for the limits of their customers."""
        return sum(len(parts.handover) for parts in self.gateways[gateway].gateway.pools.all)

    async def admitted_ms(self) -> list[int]:
        """The times of all admissions in both cells."""
        found: list[int] = []
        for client, prefix in ((self.east, "request:"), (self.west, "{cell:west}:request:")):
            names = [name async for name in client.scan_iter(f"{prefix}*", count=1000)]
            rows = [await client.hmget(name, "who", "env", "code") for name in names]
            found += [int(env[:13]) for who, env, code in rows if who.split(b" ")[1] == b"customer-free" and not code]
        return sorted(found)


def moved(stack: Stack, version: int, cell: str, west_url: str, west: str = "open") -> None:
    """All customers of this gateway's catalog have this cell; `west` is the state of the second one."""
    snapshot = stack.catalog.snapshot
    assert snapshot is not None
    rows = (CellRow("default", None, "open", 1.0), CellRow("west", west_url, west, 1.0))
    customers = {
        each.customer_id: Customer(
            each.customer_id, each.tier, each.tier, False, each.limits, each.max_queue_ms, cell=cell
        )
        for each in (key.identity for key in snapshot.keys.values())
    }
    stack.catalog.snapshot = msgspec.structs.replace(snapshot, version=version, cells=rows, customers=customers)


async def served(stack: Stack) -> None:
    """A gateway serves the second cell."""
    pools = stack.gateway.pools
    await eventually(
        lambda: any(parts.config.cell == "west" and parts.subscriber.was_subscribed for parts in pools.all),
        "the cell is served",
    )


@asynccontextmanager
async def west_worker(url: str) -> AsyncIterator[Redis]:
    """A client of the second cell, where a worker runs."""
    client = command_client(url, PATIENCE_S)
    worker = TestWorker(client, Keys.at(url), reverse_or_vector)
    await worker.heartbeat()
    working = asyncio.create_task(worker.run())
    yield client
    await end_all([working])
    await client.aclose()


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
    async with AsyncExitStack() as stack:
        west = await stack.enter_async_context(west_worker(f"{west_server.url}#west"))
        gateways = [
            await stack.enter_async_context(running_stack(client, redis_url, catalog=catalog, gateway_id=f"g{n}"))
            for n, catalog in enumerate(catalogs)
        ]
        found = Cells(gateways, client, west, west_server)
        for number, each in enumerate(gateways):
            each.worker.answerer = reverse_or_vector
            found.move(number, 2, "default")
            await served(each)
        yield found


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


async def post(stack: Stack, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    """The status and the text of a response."""
    async with stack.http.post(stack.url + path, json=body, headers=stack.key("free") | headers) as response:
        return response.status, await response.text()


async def test_a_gateway_with_an_older_catalog_follows_a_customer_to_its_home(cells: Cells) -> None:
    """Nothing is admitted in the old home, and nothing fails. A request with an Idempotency-Key waits for the newer catalog."""
    cells.move(0, 3, "west")
    assert (await post(cells.gateways[0], "/v1/inference", {"input": "first"}))[0] == 200
    late = cells.gateways[1]

    sent = [
        asyncio.create_task(post(late, "/v1/inference", {"input": "fast"})),
        asyncio.create_task(post(late, "/v1/embeddings", {"model": "tiny", "input": ["one", "two"]})),
        asyncio.create_task(post(late, "/v1/completions", {"model": "tiny", "prompt": "stream", "stream": True})),
    ]
    found = await asyncio.gather(*sent)
    keyed = asyncio.create_task(post(late, "/v1/inference", {"input": "slow"}, **{"Idempotency-Key": "k"}))
    await eventually(lambda: cells.held(1) == 1, "it waits")
    cells.move(1, 3, "west")

    assert [status for status, _ in [*found, await keyed]] == [200] * 4
    assert '"output":"tsaf"' in found[0][1].replace(" ", "")
    assert "maerts" in found[2][1]
    assert found[2][1].endswith("data: [DONE]\n\n")
    assert await cells.west.zcard("{cell:west}:rl:leases:customer-free") == 0
    assert len(late.gateway.pending_requests) == cells.held(1) == 0


async def test_an_idempotency_key_runs_once_wherever_the_home_is(cells: Cells) -> None:
    """The response is replayed from the cell where it ran, also after the customer has returned."""
    stack, ids = cells.gateways[0], list[str]()
    for version, cell in enumerate(("default", "west", "default", "west"), 3):
        cells.move(0, version, cell)
        status, body = await post(stack, "/v1/inference", {"input": "once"}, **{"Idempotency-Key": "first"})
        assert status == 200
        ids.append(json.loads(body)["request_id"])
        assert (await post(stack, "/v1/inference", {"input": cell}, **{"Idempotency-Key": cell}))[0] == 200

    assert set(ids) == {ids[0]}
    assert len(await cells.admitted_ms()) == 3


async def test_a_client_that_leaves_and_a_deadline_end_a_waiting_request(cells: Cells) -> None:
    """As they end any other; nothing is left of it."""
    cells.gateways[0].catalog.age_s = lambda: 60.0  # type: ignore[method-assign]
    await LimitsHandover(cells.east, Keys()).leave(99, {"customer-free": Wanted()})
    left = asyncio.create_task(post(cells.gateways[0], "/v1/inference", {"input": "left"}))
    await eventually(lambda: cells.held(0) == 1, "it waits")
    left.cancel()
    await eventually(lambda: cells.held(0) == 0, "it is gone")

    status, body = await post(cells.gateways[0], "/v1/inference", {"input": "late"})

    assert (status, "deadline_exceeded" in body) == (504, True)
    await eventually(lambda: cells.held(0) == 0, "it is gone")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_customer_whose_home_is_lost_has_no_fresh_burst(cells: Cells, fault: signal.Signals) -> None:
    """Its buckets start empty in the new home, and are refilled at their rate."""
    await cells.east.set("epoch", 1)  # There, a new customer has a full bucket.
    for number in range(2):
        cells.move(number, 3, "west")
        assert (await post(cells.gateways[number], "/v1/inference", {"input": "first"}))[0] == 200
    os.kill(cells.west_server.pid, fault)
    answers, begun = Answers(), int(time.time() * 1000)
    for number in range(2):
        cells.move(number, 4, "default", "draining")

    until = time.monotonic() + 1.5
    await asyncio.gather(*(load(cells, answers, until) for _ in range(4)))
    os.kill(cells.west_server.pid, signal.SIGCONT) if fault is signal.SIGSTOP else None

    names = [name async for name in cells.east.scan_iter("request:*", count=1000)]
    times = sorted([int((await cells.east.hget(name, "env"))[:13]) for name in names])
    bound = allowance(always(RATE), begun, times[-1] + TICK_MS)
    print(f"{len(times)} admitted, bound {bound:.2f}, longest response {answers.longest_s:.3f} s, {answers.statuses}")
    assert set(answers.statuses) == {200, 429}
    assert 0 < len(times) <= bound


async def test_a_catalog_that_lost_changes_is_followed(cells: Cells) -> None:
    """After a failover of PostgreSQL, the mark of a cell may be newer than the newest catalog; not for ever."""
    await LimitsHandover(cells.east, Keys()).leave(99, {"customer-free": Wanted()})

    assert (await post(cells.gateways[0], "/v1/inference", {"input": "late"}))[0] == 200


async def test_jobs_and_lines_of_batches_follow_too(
    client: Redis, start_batches: StartBatches, west_server: EmbeddedRedis
) -> None:
    """A job that arrives before the newer catalog is accepted in the new cell; a batch submits its lines there."""
    url = f"{west_server.url}#west"
    async with start_batches() as bench, west_worker(url) as west:
        stack, free = bench.stack, customer_id("free")
        moved(stack, 2, "default", west_server.url)
        await served(stack)
        east, there = LimitsHandover(client, Keys()), LimitsHandover(west, Keys.at(url))
        states = {"default": (await east.leave(3, {free: Wanted()}))[free]}
        assert await there.arrive(3, [ArrivingLimits(free, in_force(), {}, states)]) == [0]

        status, accepted, _ = await stack.infer({"input": "job"}, Prefer="respond-async")
        assert status == 202
        assert await west.exists("{cell:west}:request:" + accepted["task_id"])

        moved(stack, 4, "default", west_server.url)
        batch = await bench.until((await bench.create([line("one"), line("two")])).id)

        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        assert (await client.hget(f"rl:customer:{free}", "home")).startswith(b"here 4 ")
