"""Coalescing of equal requests on a whole stack: one run for all of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from admin import sql
from key_leaks import leaked_keys
from scheduler.redis_client.connections import command_client
from second_gateway import second_gateway
from stack import Stack, start_stack

Answer = tuple[int, dict[str, Any]]

# Limits follow the measured rate of the GPUs, which is next to nothing here.
NO_LIMITS = "UPDATE tiers SET shadow = true, max_concurrency = 10000, max_queue_depth = 10000"


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file with the name of a failpoint makes the next process die there."""
    return tmp_path_factory.mktemp("gaps")


@pytest.fixture(scope="module")
def equal_stack(tmp_path_factory: pytest.TempPathFactory, gaps: Path) -> Iterator[Stack]:
    """Two workers of 1.2 s a batch, so that all requests of a test are open at the same time."""
    options = ("--backend", "simulated:1200", "--workers", "2")
    armed = {"TIERLANE_TEST_FAILPOINTS": str(gaps)}
    with start_stack(tmp_path_factory.mktemp("equal"), *options, environment=armed) as stack:
        yield stack


@pytest.fixture
async def stack(equal_stack: Stack) -> AsyncIterator[Stack]:
    """Coalescing is enabled; after the test no key is left."""
    await sql(equal_stack, NO_LIMITS)
    await sql(equal_stack, "UPDATE models SET cache_ttl_s = 60")
    await equal_stack.healthy(2)
    yield equal_stack
    client = command_client(equal_stack.redis_url)
    leaks = await leaked_keys(client)
    await client.aclose()
    assert leaks == []


async def send(session: aiohttp.ClientSession, stack: Stack, url: str, text: str) -> Answer:
    headers = stack.headers("enterprise")
    async with session.post(f"{url}/v1/inference", json={"input": text}, headers=headers) as response:
        return response.status, await response.json()


@asynccontextmanager
async def clients() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def audited(stack: Stack, answers: list[Answer], output: str) -> list[asyncpg.Record]:
    """The rows of requests that were all completed with this output and an id of their own."""
    assert Counter(status for status, _ in answers) == {200: len(answers)}
    assert {document["output"] for _, document in answers} == {output}
    rows = await stack.audited([document["request_id"] for _, document in answers])
    assert len(rows) == len(answers)
    return list(rows.values())


def runs(rows: list[asyncpg.Record]) -> list[asyncpg.Record]:
    """The requests that a GPU ran."""
    return [row for row in rows if row["served_from"] is None]


async def test_a_thousand_requests_at_two_gateways_are_one_run(stack: Stack, tmp_path: Path) -> None:
    """One item of one batch, a thousand responses and rows; later equal requests are served from the cache."""
    async with clients() as session, second_gateway(stack, tmp_path) as (_, other):
        urls = (stack.url, other)
        answers = await asyncio.gather(*(send(session, stack, urls[n % 2], "a thousand") for n in range(1000)))
        rows = await audited(stack, list(answers), "dnasuoht a")
        late = await asyncio.gather(*(send(session, stack, url, "a thousand") for url in urls))

    (run,) = runs(rows)
    assert (run["attempts"], run["batch_size"]) == (1, 1)
    sources = Counter(row["served_from"] for row in rows)
    assert sources["collapsed"] + sources["cache"] == 999
    assert sources["collapsed"] > 500, sources  # The others arrived after the run.
    assert {row["batch_id"] for row in rows if row["served_from"] == "collapsed"} == {run["batch_id"]}
    assert len({row["gateway_id"] for row in rows}) == 2
    assert [document["metadata"]["cached"] for _, document in late] == [True, True]


async def test_a_worker_dies_before_it_has_notified_all_followers(stack: Stack, gaps: Path) -> None:
    """The run has ended for some of them: the scheduler notifies the others, without another run."""
    (gaps / "followers_unnotified").touch()
    async with clients() as session:
        answers = await asyncio.gather(*[send(session, stack, stack.url, "untold") for _ in range(300)])

    assert not (gaps / "followers_unnotified").exists()
    (run,) = runs(await audited(stack, list(answers), "dlotnu"))
    assert (run["attempts"], run["batch_size"]) == (1, 1)
