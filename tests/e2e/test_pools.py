"""Several models at once, each in its own pool behind the same gateways: routing, isolation, and new versions."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from admin import sql
from eventually import eventually
from load import ALL_WELL, Answer, ask, load, one_row_each, verdict
from stack import Stack, start_stack
from tierlane_local.running import bare_environment

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
    """A fast pool and a slow one."""
    options = ("--backend", "simulated:20", "--workers", "2")
    pools = {"TIERLANE_POOLS": "slow=simulated:300"}
    with start_stack(tmp_path_factory.mktemp("pools"), *options, environment=pools) as running:
        yield running


@contextmanager
def worker(stack: Stack, home: Path, name: str, pool: str, backend: str, **env: str) -> Iterator[None]:
    """A further worker of a pool."""
    settings = {"REDIS_URL": stack.redis_url, "WORKER_ID": name, "POOL": pool, "BACKEND": backend}
    env |= {f"TIERLANE_{key}": value for key, value in settings.items()} | {"PYTHONPATH": str(home)}
    env = bare_environment() | env
    with (home / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "tierlane", "worker"]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=home)
    try:
        yield
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


@asynccontextmanager
async def model_row(stack: Stack, name: str, pool: str) -> AsyncIterator[None]:
    """A row of `models` while the block runs."""
    insert = (
        "INSERT INTO models (name, pool, max_batch_size, max_wait_ms, rps_per_gpu, "
        "target_utilization, enabled) VALUES ($1, $2, 8, 40, 100, 0.9, true)"
    )
    await sql(stack, insert, name, pool)
    try:
        yield
    finally:
        await sql(stack, "DELETE FROM models WHERE name = $1", name)


async def send(stack: Stack, model: str | None) -> Answer:
    async with aiohttp.ClientSession() as session:
        return await ask(session, stack, "paid", stack.key("paid"), stack.url, model)


async def healthy(stack: Stack, pool: str, count: int) -> bool:
    return bool((await stack.health()).get("pools", {}).get(pool, {}).get("healthy_gpus") == count)


async def test_a_request_joins_the_pool_of_its_model(stack: Stack, tmp_path: Path) -> None:
    """Also that of a model and a worker that are added while the stack runs; an unknown model is rejected."""
    await stack.healthy(3)
    with worker(stack, tmp_path, "third-1", "third", "simulated:10"):
        async with model_row(stack, "later", "third"):
            await eventually(lambda: healthy(stack, "third", 1), "the new pool serves", 20.0)
            answers = [await send(stack, model) for model in (None, "simulated", "slow", "later")]
            await one_row_each(stack, answers)
            async with (
                aiohttp.ClientSession(headers=stack.headers("free")) as session,
                session.get(f"{stack.url}/v1/models") as response,
            ):
                models = [model["id"] for model in (await response.json())["data"]]

    assert [(a.status, a.echoed) for a in answers] == [(200, True)] * 4
    assert [a.version for a in answers] == ["simulated-20ms", "simulated-20ms", "simulated-300ms", "simulated-10ms"]
    assert {"simulated", "slow", "later"} <= set(models)
    assert (await send(stack, "unknown")).code == "model_not_found"


async def test_jobs_run_and_are_cancelled_in_the_pool_of_their_model(stack: Stack) -> None:
    """A job is stored, run and cancelled where its model is."""
    body, prefer = {"input": "abc", "model": "slow"}, {"Prefer": "respond-async"}
    async with aiohttp.ClientSession(headers=stack.headers("paid")) as session:

        async def submit() -> str:
            async with session.post(f"{stack.url}/v1/inference", json=body, headers=prefer) as response:
                assert response.status == 202
                return f"{stack.url}/v1/result/{(await response.json())['task_id']}"

        async def ended(url: str) -> dict[str, str] | None:
            async with session.get(url) as response:
                document = dict(await response.json())
                return document if document["status"] != "PENDING" else None

        first = await submit()
        document = await eventually(lambda: ended(first), "the job ends")
        async with session.delete(await submit()) as response:
            cancelled = await response.json()

    assert (document["status"], document["output"]) == ("SUCCESS", "cba")
    assert (cancelled["status"], cancelled["error"]["code"]) == ("FAILURE", "cancelled")


async def test_an_overloaded_pool_does_not_affect_another(stack: Stack) -> None:
    """While requests of the slow pool are rejected, all of the fast pool are completed."""
    await stack.healthy(3)
    flood = asyncio.create_task(load(stack, 200, 4.0, ("free",), "slow"))  # Twice what its worker does.
    fast = await load(stack, 50, 4.0, ("enterprise", "paid"), "simulated")
    slow = await flood

    assert verdict(fast) == ALL_WELL
    assert any(a.status != 200 for a in slow)
    assert all(a.request_id for a in slow)
    await one_row_each(stack, fast)


async def test_a_new_version_is_rolled_out_without_a_lost_request(stack: Stack, tmp_path: Path) -> None:
    """Workers of two versions share a pool; then the old ones stop under load."""
    (tmp_path / "versioned.py").write_text(VERSIONED)
    pool = ("rolling", "versioned:Model")
    async with model_row(stack, "versioned", "rolling"):
        with worker(stack, tmp_path, "new-1", *pool, MODEL_VERSION="v2"):
            with (
                worker(stack, tmp_path, "old-1", *pool, MODEL_VERSION="v1"),
                worker(stack, tmp_path, "old-2", *pool, MODEL_VERSION="v1"),
            ):
                await eventually(lambda: healthy(stack, "rolling", 3), "both versions serve", 60.0)
                loading = asyncio.create_task(load(stack, 100, 4.0, TIERS, "versioned"))

                async def old_version_serves() -> bool:
                    return (await send(stack, "versioned")).version == "v1"

                await asyncio.sleep(1.0)
                await eventually(old_version_serves, "the old version serves under load")
            answers = await loading
            assert {(await send(stack, "versioned")).version for _ in range(20)} == {"v2"}

    assert verdict(answers) == ALL_WELL
    assert {a.version for a in answers} == {"v1", "v2"}
    assert answers[-1].version == "v2"
    await one_row_each(stack, answers)
