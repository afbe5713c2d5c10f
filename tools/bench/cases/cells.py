"""Four cells on one machine: workers that follow the load, a quiet cell beside a flood in another, a lost cell, and the cost
of a request in four cells against one.

The model takes the same time for a batch whatever is in it, so that the GPUs are the bottleneck.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cases.customer_load import (
    Answer,
    Load,
    Window,
    answers_due_in,
    answers_in,
    causes,
    failed,
    latencies_of,
    listed,
    percentile,
    prepared,
    refused,
    run_loads,
    wait_for_audit,
)
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import Stack, started, used_us

CELLS, WORKERS, BATCH, BATCH_MS, GATEWAYS = 4, 16, 8, 200, 2
NAMES = ("default", "c2", "c3", "c4")
CAPACITY = WORKERS * BATCH * 1000 / BATCH_MS
"""Requests/s."""
LOOPS = 2 * WORKERS * BATCH
"""Closed loops that keep all workers busy, with as many requests waiting."""
PIN = "UPDATE customers SET cell = '{cell}' WHERE name = 'fair-{number}'"
DEFAULT_ROW = "INSERT INTO cells (name) VALUES ('default') ON CONFLICT DO NOTHING"
ENTERPRISE = "UPDATE customers SET tier = 'enterprise' WHERE name = 'fair-1'"
LATENCY = """
SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FROM requests
WHERE tier = 'enterprise' AND extract(epoch FROM created_at) BETWEEN {start} AND {end}
"""
DIRECT_AT = "SELECT coalesce(extract(epoch FROM max(created_at)), 0) FROM requests WHERE mode = 'direct'"
JUMP_S, JUMPS = 5.0, 6
LOOK_S = 0.05
RATE, COST_S = 400.0, 10.0
MOST_QUIET, LEAST_GOODPUT, LEAST_SHARE, MOST_COST, MOST_BACK_S = 1.2, 0.9, 0.95, 1.10, 3.0


def run(*, quick: bool) -> Outcome:
    """Measure each part, on a stack with four cells and, for comparison, on one with one."""
    seconds = 6.0 if quick else 20.0
    with _stack(CELLS) as stack:
        keys = _pinned(stack)
        data: dict[str, Any] = {
            "moves": _moves(stack, keys),
            "jumps": _jumps(stack, keys),
            "quiet": _quiet(stack, keys, seconds),
            "cost": _cost(stack, keys),
            "lost": _lost(stack, keys, seconds),
        }
    with _stack(1) as stack:
        keys = prepared(stack, CELLS)
        data |= {"one_jumps": _jumps(stack, keys), "one_cost": _cost(stack, keys)}
        data["one_quiet"] = _quiet(stack, keys, seconds)
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge the targets of each part."""
    moves, jumps, quiet, lost = data["moves"], data["jumps"], data["quiet"], data["lost"]
    one = data["one_quiet"]
    goodput = over(jumps["answered"], data["one_jumps"]["answered"])
    cost = over(sum(data["cost"].values()), sum(data["one_cost"].values()))
    return [
        at_most(
            f"All load in one cell: until {LEAST_SHARE:.0%} of {WORKERS} workers serve it", moves["s"], 1.0, " s", 2
        ),
        at_least(
            f"The load jumps to another cell every {JUMP_S:g} s: goodput over that of one cell",
            goodput,
            LEAST_GOODPUT,
            " x",
            3,
        ),
        figure("The same: not answered with 200", listed(jumps["causes"])),
        figure("Enterprise alone in its cell: p99", f"{quiet['alone_ms']:.1f} ms"),
        at_most(
            "Enterprise while free floods another cell: p99 over alone",
            over(quiet["beside_ms"], quiet["alone_ms"]),
            MOST_QUIET,
            " x",
            2,
        ),
        figure("The same at the gateway, without the generator", _beside_alone(*quiet["gateway_ms"])),
        figure("The same in one cell with one queue", _beside_alone(one["alone_ms"], one["beside_ms"])),
        figure("That at the gateway", _beside_alone(*one["gateway_ms"])),
        none_of("Enterprise while free floods another cell: refused or failed", quiet["failed"]),
        at_most(f"CPU of a request at {RATE:g} requests/s in four cells over one", cost, MOST_COST, " x", 3),
        at_most(
            "One cell killed: p99 in the others over before", over(lost["after_ms"], lost["before_ms"]), 1.1, " x", 2
        ),
        none_of("One cell killed: refused or failed in the others", lost["failed"]),
        figure("One cell killed: not answered with 200 in it", listed(lost["own_causes"])),
        at_most("One cell killed: until the last of its requests that failed", lost["back_s"], MOST_BACK_S, " s", 2),
        at_most(
            "One cell killed: until the last of its requests in direct mode", lost["direct_s"], MOST_BACK_S, " s", 2
        ),
    ]


def _beside_alone(alone_ms: float, beside_ms: float) -> str:
    return f"{over(beside_ms, alone_ms) or 0:.2f} x"


def _stack(cells: int) -> Any:
    options = {"cells": cells} if cells > 1 else {}
    return started(workers=WORKERS, batch=BATCH, backend=f"simulated:{BATCH_MS}", gateways=GATEWAYS, **options)


def _pinned(stack: Stack) -> list[str]:
    """The keys of four customers, each in a cell of its own."""
    keys = prepared(stack, CELLS)
    stack.sql(DEFAULT_ROW, *(PIN.format(cell=cell, number=number) for number, cell in enumerate(NAMES, 1)))
    return keys


def _moves(stack: Stack, keys: Sequence[str]) -> dict[str, Any]:
    """How long it takes until nearly all workers serve the one cell that has load."""
    seen: list[tuple[float, int]] = []
    begin, end = 1.0, 6.0

    async def watch() -> None:
        started_at = time.monotonic()
        while (now := time.monotonic() - started_at) < end:
            cells = (await asyncio.to_thread(stack.operator_get, "/internal/health"))["cells"]
            seen.append((now, int(cells["c2"]["healthy_gpus"])))
            await asyncio.sleep(LOOK_S)

    load = Load(keys[1], 1, loops=LOOPS, begin_s=begin, end_s=end)
    run_loads(stack, [load], watch)
    reached = [at - begin for at, gpus in seen if at >= begin and gpus >= LEAST_SHARE * WORKERS]
    return {
        "s": min(reached, default=None),
        "before": next((gpus for at, gpus in reversed(seen) if at < begin), 0),
        "gpus": " ".join(f"{at - begin:.2f}:{gpus}" for at, gpus in seen),
        "causes": causes(load.answers),
    }


def _jumps(stack: Stack, keys: Sequence[str]) -> dict[str, Any]:
    """Closed loops of one customer after another, each in its cell."""
    loads = [Load(keys[n % CELLS], 1, loops=LOOPS, begin_s=n * JUMP_S, end_s=(n + 1) * JUMP_S) for n in range(JUMPS)]
    run_loads(stack, loads)
    answers = answers_in(loads, Window(JUMP_S, JUMPS * JUMP_S))
    return {"answered": len(latencies_of(answers)), "causes": causes(answers)}


def _quiet(stack: Stack, keys: Sequence[str], seconds: float) -> dict[str, Any]:
    """An enterprise customer in one cell, alone and beside a flood of a free customer in another."""
    stack.sql(ENTERPRISE)
    alone, beside = Window(1.0, 1.0 + seconds), Window(2.0 + seconds, 2.0 + 2 * seconds)
    quiet = Load(keys[0], 1, rate=0.1 * CAPACITY, begin_s=0.0, end_s=beside.end)
    flood = Load(keys[1], 1, rate=1.5 * CAPACITY, begin_s=alone.end, end_s=beside.end)
    began = run_loads(stack, [quiet, flood])
    wait_for_audit(stack, began, [quiet, flood])
    before, during = answers_due_in([quiet], alone), answers_due_in([quiet], beside)
    return {
        "alone_ms": percentile(latencies_of(before), 99),
        "beside_ms": percentile(latencies_of(during), 99),
        "gateway_ms": [
            stack.value(LATENCY.format(start=began + window.start, end=began + window.end))
            for window in (alone, beside)
        ],
        "failed": refused(during) + failed(during),
        "causes": causes(during),
        "flood_causes": causes(flood.answers),
        "flood_answered": len(latencies_of(flood.answers)),
    }


def _cost(stack: Stack, keys: Sequence[str]) -> dict[str, float]:
    """CPU of a request by role, in microseconds, at the same total rate of four customers."""
    loads = [Load(key, 1, rate=RATE / len(keys), end_s=COST_S) for key in keys]
    run_loads(stack, loads)
    for load in loads:
        load.answers.clear()
    before = stack.reading()
    run_loads(stack, loads)
    return used_us(before, stack.reading(), sum(len(load.answers) for load in loads))


def _lost(stack: Stack, keys: Sequence[str], seconds: float) -> dict[str, Any]:
    """SIGKILL of the server of one cell, which starts again empty."""
    rate = 0.1 * CAPACITY
    loads = [Load(key, 1, rate=rate, begin_s=n / CELLS / rate, end_s=2 * seconds) for n, key in enumerate(keys)]
    others, own = [*loads[:2], loads[3]], loads[2]
    (pid,) = [each.pid for each in stack.info.processes if each.name == "redis-c3"]
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        started_at = time.monotonic()
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic() - started_at

    began = run_loads(stack, loads, kill)
    wait_for_audit(stack, began, loads)
    before = answers_due_in(others, Window(1.0, killed_at))
    after = answers_due_in(others, Window(killed_at, killed_at + seconds - 1.0))
    lost = answers_due_in([own], Window(killed_at, 2 * seconds))
    return {
        "before_ms": percentile(latencies_of(before), 99),
        "after_ms": percentile(latencies_of(after), 99),
        "failed": refused(after) + failed(after),
        "causes": causes(after),
        "own_causes": causes(lost),
        "own_answered": len(latencies_of(lost)),
        "back_s": _last_fault_s(lost, killed_at),
        "direct_s": max(0.0, float(stack.value(DIRECT_AT)) - began - killed_at),
    }


def _last_fault_s(answers: Sequence[Answer], since: float) -> float:
    """Seconds until the last request that got no result was due."""
    return max((each.due - since for each in answers if each.status != 200), default=0.0)
