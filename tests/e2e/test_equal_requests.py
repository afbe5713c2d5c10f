"""Equal requests on a whole stack: one run for a thousand of them, whichever gateway they came to and whoever dies."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from admin import sql
from eventually import eventually
from faults import busy_worker
from key_leaks import leaked_keys
from scheduler.redis_client.connections import command_client
from second_gateway import second_gateway
from stack import Stack, start_stack

# What is shown here is who runs. Limits follow the measured rate of the GPUs, which is next to nothing here.
OPEN = "UPDATE tiers SET shadow = true, max_concurrency = 10000, max_queue_depth = 10000"


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gaps")


@pytest.fixture(scope="module")
def equal_stack(tmp_path_factory: pytest.TempPathFactory, gaps: Path) -> Iterator[Stack]:
    """Two workers of 1.2 s a batch, so that all that is asked at once is under way at once."""
    options = ("--backend", "simulated:1200", "--workers", "2")
    armed = {"TIERLANE_TEST_FAILPOINTS": str(gaps)}
    with start_stack(tmp_path_factory.mktemp("equal"), *options, environment=armed) as stack:
        yield stack


@pytest.fixture
async def stack(equal_stack: Stack) -> AsyncIterator[Stack]:
    """Sharing is on; after the test nothing is left behind."""
    await sql(equal_stack, OPEN)
    await sql(equal_stack, "UPDATE models SET cache_ttl_s = 60")
    await equal_stack.healthy(2)
    yield equal_stack
    client = command_client(equal_stack.redis_url)
    leaks = await leaked_keys(client)
    await client.aclose()
    assert leaks == []


Answer = tuple[int, dict[str, Any]]


async def ask(session: aiohttp.ClientSession, stack: Stack, url: str, text: str, tier: str) -> Answer:
    """Status and document; status 0 where the connection broke."""
    try:
        async with session.post(f"{url}/v1/inference", json={"input": text}, headers=stack.headers(tier)) as answer:
            return answer.status, await answer.json()
    except aiohttp.ClientError:
        return 0, {}


@asynccontextmanager
async def clients() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def audited(stack: Stack, answers: list[Answer], output: str) -> list[asyncpg.Record]:
    """Every answer is a 200 with this output and an id of its own; their rows."""
    assert Counter(status for status, _ in answers) == {200: len(answers)}
    assert {document["output"] for _, document in answers} == {output}
    rows = await stack.audited([document["request_id"] for _, document in answers])
    assert len(rows) == len(answers)
    return list(rows.values())


def runs(rows: list[asyncpg.Record]) -> list[asyncpg.Record]:
    """Those for which a GPU worked: each run names the size of its batch, and so do those who share it."""
    return [row for row in rows if row["served_from"] is None]


async def test_a_thousand_at_two_gateways_are_one_run(stack: Stack, tmp_path: Path) -> None:
    """One GPU item, a thousand answers and audit rows, which say who was collapsed; then the answer is there at once."""
    async with clients() as session, second_gateway(stack, tmp_path) as (_, other):
        urls = (stack.url, other)
        answers = await asyncio.gather(
            *(ask(session, stack, urls[n % 2], "a thousand", "enterprise") for n in range(1000))
        )
        rows = await audited(stack, list(answers), "dnasuoht a")
        late = await asyncio.gather(*(ask(session, stack, url, "a thousand", "enterprise") for url in urls))

    (run,) = runs(rows)
    assert (run["attempts"], run["batch_size"]) == (1, 1)
    said = Counter(row["served_from"] for row in rows)
    assert said["collapsed"] + said["cache"] == 999
    assert said["collapsed"] > 500, said  # The others came when it had ended.
    assert {row["batch_id"] for row in rows if row["served_from"] == "collapsed"} == {run["batch_id"]}
    assert len({row["gateway_id"] for row in rows}) == 2
    assert [document["metadata"]["cached"] for _, document in late] == [True, True]
    assert [row["served_from"] for row in await audited(stack, list(late), "dnasuoht a")] == ["cache"] * 2


async def test_two_customers_are_two_runs(stack: Stack) -> None:
    """Nobody's answer is another customer's, and nobody learns by the time what another one asks."""
    async with clients() as session:
        tiers = ("enterprise", "paid")
        answers = await asyncio.gather(*(ask(session, stack, stack.url, "two", tiers[n % 2]) for n in range(100)))

    rows = await audited(stack, list(answers), "owt")
    assert sorted(row["tier"] for row in runs(rows)) == ["enterprise", "paid"]
    assert Counter(row["tier"] for row in rows) == {"enterprise": 50, "paid": 50}


async def test_a_global_model_is_one_run_for_all(stack: Stack) -> None:
    """As its `cache_scope` says, within a second of the change; the free one's run is lifted or ridden on."""
    await sql(stack, "UPDATE models SET cache_scope = 'global'")
    async with clients() as session:

        async def shared() -> bool:
            text = f"warm {asyncio.get_running_loop().time()}"
            asked = [ask(session, stack, stack.url, text, tier) for tier in ("free", "enterprise")]
            rows = await stack.audited([document["request_id"] for _, document in await asyncio.gather(*asked)])
            return len(runs(list(rows.values()))) == 1

        try:
            await eventually(shared, "they share", 15.0)
        finally:
            await sql(stack, "UPDATE models SET cache_scope = 'customer'")


async def waiting(stack: Stack, count: int) -> None:
    """Until so many ride on one run."""
    client = command_client(stack.redis_url)

    async def fast_path_request() -> bool:
        lists = [key async for key in client.scan_iter("riders:*")]
        return sum([int(await client.llen(key)) for key in lists]) == count  # type: ignore[misc]

    await eventually(fast_path_request, f"{count} riders")
    await client.aclose()


async def test_the_gateway_of_the_leader_dies(stack: Stack, tmp_path: Path) -> None:
    """It ran already: the run goes on, and every rider of the other gateway is answered once."""
    async with clients() as session, second_gateway(stack, tmp_path) as (process, other):
        led = asyncio.create_task(ask(session, stack, other, "gateway", "enterprise"))
        await running(stack)
        asked = [asyncio.create_task(ask(session, stack, stack.url, "gateway", "enterprise")) for _ in range(100)]
        await waiting(stack, 100)
        process.kill()
        answers = await asyncio.gather(*asked)

        assert (await led)[0] == 0
    rows = await audited(stack, answers, "yawetag")
    assert Counter(row["served_from"] for row in rows) == {"collapsed": 100}


async def running(stack: Stack) -> None:
    client = command_client(stack.redis_url)
    await eventually(lambda: busy_worker(client), "it runs")
    await client.aclose()


@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_a_process_dies_while_riders_wait(stack: Stack, role: str) -> None:
    """Every rider gets one answer, from one run that came to its end."""
    client = command_client(stack.redis_url)
    async with clients() as session:
        asked = [asyncio.create_task(ask(session, stack, stack.url, role, "enterprise")) for _ in range(200)]
        await waiting(stack, 199)
        busy = await eventually(lambda: busy_worker(client), "it runs")
        pids = stack.pids(role)
        os.kill(pids[busy] if role == "worker" else min(pids.values()), signal.SIGKILL)
        answers = await asyncio.gather(*asked)
    await client.aclose()

    (run,) = runs(await audited(stack, answers, role[::-1]))
    assert run["batch_size"] == 1
    assert run["attempts"] in (1, 2)


async def test_a_worker_dies_before_it_has_told_all(stack: Stack, gaps: Path) -> None:
    """The run has ended for the first of them: the scheduler tells the others, without another run."""
    (gaps / "riders_untold").touch()
    async with clients() as session:
        asked = [ask(session, stack, stack.url, "untold", "enterprise") for _ in range(300)]
        answers = await asyncio.gather(*asked)

    assert not (gaps / "riders_untold").exists()
    (run,) = runs(await audited(stack, list(answers), "dlotnu"))
    assert (run["attempts"], run["batch_size"]) == (1, 1)
