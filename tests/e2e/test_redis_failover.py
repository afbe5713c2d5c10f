"""The primary behind Sentinel dies under load: the replica takes over without the last writes, and no request is lost."""

import asyncio
from pathlib import Path

import pytest

from integration.sentinel_fixtures import Failover, failover
from load import ALL_WELL, load, one_row_each, verdict
from stack import start_stack

__all__ = ["failover"]

TIERS = ("enterprise", "paid", "free")


@pytest.mark.timeout(90)
async def test_a_failover_under_load_loses_nothing(failover: Failover, tmp_path: Path) -> None:
    """Every request is answered by its model, in time and once, and has one row: queued, running or new as it was."""
    environment = {"TIERLANE_REDIS_URL": failover.url}
    options = ("--backend", "simulated:50", "--workers", "2")
    with start_stack(tmp_path / "stack", *options, environment=environment) as stack:
        await stack.healthy(2)
        loading = asyncio.create_task(load(stack, 100, 8.0, TIERS))
        await asyncio.sleep(2.0)
        failover.kill_primary()
        answers = await loading

        assert verdict(answers) == ALL_WELL
        await one_row_each(stack, answers)
        await stack.healthy(2)
