"""A stack that scales by its own advice: workers come with the load and leave after it, and nobody notices."""

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from eventually import eventually
from ledger.postgres import asyncpg_dsn
from load import ALL_WELL, load, one_row_each, verdict
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
SHORT = {
    "TIERLANE_AUTOSCALE_NEED_MS": "1000",
    "TIERLANE_AUTOSCALE_CALM_MS": "2000",
    "TIERLANE_AUTOSCALE_COOLDOWN_MS": "1500",
}
# A worker does 640 requests/s, of which an admin gives out a fifth: so 300 take three workers, and one can bear them.
ROOM = (
    "UPDATE models SET target_utilization = 0.2",
    "UPDATE tiers SET shadow = true, shed_depth = NULL, shed_wait_ms = NULL",
    "UPDATE customers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 10000",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker, that may become three."""
    options = ("--backend", "simulated:50", "--workers", "1", "--autoscale", "1:3")
    with start_stack(tmp_path_factory.mktemp("scaled"), *options, environment=SHORT) as stack:
        yield stack


async def make_room(stack: Stack) -> None:
    connection = await asyncpg.connect(asyncpg_dsn(stack.read()["database_url"]))
    try:
        for statement in ROOM:
            await connection.execute(statement)
    finally:
        await connection.close()


async def test_workers_follow_the_load_and_nothing_is_lost(stack: Stack) -> None:
    """20, 300, 20 requests/s: one worker, three, one again; every request answered well, and audited."""
    await make_room(stack)
    answers = await load(stack, 20, 2.0, TIERS)
    assert list(stack.pids("worker")) == ["worker-1"]

    heavy = asyncio.create_task(load(stack, 300, 8.0, TIERS))
    await eventually(lambda: len(stack.pids("worker")) == 3, "three workers", 8.0)
    await stack.healthy(3)
    answers += await heavy
    light = asyncio.create_task(load(stack, 20, 8.0, TIERS))
    await eventually(lambda: list(stack.pids("worker")) == ["worker-1"], "one worker again", 20.0)
    await stack.healthy(1)
    answers += await light

    assert verdict(answers) == ALL_WELL
    await one_row_each(stack, answers)
    assert "starting it again" not in (stack.data_dir.parent / "up.log").read_text()
