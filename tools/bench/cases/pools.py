"""Isolation of pools: one pool beside another that is overloaded, and the cost of an unused pool.

The load of the quick pool is constant. Rounds with and without the flood alternate, because the speed of the machine
varies.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from cases.outcome import Check, Outcome, at_most, figure, none_of, over
from cases.stack import CUSTOMERS_RAISED, Stack, started, used_us

QUICK_RPS = 200
SLOW_MS, SLOW_BATCH = 200, 32
SLOW_RPS = SLOW_BATCH * 1000 / SLOW_MS
OVERLOAD = 3.0
MOST_P99 = 1.2
ROUNDS = 5
ADD_POOLS = """
INSERT INTO models (name, pool, max_batch_size, max_wait_ms, rps_per_gpu, target_utilization, enabled)
SELECT 'spare-' || n, 'spare-' || n, 32, 40, 100, 0.9, true FROM generate_series(1, 4) AS n
"""
SPARE = 4


def run(*, quick: bool) -> Outcome:
    """Measure the flood, then an idle stack before and after pools are added."""
    seconds = 5 if quick else 15
    with started(workers=4, backend="simulated:20", pools=f"slow=simulated:{SLOW_MS}") as stack:
        stack.sql(CUSTOMERS_RAISED)
        rounds = [(_alone(stack, seconds), _flooded(stack, seconds)) for _ in range(2 if quick else ROUNDS)]
    with started(workers=1, backend="simulated:20", gateways=1) as stack:
        before = _idle_ms(stack, 2 * seconds)
        stack.sql(ADD_POOLS)
        after = _idle_ms(stack, 2 * seconds)
    data = {"rounds": [{"alone": alone, "flooded": flooded} for alone, flooded in rounds], "idle": [before, after]}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare the medians of the rounds."""
    rounds = data["rounds"]
    alone, flooded = ([each[kind] for each in rounds] for kind in ("alone", "flooded"))
    before, after = (sum(part.values()) for part in data["idle"])
    return [
        figure("quick pool alone: p50, p99", f"{_of(alone, 'p50_ms'):.1f}, {_of(alone, 'p99_ms'):.1f} ms"),
        figure("beside the flood: p50, p99", f"{_of(flooded, 'p50_ms'):.1f}, {_of(flooded, 'p99_ms'):.1f} ms"),
        at_most(
            f"quick pool's p99 beside {OVERLOAD:g} x the slow one's capacity, over its own alone",
            over(_of(flooded, "p99_ms"), _of(alone, "p99_ms")),
            MOST_P99,
            " x",
            2,
        ),
        none_of("requests of the quick pool refused or failed", sum(each["failed"] for each in flooded)),
        figure("answers of the slow pool", f"{_of(flooded, 'slow_rps'):.0f}/s of {SLOW_RPS:.0f}/s"),
        figure("processor time of an idle stack", f"{before:.1f} ms a second"),
        figure("of one more pool that nobody uses", f"{(after - before) / SPARE:.2f} ms a second"),
    ]


def _of(rounds: Sequence[Mapping[str, Any]], figure: str) -> float:
    return float(median(each[figure] for each in rounds))


def _alone(stack: Stack, seconds: int) -> dict[str, Any]:
    found = stack.bench(
        rate=QUICK_RPS,
        mix="enterprise=1,paid=1",
        model="simulated",
        duration=seconds,
        warmup=2,
        connections=128,
        echo="off",
    )
    tiers = found["tiers"].values()
    return {
        "p50_ms": max(float(tier["median_e2el_ms"]) for tier in tiers),
        "p99_ms": max(float(tier["p99_e2el_ms"]) for tier in tiers),
        "failed": sum(int(tier["failed"]) for tier in tiers),
    }


def _flooded(stack: Stack, seconds: int) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as beside:
        flood = beside.submit(
            stack.bench,
            rate=OVERLOAD * SLOW_RPS,
            mix="free=1",
            model="slow",
            duration=seconds + 2,
            warmup=2,
            connections=512,
            echo="off",
        )
        quick = _alone(stack, seconds)
        return quick | {"slow_rps": float(flood.result()["request_throughput"])}


def _idle_ms(stack: Stack, seconds: int) -> dict[str, float]:
    """Milliseconds of CPU a second, by role."""
    before = stack.reading()
    time.sleep(seconds)
    return {role: used / 1000 for role, used in used_us(before, stack.reading(), seconds).items()}
