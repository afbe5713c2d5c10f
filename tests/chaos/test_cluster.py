"""A stack on a cluster, under load: its primary is killed or stopped, and its slot moves key by key."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.test_redis_outages import check, under_load
from stack import Stack, start_stack
from tierlane_tools.chaos.faults.cluster import ClusterFaults

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

LATE_S = 1.0
MOVED_S = 2.0


@pytest.fixture
def clustered(tmp_path: Path) -> Iterator[Stack]:
    """Three primaries, three replicas, two gateways, two workers of 50 ms."""
    with start_stack(tmp_path / "stack", "--cluster", "3", "--backend", "simulated:50", "--workers", "2") as stack:
        yield stack


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_primary_of_the_slot_is_lost(clustered: Stack, sign: signal.Signals) -> None:
    """Its replica takes over: each request has one response in time and one row; enterprise is served all the time."""
    await clustered.healthy(2)
    faults = ClusterFaults(clustered.redis_url)
    lost = await faults.owner()
    pid = clustered.pids("redis")[f"redis-{lost + 1}"]

    async def lose() -> None:
        os.kill(pid, sign)

    try:
        results = await under_load(clustered, lose)
        assert await faults.owner() != lost
    finally:
        if sign == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    await check(clustered, results)

    enterprise = [each for each in results if each.answer.tier == "enterprise" and each.sent >= 0]
    assert {each.answer.status for each in enterprise} == {200}
    assert [each for each in enterprise if each.came > each.sent + LATE_S] == []
    await clustered.healthy(2)


async def test_the_slot_moves_key_by_key(clustered: Stack) -> None:
    """For two seconds no server has all keys: enterprise is served meanwhile, and nothing is lost or done twice."""
    await clustered.healthy(2)
    faults = ClusterFaults(clustered.redis_url)
    source, target = await faults.owner(), await faults.other_primary()

    async def move() -> None:
        await faults.begin_move(source, target)
        await faults.move_keys(source, target, 20)
        await asyncio.sleep(MOVED_S)
        await faults.end_move(source, target)

    results = await under_load(clustered, move)
    await check(clustered, results)

    assert await faults.owner() == target
    enterprise = [each for each in results if each.answer.tier == "enterprise" and each.sent >= 0]
    assert {each.answer.status for each in enterprise} == {200}
    assert [each for each in enterprise if each.came > each.sent + LATE_S] == []
    await clustered.healthy(2)
