"""Customers in several cells behind the same gateways: every kind of request; a cell is opened, drained, closed, lost."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import openai
import pytest

from admin import NO_LIMITS, NewCustomer, add_customer, known, sql
from eventually import eventually
from integration.admin_fixtures import Admin
from ledger.catalog.snapshot import CellRow
from load import ALL_WELL, Answer, ask, no_collection, one_row_each, unwell, verdict
from scheduler.cells.places import cell_urls, cells_of
from scheduler.redis_client.connections import command_client, tag_at
from scheduler.redis_client.keys import Keys
from stack import Stack, start_stack

GATEWAYS = 2
EACH = 6
"""Customers of one test in each of two cells."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two cells, each with two workers, two gateways and two schedulers."""
    options = ("--cells", "2", "--gateways", str(GATEWAYS), "--schedulers", "2")
    with start_stack(
        tmp_path_factory.mktemp("cells"), "--backend", "simulated:50", "--workers", "4", *options
    ) as running:
        yield running


async def cells(stack: Stack) -> tuple[CellRow, ...]:
    return tuple(CellRow(*row) for row in await sql(stack, "SELECT name, redis_url, state, weight FROM cells"))


async def homes(stack: Stack, customers: Iterable[NewCustomer]) -> dict[str, str]:
    """The cell of each customer, by name."""
    rows = await cells(stack)
    return {each.name: cells_of(each.id, rows)[0] for each in customers}


async def customers_of(stack: Stack, test: str, tier: str = "enterprise") -> dict[str, list[NewCustomer]]:
    """New customers without limits, by their cells: EACH of both."""
    found: dict[str, list[NewCustomer]] = {"default": [], "c2": []}
    number = 0
    while any(len(several) < EACH for several in found.values()):
        number += 1
        customer = await add_customer(stack, f"{test}-{number}", tier, **NO_LIMITS)
        cell = (await homes(stack, [customer]))[customer.name]
        if len(found[cell]) < EACH:
            found[cell].append(customer)
    for each in (found["default"][-1], found["c2"][-1]):
        await known(each, stack.url, 20)  # At both gateways.
    return found


async def load(
    stack: Stack, customers: Sequence[NewCustomer], rate: float, seconds: float, done: Callable[[], bool] = lambda: True
) -> dict[str, list[Answer]]:
    """Send `rate` requests/s of the customers in turn for `seconds`, and until `done`; the results by customer."""
    url, found = stack.url, dict[str, list[Answer]]()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        with no_collection():
            began, sent = time.monotonic(), list[tuple[str, asyncio.Task[Answer]]]()
            while len(sent) < rate * seconds or not done():
                await asyncio.sleep(max(0.0, began + len(sent) / rate - time.monotonic()))
                who = customers[len(sent) % len(customers)]
                sent.append((who.name, asyncio.create_task(ask(session, stack, "enterprise", who.key, url))))
            for name, task in sent:
                found.setdefault(name, []).append(await task)
    return found


def flat(answers: Mapping[str, list[Answer]]) -> list[Answer]:
    return [answer for several in answers.values() for answer in several]


async def places(stack: Stack, answers: Sequence[Answer]) -> list[set[str]]:
    """The cells whose Redis has each of these requests, in the order of `answers`."""
    found: list[set[str]] = [set() for _ in answers]
    for cell, url in cell_urls(stack.redis_url, await cells(stack)).items():
        client = command_client(url, 5.0)
        keys = Keys(tag=tag_at(client))
        pipeline = client.pipeline(transaction=False)
        for answer in answers:
            pipeline.exists(keys.request(answer.request_id or ""))
        for each, exists in zip(found, await pipeline.execute(), strict=True):
            if exists:
                each.add(cell)
        await client.aclose()
    return found


async def shared_in(stack: Stack, customer: NewCustomer) -> set[str]:
    """The cells that have a part of the limits of a customer."""
    found: set[str] = set()
    for cell, url in cell_urls(stack.redis_url, await cells(stack)).items():
        client = command_client(url, 5.0)
        share = await client.hget(f"{tag_at(client)}rl:customer:{customer.id}", "share")
        if share is not None and int(share.split()[1]) > 0:
            found.add(cell)
        await client.aclose()
    return found


def admin(stack: Stack) -> Admin:
    """The command line on this stack."""
    return Admin(stack.info.database_url, TIERLANE_REDIS_URL=stack.redis_url)


async def test_every_gateway_serves_the_customers_of_each_cell(stack: Stack) -> None:
    """A request is only in the cell of its customer, and has one row."""
    await stack.healthy(4)
    customers = await customers_of(stack, "every")
    everyone = [*customers["default"], *customers["c2"]]
    # Each round has connections of its own, which the gateways share.
    answers = [await load(stack, everyone, 100, 1.0) for _ in range(5)]

    for cell, several in customers.items():
        own = [answer for each in several for some in answers for answer in some[each.name]]
        assert verdict(own) == ALL_WELL
        assert await places(stack, own) == [{cell}] * len(own)
        rows = await stack.audited([answer.request_id or "" for answer in own])
        assert len({row["gateway_id"] for row in rows.values()}) == GATEWAYS


async def test_a_customer_of_both_cells_uses_both_within_its_limits(stack: Stack) -> None:
    """It gets its parts from the allotter of a scheduler, and is never above its rate and burst."""
    limits = {"requests_per_second": 20.0, "burst": 30.0, "max_concurrency": 1000, "spread": 2}
    customer = await add_customer(stack, "both", "enterprise", **limits)
    await known(customer, stack.url, 20)

    async def served() -> bool:
        await load(stack, [customer], 20, 0.5)
        return await shared_in(stack, customer) == {"default", "c2"}

    await eventually(served, "both cells have a part")
    began = time.monotonic()
    answers = (await load(stack, [customer], 80, 3.0))[customer.name]
    accepted = [answer for answer in answers if answer.status == 200]

    assert {answer.status for answer in answers} == {200, 429}
    assert {cell for found in await places(stack, accepted) for cell in found} == {"default", "c2"}
    assert len(accepted) <= 20.0 * (time.monotonic() - began) + 30.0


async def test_streams_jobs_and_batches_in_the_second_cell(stack: Stack) -> None:
    """Each has its result, and each of its requests one row."""
    customer = (await customers_of(stack, "kinds"))["c2"][0]
    async with (
        client_of(stack, customer) as client,
        aiohttp.ClientSession(headers=customer.headers) as session,
    ):
        stream = await client.completions.create(model="simulated", prompt="abc", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        prefer = {"Prefer": "respond-async"}
        async with session.post(f"{stack.url}/v1/inference", json={"input": "abc"}, headers=prefer) as response:
            job = (await response.json())["task_id"]
        batch = await create_batch(client, 40)

        async def result() -> Any:
            async with session.get(f"{stack.url}/v1/result/{job}") as response:
                document = await response.json()
                return document if document["status"] != "PENDING" else None

        document = await eventually(result, "the job has ended")
        counts = await ended(client, batch)
        async with session.get(f"{stack.url}/v1/me") as response:
            account = await response.json()

    assert (text, document["status"], document["output"]) == ("cba", "SUCCESS", "cba")
    assert counts == (40, 0)
    assert account["as_of"] == "now"
    (row,) = await sql(stack, "SELECT pool FROM jobs WHERE id = $1", job)
    assert row["pool"] == "default@c2"
    rows = "SELECT id FROM requests WHERE customer_id::text = $1 AND status = 'completed'"

    async def audited() -> list[Any]:
        return [row["id"] for row in await sql(stack, rows, customer.id)]

    ids = await eventually(lambda: _of_length(audited, 42), "one row for each request")
    assert len(set(ids)) == 42


def client_of(stack: Stack, customer: NewCustomer) -> openai.AsyncOpenAI:
    """OpenAI's client with the key of a customer."""
    return openai.AsyncOpenAI(api_key=customer.key, base_url=f"{stack.url}/v1", max_retries=2)


async def create_batch(client: openai.AsyncOpenAI, count: int) -> str:
    """Create a batch of so many lines; its id."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"model": "simulated", "prompt": f"p{n}"}}
        for n in range(count)
    ]  # fmt: skip
    file = await client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch.id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> tuple[int, int]:
    """The numbers of completed and failed lines, once the batch has ended."""

    async def completed() -> Any:
        await asyncio.sleep(0.1)
        found = await client.batches.retrieve(batch_id)
        return found.request_counts if found.status == "completed" else None

    counts = await eventually(completed, "the batch has ended", 60.0)
    return counts.completed, counts.failed


async def _of_length(read: Callable[[], Awaitable[list[Any]]], count: int) -> list[Any]:
    found = await read()
    assert len(found) <= count
    return found if len(found) == count else []


async def test_a_cell_is_opened_drained_and_closed_under_load(stack: Stack) -> None:
    """Customers and workers move there and back; every request succeeds, and has one row."""
    await stack.healthy(4)
    of_cells, verbs = await customers_of(stack, "moving"), admin(stack)
    customers = [*of_cells["default"], *of_cells["c2"]]
    rows = (*await cells(stack), CellRow("c3", None, "open", 1.0))
    while not any(cells_of(each.id, rows) == ("c3",) for each in customers):
        customers.append(await add_customer(stack, f"moving-too-{len(customers)}", "enterprise", **NO_LIMITS))
    before = await homes(stack, customers)
    after = {each.name: cells_of(each.id, rows)[0] for each in customers}
    moved = {name for name, cell in after.items() if cell == "c3"}
    assert {name: cell for name, cell in after.items() if name not in moved} == {
        name: cell for name, cell in before.items() if name not in moved
    }
    closed = asyncio.Event()
    mover = next(each for each in customers if each.name in moved)
    async with client_of(stack, mover) as client:
        loading = asyncio.create_task(load(stack, customers, 120, 5.0, closed.is_set))
        await asyncio.sleep(1.0)
        await verbs.done("cell", "open", "c3")
        await eventually(lambda: requests_in(stack, "c3"), "requests are in the new cell")
        batch = await create_batch(client, 300)
        await asyncio.sleep(2.0)
        await verbs.done("cell", "drain", "c3")
        there = await requests_in(stack, "c3")

        async def is_closed() -> bool:
            return (await verbs.run("cell", "close", "c3")).exit_code == 0

        await eventually(is_closed, "the cell is closed", 30.0)
        closed.set()
        answers = await loading
        assert await ended(client, batch) == (300, 0)

    assert verdict(flat(answers)) == ALL_WELL, unwell(flat(answers))
    await one_row_each(stack, flat(answers))
    assert {name for name, several in answers.items() if there & {each.request_id for each in several}} == moved


async def requests_in(stack: Stack, cell: str) -> set[str | None]:
    """The requests in the Redis of a cell on the server of the default one, ended ones included."""
    client = command_client(f"{stack.redis_url}#{cell}", 5.0)
    prefix = f"{tag_at(client)}request:"
    found = {key.decode().removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*", count=10_000)}
    await client.aclose()
    return {*found}


@pytest.mark.parametrize(
    ("lost", "name"), [("c2", "redis-c2"), pytest.param("default", "redis", marks=pytest.mark.chaos)]
)
async def test_the_server_of_one_cell_is_killed_under_load(stack: Stack, lost: str, name: str) -> None:
    """The customers of the other do not notice; its own are served by workers directly, and again through the new server."""
    await stack.healthy(4)
    of_cells = await customers_of(stack, f"killed-{lost}")
    customers = [*of_cells["default"], *of_cells["c2"]]
    loading = asyncio.create_task(load(stack, customers, 90, 12.0))
    await asyncio.sleep(2.0)
    os.kill(stack.pids("redis")[name], signal.SIGKILL)
    answers = await loading

    by_cell = {cell: [a for each in several for a in answers[each.name]] for cell, several in of_cells.items()}
    assert {cell: verdict(several) for cell, several in by_cell.items()} == dict.fromkeys(by_cell, ALL_WELL)
    await eventually(lambda: not list(stack.data_dir.glob("gateway-*/**/spool/*.log*")), "the spools are merged", 20.0)
    rows = await stack.audited([answer.request_id or "" for answer in flat(answers)])
    modes = {cell: {rows[answer.request_id or ""]["mode"] for answer in several} for cell, several in by_cell.items()}
    assert {row["status"] for row in rows.values()} == {"completed"}
    assert modes.pop(lost) == {"queue", "direct"}
    assert set.union(*modes.values()) == {"queue"}
    assert rows[by_cell[lost][-1].request_id or ""]["mode"] == "queue"
    await stack.healthy(4)
