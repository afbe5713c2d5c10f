"""Limits are reduced when a GPU is lost, and restored when it is back, within the documented times."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from eventually import eventually
from load import load
from stack import Stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

LOST_ONE = 0.8  # Three of four GPUs are left.


async def capacity(stack: Stack) -> float:
    return float((await stack.health())["capacity_rps"])


async def settled(stack: Stack) -> float:
    """The capacity once all four are measured: 85 % of 4 x 8 in 50 ms, so 544, less the overhead of a batch."""

    async def steady() -> float:
        health = await stack.health()
        return float(health["capacity_rps"]) if health["healthy_gpus"] == 4 and health["capacity_rps"] > 500 else 0.0

    return await eventually(steady, "four measured GPUs", 20.0)


@pytest.mark.parametrize(
    ("role", "sign", "within_s"), [("model", signal.SIGKILL, 1.0), ("worker", signal.SIGSTOP, 2.0)]
)
async def test_limits_are_reduced_and_restored(chaos_stack: Stack, role: str, sign: int, within_s: float) -> None:
    """A crash of the model lowers the capacity within 1 s, a silent worker within 2 s; it is restored within 3 s."""
    loading = asyncio.create_task(load(chaos_stack, 300, 25.0, ("enterprise", "paid", "free")))
    before = await settled(chaos_stack)
    name = "worker-2-model" if role == "model" else "worker-2"
    pid = chaos_stack.pids(role)[name]

    began = time.monotonic()
    os.kill(pid, sign)
    try:
        await eventually(lambda: _lower(chaos_stack, before, role), "a lower capacity", 5.0)
        assert time.monotonic() - began < within_s
    finally:
        if sign == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    await eventually(lambda: _four(chaos_stack), "four healthy GPUs", 20.0)
    began = time.monotonic()
    await eventually(lambda: _full(chaos_stack, before), "the capacity and the limits as before", 10.0)
    assert time.monotonic() - began < 3.0
    await loading


async def _lower(stack: Stack, before: float, role: str) -> bool:
    """Whether the capacity is lower. A killed model is replaced in a fifth of a second, so its successors are killed too."""
    successor = stack.pids(role).get("worker-2-model")
    if successor is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(successor, signal.SIGKILL)
    return await capacity(stack) <= LOST_ONE * before


async def _four(stack: Stack) -> bool:
    return bool((await stack.health())["healthy_gpus"] == 4)


async def _full(stack: Stack, before: float) -> bool:
    health = await stack.health()
    full = all(tier["effective_limit_ratio"] == 1.0 for tier in health["tiers"].values())
    return full and health["capacity_rps"] >= 0.9 * before
