"""Faults for tests on a running stack: SIGKILL where it hurts."""

import asyncio
import os
import signal

from redis.asyncio import Redis

from eventually import eventually
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from stack import Stack

RESTART_S = 30.0


async def busy_worker(client: Redis) -> str:
    """The name of a worker that runs a batch right now, or ""."""
    for batch_id in await client.zrange(Keys().leases, 0, -1):
        state, worker = await client.hmget(Keys().batch(batch_id.decode()), "state", "worker")
        if state == b"running":
            return str(worker.decode())
    return ""


async def killed_mid_batch(stack: Stack, role: str, times: int, every_s: float, *, healthy: int = 0) -> list[int]:
    """SIGKILL a worker, or its model, while it runs a batch; again and again. Returns the pids.

    The next one only while `healthy` GPUs or more are, of which health misses a dead one within two seconds.
    """
    client = command_client(stack.redis_url)
    gone: list[int] = []
    for _ in range(times):
        await asyncio.sleep(every_s)
        await eventually(lambda: _healthy(stack, healthy), f"{healthy} healthy GPUs", RESTART_S)
        gone.append(await eventually(lambda: _killed(client, stack, role, gone), f"a {role} is killed mid-batch"))
    await client.aclose()
    return gone


async def _healthy(stack: Stack, least: int) -> bool:
    return not least or bool((await stack.health())["healthy_gpus"] >= least)


async def _killed(client: Redis, stack: Stack, role: str, gone: list[int]) -> int:
    """Kill the process that serves a running batch; 0 where there is none that is not gone already."""
    worker = await busy_worker(client)
    pid = stack.pids(role).get(worker if role == "worker" else f"{worker}-model", 0)
    if not pid or pid in gone:
        return 0
    os.kill(pid, signal.SIGKILL)
    return pid
