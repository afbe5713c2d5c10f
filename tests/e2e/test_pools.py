"""Several models at once: each in its pool, behind the same gateways, under the same limits; versions change in flight."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from redis.asyncio import Redis

from eventually import eventually
from ledger.postgres import asyncpg_dsn
from load import ALL_WELL, Answer, ask, load, one_row_each, verdict
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")

VERSIONED = """
import os, time

class Model:
    version = os.environ["MODEL_VERSION"]

    def predict(self, texts):
        time.sleep(0.02)
        return [text[::-1] for text in texts]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A quick pool, and a slow one beside it."""
    home = tmp_path_factory.mktemp("pools")
    pools = {"TIERLANE_POOLS": "slow=simulated:300"}
    with start_stack(home, "--backend", "simulated:20", "--workers", "2", environment=pools) as stack:
        yield stack


@contextmanager
def worker(stack: Stack, home: Path, name: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker, beside those that the stack has started."""
    own = {"TIERLANE_REDIS_URL": stack.redis_url, "TIERLANE_WORKER_ID": name, "PYTHONPATH": str(home)}
    whole = {k: v for k, v in os.environ.items() if not k.startswith("TIERLANE_")} | own | settings
    with (home / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierlane", "worker"], env=whole, stdout=log, stderr=log, cwd=home
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


async def sql(stack: Stack, statement: str, *values: object) -> None:
    connection = await asyncpg.connect(asyncpg_dsn(stack.read()["database_url"]))
    try:
        await connection.execute(statement, *values)
    finally:
        await connection.close()


async def one(stack: Stack, model: str | None, tier: str = "paid") -> Answer:
    async with aiohttp.ClientSession() as session:
        return await ask(session, stack, tier, stack.key(tier), stack.url, model)


async def test_a_request_joins_the_pool_that_has_its_model(stack: Stack) -> None:
    """Each model answers under its name, the gateway's own where none is named; a stranger's name is refused."""
    await stack.healthy(3)
    answers = [await one(stack, model) for model in (None, "simulated", "slow")]

    assert [(a.status, a.echoed) for a in answers] == [(200, True)] * 3
    assert [a.version for a in answers] == ["simulated-20ms", "simulated-20ms", "simulated-300ms"]
    assert (await one(stack, "nobody")).code == "model_not_found"
    await one_row_each(stack, answers)


async def test_all_models_are_listed(stack: Stack) -> None:
    """Whichever pool they are in."""
    async with aiohttp.ClientSession(headers=stack.headers("free")) as session:
        async with session.get(f"{stack.url}/v1/models") as listed:
            names = [model["id"] for model in (await listed.json())["data"]]
        async with session.get(f"{stack.url}/v1/models/slow") as found:
            assert found.status == 200

    assert names == ["simulated", "slow"]


async def test_jobs_of_another_pool_end(stack: Stack) -> None:
    """They are kept, run and cancelled where their model is."""
    async with aiohttp.ClientSession(headers=stack.headers("paid")) as session:

        async def submit(text: str) -> str:
            wish = {"input": text, "model": "slow"}
            async with session.post(
                f"{stack.url}/v1/inference", json=wish, headers={"Prefer": "respond-async"}
            ) as taken:
                assert taken.status == 202
                return str((await taken.json())["task_id"])

        async def result(task: str) -> dict[str, str]:
            async with session.get(f"{stack.url}/v1/result/{task}") as told:
                return dict(await told.json())

        async def ended(task: str) -> dict[str, str] | None:
            seen = await result(task)
            return seen if seen["status"] != "PENDING" else None

        first = await submit("abc")
        done = await eventually(lambda: ended(first), "the job ends", 10.0)
        second = await submit("def")
        async with session.delete(f"{stack.url}/v1/result/{second}") as cancelled:
            left = await cancelled.json()

    assert (done["status"], done["output"]) == ("SUCCESS", "cba")
    assert left["status"] == "FAILURE"
    assert left["error"]["code"] == "cancelled"


async def test_an_overloaded_pool_leaves_the_other_alone(stack: Stack) -> None:
    """While the slow pool sheds, nothing that others ask of the quick one is refused or lost."""
    await stack.healthy(3)
    flood = asyncio.create_task(load(stack, 400, 4.0, ("free",), "slow"))
    quick = await load(stack, 50, 4.0, ("enterprise", "paid"), "simulated")
    slow = await flood

    assert verdict(quick) == ALL_WELL
    assert any(a.status != 200 for a in slow)
    assert all(a.request_id for a in slow)
    await one_row_each(stack, quick)


async def test_health_tells_each_pool(stack: Stack) -> None:
    """All pools together, and each for itself."""
    await stack.healthy(3)
    seen = await stack.health()

    assert {pool: row["healthy_gpus"] for pool, row in seen["pools"].items()} == {"default": 2, "slow": 1}
    assert seen["capacity_rps"] == pytest.approx(sum(row["capacity_rps"] for row in seen["pools"].values()), abs=0.1)


async def test_a_pool_that_is_named_later_is_served(stack: Stack, tmp_path: Path) -> None:
    """An admin adds a model in SQL and starts its worker; nothing else is touched, and nothing is restarted."""
    where = {"TIERLANE_POOL": "third", "TIERLANE_BACKEND": "simulated:10"}
    with worker(stack, tmp_path, "third-1", **where):
        async with model_row(stack, "later", "third"):

            async def served() -> Answer | None:
                answer = await one(stack, "later")
                return answer if answer.status == 200 else None

            answer = await eventually(served, "the new model answers", 15.0)
            assert answer.version == "simulated-10ms"
            await one_row_each(stack, [answer])

        async def gone() -> bool:
            return (await one(stack, "later")).code == "model_not_found"

        await eventually(gone, "the model is gone")


async def test_a_pool_that_no_row_names_any_more_comes_to_its_end(stack: Stack, tmp_path: Path) -> None:
    """Its row goes while jobs and a request wait there, and gateway and scheduler start anew: each has its end and its row."""
    where = {"TIERLANE_POOL": "fourth", "TIERLANE_BACKEND": "simulated:1000"}
    async with aiohttp.ClientSession(headers=stack.headers("paid")) as session:
        with worker(stack, tmp_path, "fourth-1", **where):
            async with model_row(stack, "renamed", "fourth"):
                await eventually(lambda: _healthy(stack, 1, "fourth"), "the pool serves", 20.0)
                await eventually(lambda: noted(stack, "fourth"), "whoever starts later could know")
                tasks = await asyncio.gather(*(submit(session, stack, f"text-{n}") for n in range(40)))
                asking = asyncio.create_task(one(stack, "renamed"))
                await eventually(lambda: waits(stack, "fourth"), "more wait than run")
            for role in ("gateway", "scheduler"):
                await restarted(stack, role)
            await asyncio.gather(asking, return_exceptions=True)

            async def ended() -> list[str] | None:
                found = [await result(session, stack, task) for task in tasks]
                return None if "PENDING" in found else found

            ends = await eventually(ended, "all jobs end", 30.0)

    assert ends == ["SUCCESS"] * 40
    states = await eventually(lambda: closed(stack, 41), "each has its row, and the row its end", 15.0)
    assert states.count("completed") >= 40  # The gateway of the last one died, perhaps before it ran.


async def submit(session: aiohttp.ClientSession, stack: Stack, text: str) -> str:
    """A job for the model whose row goes; its id."""
    wish = {"input": text, "model": "renamed"}
    async with session.post(f"{stack.url}/v1/inference", json=wish, headers={"Prefer": "respond-async"}) as taken:
        assert taken.status == 202, await taken.text()
        return str((await taken.json())["task_id"])


async def result(session: aiohttp.ClientSession, stack: Stack, task: str) -> str:
    """How a job stands, as far as it can be told now."""
    try:
        async with session.get(f"{stack.url}/v1/result/{task}") as told:
            return str((await told.json()).get("status", "PENDING"))
    except aiohttp.ClientError:
        return "PENDING"


async def noted(stack: Stack, pool: str) -> bool:
    """Whether schedulers have noted the pool."""
    async with Redis.from_url(stack.redis_url) as client:
        return bool(await client.sismember("pools", pool))


async def waits(stack: Stack, pool: str) -> bool:
    """Whether many are in the pool's queue."""
    async with Redis.from_url(stack.redis_url) as client:
        return bool(await client.llen(f"{{{pool}}}:queue:paid") > 5)


async def restarted(stack: Stack, role: str) -> None:
    """Kill all of a role; the supervisor starts them again."""
    before = stack.pids(role)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: all(stack.pids(role).get(n, p) != p for n, p in before.items()), f"{role} is back", 20.0)


async def closed(stack: Stack, count: int) -> list[str] | None:
    """How the requests for the model whose row went stand, once there are so many and none is open."""
    connection = await asyncpg.connect(asyncpg_dsn(stack.read()["database_url"]))
    try:
        rows = await connection.fetch("SELECT status FROM requests WHERE model = 'renamed'")
    finally:
        await connection.close()
    states = [row["status"] for row in rows]
    return states if len(states) == count and {*states} <= {"completed", "failed"} else None


async def test_a_version_changes_without_a_lost_request(stack: Stack, tmp_path: Path) -> None:
    """Workers of two versions share a pool, each by their number; then the old ones leave, and nobody notices."""
    (tmp_path / "versioned.py").write_text(VERSIONED)
    where = {"TIERLANE_POOL": "rolling", "TIERLANE_BACKEND": "versioned:Model"}
    async with model_row(stack, "versioned", "rolling"):
        with worker(stack, tmp_path, "new-1", **where, MODEL_VERSION="v2") as new:
            with (
                worker(stack, tmp_path, "old-1", **where, MODEL_VERSION="v1"),
                worker(stack, tmp_path, "old-2", **where, MODEL_VERSION="v1"),
            ):
                await eventually(lambda: _healthy(stack, 3), "both versions serve", 20.0)
                loading = asyncio.create_task(load(stack, 100, 4.0, TIERS, "versioned"))
                await asyncio.sleep(2.0)  # Under load, not for something: then the old ones are told to leave.
            answers = await loading
            assert {(await one(stack, "versioned")).version for _ in range(20)} == {"v2"}
            assert new.poll() is None

    assert verdict(answers) == ALL_WELL
    assert {a.version for a in answers} == {"v1", "v2"}
    assert answers[-1].version == "v2"
    await one_row_each(stack, answers)


@asynccontextmanager
async def model_row(stack: Stack, name: str, pool: str) -> AsyncIterator[None]:
    """A row of `models` for as long as the block lasts."""
    insert = (
        "INSERT INTO models (name, pool, max_batch_size, max_wait_ms, gpu_timeout_ms, rps_per_gpu, "
        "target_utilization, enabled) VALUES ($1, $2, 8, 40, 3000, 100, 0.9, true)"
    )
    await sql(stack, insert, name, pool)
    try:
        yield
    finally:
        await sql(stack, "DELETE FROM models WHERE name = $1", name)


async def _healthy(stack: Stack, count: int, pool: str = "rolling") -> bool:
    """In the pool whose version changes, if not in another."""
    return bool((await stack.health()).get("pools", {}).get(pool, {}).get("healthy_gpus") == count)
