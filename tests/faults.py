"""Faults for tests on a running stack: kills of a worker or a model in the middle of a batch."""

import asyncio
import os
import signal
from collections.abc import Collection

from eventually import eventually
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from stack import Stack

RESTART_S = 30.0


async def busy_worker(redis_urls: Collection[str]) -> str:
    """The name of a worker that runs a batch now, in any of these cells, or ""."""
    for url in redis_urls:
        client, keys = command_client(url), Keys.at(url)
        try:
            for batch_id in await client.zrange(keys.leases, 0, -1):
                state, worker = await client.hmget(keys.batch(batch_id.decode()), "state", "worker")
                if state == b"running":
                    return str(worker.decode())
        finally:
            await client.aclose()
    return ""


async def killed_mid_batch(stack: Stack, role: str, times: int, every_s: float, *, healthy: int = 0) -> list[int]:
    """Kill a worker, or its model, while it runs a batch, a number of times; returns the pids.

    Each kill waits for at least `healthy` GPUs; health notices a lost one within two seconds.
    """
    urls, killed = list(stack.cells.values()), list[int]()
    for _ in range(times):
        await asyncio.sleep(every_s)
        await eventually(lambda: _healthy(stack, healthy), f"{healthy} healthy GPUs", RESTART_S)
        killed.append(await eventually(lambda: _killed(urls, stack, role, killed), f"a {role} is killed mid-batch"))
    return killed


async def _healthy(stack: Stack, least: int) -> bool:
    return not least or bool((await stack.health())["healthy_gpus"] >= least)


async def _killed(urls: Collection[str], stack: Stack, role: str, killed: list[int]) -> int:
    """Kill a process that runs a batch; returns its pid, 0 where there is none."""
    worker = await busy_worker(urls)
    pid = stack.pids(role).get(worker if role == "worker" else f"{worker}-model", 0)
    if not pid or pid in killed:
        return 0
    os.kill(pid, signal.SIGKILL)
    return pid
