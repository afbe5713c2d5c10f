"""Customers in several cells behind the same gateways: every kind of request; a cell is opened, drained, closed, lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from admin import NO_LIMITS, NewCustomer, add_customer, known, sql
from eventually import eventually
from integration.admin_fixtures import Admin
from ledger.catalog.snapshot import CellRow
from load import ALL_WELL, Answer, ask, no_collection, one_row_each, verdict
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


@contextmanager
def worker_in(url: str, home: Path, name: str) -> Iterator[None]:
    """A further worker, which starts in the cell at this URL."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TIERLANE_")} | {
        "TIERLANE_REDIS_URL": url,
        "TIERLANE_WORKER_ID": name,
        "TIERLANE_BACKEND": "simulated:50",
    }
    with (home / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "tierlane", "worker"], env=env, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


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


def admin(stack: Stack) -> Admin:
    """The command line on this stack."""
    addresses = stack.read()
    return Admin(addresses["database_url"], TIERLANE_REDIS_URL=addresses["redis_url"])


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


async def test_streams_jobs_and_batches_in_the_second_cell(stack: Stack) -> None:
    """Each has its result, and each of its requests one row."""
    customer = (await customers_of(stack, "kinds"))["c2"][0]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"model": "simulated", "prompt": f"p{n}"}}
        for n in range(40)
    ]  # fmt: skip
    prefer = {"Prefer": "respond-async"}
    async with (
        openai.AsyncOpenAI(api_key=customer.key, base_url=f"{stack.url}/v1", max_retries=0) as client,
        aiohttp.ClientSession(headers=customer.headers) as session,
    ):
        stream = await client.completions.create(model="simulated", prompt="abc", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        async with session.post(f"{stack.url}/v1/inference", json={"input": "abc"}, headers=prefer) as response:
            job = (await response.json())["task_id"]
        raw = "\n".join(map(json.dumps, lines)).encode()
        file = await client.files.create(file=("lines.jsonl", raw), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        async def result() -> Any:
            async with session.get(f"{stack.url}/v1/result/{job}") as response:
                document = await response.json()
                return document if document["status"] != "PENDING" else None

        async def ended() -> Any:
            found = await client.batches.retrieve(batch.id)
            return found if found.status == "completed" else None

        document = await eventually(result, "the job has ended")
        counts = (await eventually(ended, "the batch has ended", 30.0)).request_counts
        async with session.get(f"{stack.url}/v1/me") as response:
            account = await response.json()

    assert (text, document["status"], document["output"]) == ("cba", "SUCCESS", "cba")
    assert (counts.completed, counts.failed) == (40, 0)
    assert account["as_of"] == "now"
    (row,) = await sql(stack, "SELECT pool FROM jobs WHERE id = $1", job)
    assert row["pool"] == "default@c2"
    rows = "SELECT id FROM requests WHERE customer_id::text = $1 AND status = 'completed'"

    async def audited() -> list[Any]:
        return [row["id"] for row in await sql(stack, rows, customer.id)]

    ids = await eventually(lambda: _of_length(audited, 42), "one row for each request")
    assert len(set(ids)) == 42


async def _of_length(read: Callable[[], Awaitable[list[Any]]], count: int) -> list[Any]:
    found = await read()
    assert len(found) <= count
    return found if len(found) == count else []


async def test_a_cell_is_opened_drained_and_closed_under_load(stack: Stack, tmp_path: Path) -> None:
    """A part of the customers moves there and back; every request succeeds, and has one row."""
    await stack.healthy(4)
    of_cells, verbs = await customers_of(stack, "moving"), admin(stack)
    customers = [*of_cells["default"], *of_cells["c2"]]
    third = CellRow("c3", None, "open", 1.0)
    before = await homes(stack, customers)
    rows = (*await cells(stack), third)
    after = {each.name: cells_of(each.id, rows)[0] for each in customers}
    moved = {name for name, cell in after.items() if cell == "c3"}
    assert moved
    assert {name: cell for name, cell in after.items() if name not in moved} == {
        name: cell for name, cell in before.items() if name not in moved
    }
    closed = asyncio.Event()
    with worker_in(f"{stack.redis_url}#c3", tmp_path, "third"):
        loading = asyncio.create_task(load(stack, customers, 120, 6.0, closed.is_set))

        async def answered(cell: str) -> bool:
            return (await cell_depth(stack, cell)) > 0

        await asyncio.sleep(1.0)
        await verbs.done("cell", "open", "c3")
        await eventually(lambda: answered("c3"), "requests are in the new cell")
        await asyncio.sleep(2.0)
        await verbs.done("cell", "drain", "c3")

        async def is_closed() -> bool:
            return (await verbs.run("cell", "close", "c3")).exit_code == 0

        await eventually(is_closed, "the cell is closed", 20.0)
        await asyncio.sleep(1.0)
        closed.set()
        answers = await loading

    assert verdict(flat(answers)) == ALL_WELL
    await one_row_each(stack, flat(answers))
    found = {name: await places_of_third(stack, several) for name, several in answers.items()}
    assert {name for name, count in found.items() if count} == moved


async def cell_depth(stack: Stack, cell: str) -> int:
    """The number of requests in the Redis of a cell, ended ones included."""
    client = command_client(f"{stack.redis_url}#{cell}", 5.0)
    found = [key async for key in client.scan_iter(f"{tag_at(client)}request:*", count=10_000)]
    await client.aclose()
    return len(found)


async def places_of_third(stack: Stack, answers: Sequence[Answer]) -> int:
    """How many of these requests were in c3."""
    client = command_client(f"{stack.redis_url}#c3", 5.0)
    keys = Keys(tag=tag_at(client))
    found = await client.exists(*(keys.request(answer.request_id or "") for answer in answers))
    await client.aclose()
    return int(found)


async def test_the_server_of_one_cell_is_killed_under_load(stack: Stack) -> None:
    """The customers of the other do not notice; its own are served by workers directly, and again through the new server."""
    await stack.healthy(4)
    of_cells = await customers_of(stack, "killed")
    customers = [*of_cells["default"], *of_cells["c2"]]
    loading = asyncio.create_task(load(stack, customers, 90, 12.0))
    await asyncio.sleep(2.0)
    os.kill(stack.pids("redis")["redis-c2"], signal.SIGKILL)
    answers = await loading
    own, others = ([a for each in of_cells[cell] for a in answers[each.name]] for cell in ("c2", "default"))

    assert verdict(own) == verdict(others) == ALL_WELL
    await eventually(lambda: not list(stack.data_dir.glob("*/cells/*/spool/*.log*")), "the spools are merged", 20.0)
    rows = await stack.audited([answer.request_id or "" for answer in flat(answers)])
    modes = {
        cell: {rows[a.request_id or ""]["mode"] for each in of_cells[cell] for a in answers[each.name]}
        for cell in of_cells
    }
    assert {row["status"] for row in rows.values()} == {"completed"}
    assert modes == {"default": {"queue"}, "c2": {"queue", "direct"}}
    assert rows[own[-1].request_id or ""]["mode"] == "queue"
    await stack.healthy(4)
