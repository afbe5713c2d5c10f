"""Saturated customers with three gateways, all requests of the first customer at one of them; and while processes are killed.

The supervisor of the stack starts a killed process again; clients send again what a killed gateway did not answer.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cases.customer_load import Window, prepared
from cases.outcome import Check, Outcome, at_least, figure
from cases.saturated import (
    APART_S,
    EQUAL,
    LEAST_INDEX,
    SATURATED,
    SETTLE_S,
    WEIGHTS,
    check_equal,
    check_weights,
    doubts,
    errors,
    loads_of,
    observe,
    saturate,
    weigh,
)
from cases.stack import Stack, started

BACKEND, WORKERS, BATCH, GATEWAYS = "simulated:20+0.25", 8, 8, 3
ONE = "gateway-1"
KILLED = ("gateway", "scheduler", "worker", "redis")
BACK_S = 30.0
POLL_S = 0.05


def run(*, quick: bool) -> Outcome:
    """Measure equal and other weights with a skewed distribution over the gateways, then kill one process after the other."""
    seconds = 10 if quick else 30
    with started(workers=WORKERS, batch=BATCH, backend=BACKEND, gateways=GATEWAYS) as stack:
        keys = prepared(stack, SATURATED)
        data = {
            "equal": saturate(stack, keys, EQUAL, seconds, gateway=ONE),
            "weights": saturate(stack, keys, WEIGHTS, seconds, gateway=ONE),
            "kills": _across_kills(stack, keys, seconds),
        }
    notes = [*doubts("equal weights", data["equal"]), *doubts("weights 1:2:4", data["weights"])]
    return Outcome(judge(data), data, notes)


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge the parts with three gateways, and from each kill on."""
    equal, weights = data["equal"], data["weights"]
    skewed = f"{GATEWAYS} gateways, all of one customer at one"
    checks = [
        figure(f"{skewed}: its requests at that one", f"{equal['of_gateway']:.1%}, {weights['of_gateway']:.1%}"),
        *check_equal(skewed, equal),
        check_weights(f"{skewed}, weights 1:2:4", weights),
        errors(f"{skewed}, weights 1:2:4", weights),
    ]
    for kill, window in zip(data["kills"]["kills"], data["kills"]["windows"], strict=True):
        title = f"across SIGKILL of a {kill['role']}"
        checks += [
            at_least(f"{title}: Jain index of GPU time", window["index"], LEAST_INDEX, "", 4),
            errors(title, window),
            figure(f"{title}: started again after", f"{kill['back_s']:.1f} s; GPUs {window['busy']:.0%} busy"),
        ]
    return checks


def _across_kills(stack: Stack, keys: Sequence[str], seconds: int) -> dict[str, Any]:
    """One run; a process is killed at the start of each window."""
    weigh(stack, EQUAL)
    first = round(SATURATED * APART_S) + SETTLE_S
    windows = [Window(first + n * seconds, first + (n + 1) * seconds) for n in range(len(KILLED))]
    kills: list[dict[str, Any]] = []

    async def kill_in_turn() -> None:
        start = time.monotonic()
        for window, role in zip(windows, KILLED, strict=True):
            await asyncio.sleep(start + window.start - time.monotonic())
            kills.append(await _kill(stack, role, start))

    found = observe(stack, loads_of(keys, EQUAL, windows[-1].end), EQUAL, windows, kill_in_turn)
    return {**found, "kills": kills}


async def _kill(stack: Stack, role: str, start: float) -> dict[str, Any]:
    """Kill the first process of a role, and wait until another one runs in its place."""
    victim = next(each for each in stack.info.processes if each.role == role)
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    while not any(each.name == victim.name and each.pid != victim.pid for each in stack.info.processes):
        if time.monotonic() > killed + BACK_S:
            raise RuntimeError(f"{victim.name} was not started again within {BACK_S:.0f} s.")
        await asyncio.sleep(POLL_S)
    return {"role": role, "at_s": killed - start, "back_s": time.monotonic() - killed}
