"""Waiting jobs of one customer beside the requests of others, while the GPUs are busy: nobody else may be rejected."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from cases.customer_load import (
    Load,
    Window,
    answers_in,
    causes,
    failed,
    latencies_of,
    listed,
    percentile,
    refused,
    run_loads,
)
from cases.outcome import Check, figure, none_of
from cases.stack import Stack

OTHERS, REQUESTS, SEND_S = 10, 200, 10.0
SHORT, LONG = 40, 400
"""Words of the requests of others, of jobs and of the flood."""
FLOOD_RPS = 120.0
"""More than eight workers can do of long requests, so that the jobs wait."""
SUBMIT_S, OTHERS_S = 1.0, 4.0
"""The times of the jobs and of the others after the start of the flood."""
CONNECTIONS = 64
DRAIN_S = 120.0
TIER = "free"


def beside_jobs(stack: Stack, keys: Sequence[str], count: int) -> dict[str, Any]:
    """Submit `count` jobs of one customer during a flood by another; then ten others send 200 requests."""
    window = Window(0, OTHERS_S + SEND_S)
    flood = Load(keys[OTHERS + 1], LONG, FLOOD_RPS, end_s=window.end)
    rate = REQUESTS / OTHERS / SEND_S
    others = [Load(key, SHORT, rate, begin_s=OTHERS_S, end_s=window.end) for key in keys[:OTHERS]]
    accepted: Counter[int] = Counter()
    waiting: list[int] = []

    async def submit() -> None:
        await asyncio.sleep(SUBMIT_S)
        accepted.update(await _submit(stack, keys[OTHERS], count))
        waiting.append(await asyncio.to_thread(_waiting, stack))
        await asyncio.sleep(SEND_S)
        waiting.append(await asyncio.to_thread(_waiting, stack))

    run_loads(stack, [flood, *others], submit)
    _drain(stack)
    # Answers that come after the end of the load, too.
    found, of_flood = [each for load in others for each in load.answers], answers_in([flood], window)
    return {
        "submitted": {str(status): number for status, number in accepted.items()},
        "waiting": waiting,
        "requests": len(found),
        "p50_ms": percentile(latencies_of(found), 50),
        "p99_ms": percentile(latencies_of(found), 99),
        "refused": refused(found),
        "failed": failed(found),
        "causes": causes(found),
        "flood_answered": len(latencies_of(of_flood)),
        "flood_refused": refused(of_flood),
        "flood_causes": causes(of_flood),
    }


def check_jobs(title: str, found: Mapping[str, Any]) -> list[Check]:
    """Judge the rejections of the others."""
    return [
        none_of(f"{title}: of {found['requests']} requests of {OTHERS} customers, refused", found["refused"]),
        none_of(f"{title}: of these, failed", found["failed"]),
        figure(f"{title}: responses to its jobs", listed(found["submitted"])),
        figure(
            f"{title}: jobs that waited at the start, at the end", ", ".join(str(each) for each in found["waiting"])
        ),
        figure(f"{title}: p50, p99 of the others", f"{found['p50_ms']:.0f}, {found['p99_ms']:.0f} ms"),
        figure(
            f"{title}: errors of the others; of the flood",
            f"{listed(found['causes'])}; {listed(found['flood_causes'])}",
        ),
    ]


async def _submit(stack: Stack, key: str, count: int) -> Counter[int]:
    """Submit jobs; returns how often each status occurred."""
    headers = {"Authorization": f"Bearer {key}", "Prefer": "respond-async"}
    body = {"input": " ".join(["word"] * LONG)}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS), headers=headers) as session:

        async def one() -> int:
            async with session.post(stack.info.http_url + "/v1/inference", json=body) as response:
                return response.status

        return Counter(await asyncio.gather(*(one() for _ in range(count))))


def _waiting(stack: Stack) -> int:
    return int(stack.operator_get("/internal/health")["tiers"][TIER]["background_depth"])


def _drain(stack: Stack) -> None:
    """Wait until no job waits. Raises RuntimeError after DRAIN_S."""
    deadline = time.monotonic() + DRAIN_S
    while waiting := _waiting(stack):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{waiting} jobs still wait {DRAIN_S:.0f} s after the load.")
        time.sleep(0.5)
