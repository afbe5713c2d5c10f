"""`tierlane up --autoscale`: workers are started and drained with the load, and no request is lost."""

import asyncio
from pathlib import Path

from admin import sql
from eventually import eventually
from load import ALL_WELL, load, one_row_each, verdict
from stack import start_stack

TIERS = ("enterprise", "paid", "free")
SHORT = {
    "TIERLANE_AUTOSCALE_NEED_MS": "1000",
    "TIERLANE_AUTOSCALE_CALM_MS": "2000",
    "TIERLANE_AUTOSCALE_COOLDOWN_MS": "1500",
}
# A worker does 160 requests/s, of which a fifth is sold: 75 requests/s need three workers, and one can serve them.
NO_LIMITS = (
    "UPDATE models SET target_utilization = 0.2",
    "UPDATE tiers SET shadow = true, shed_depth = NULL, shed_wait_ms = NULL",
    "UPDATE customers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 10000",
)


async def test_workers_follow_the_load_and_nothing_is_lost(tmp_path: Path) -> None:
    """5, 75, 5 requests/s: one worker, three, one again; every request is completed and audited."""
    options = ("--backend", "simulated:200", "--workers", "1", "--autoscale", "1:3")
    with start_stack(tmp_path, *options, environment=SHORT) as stack:
        for statement in NO_LIMITS:
            await sql(stack, statement)
        answers = await load(stack, 5, 2.0, TIERS)
        assert list(stack.pids("worker")) == ["worker-1"]

        heavy = asyncio.create_task(load(stack, 75, 8.0, TIERS, done=lambda: len(stack.pids("worker")) == 3))
        await eventually(lambda: len(stack.pids("worker")) == 3, "three workers", 30.0)
        await stack.healthy(3)
        answers += await heavy
        light = asyncio.create_task(load(stack, 5, 8.0, TIERS))
        await eventually(lambda: list(stack.pids("worker")) == ["worker-1"], "one worker again", 20.0)
        await stack.healthy(1)
        answers += await light

        assert verdict(answers) == ALL_WELL
        await one_row_each(stack, answers)
        assert "starting it again" not in (tmp_path / "up.log").read_text()
