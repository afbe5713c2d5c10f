"""Many workers with a model whose batches take nearly the same time whatever is in them: a quiet customer beside a flood, and
enterprise, with fewer workers, beside ten times the capacity of free requests.

The model is slow, so that the GPUs are the bottleneck and the processors of one machine can send the flood.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases.customer_load import Load, prepared
from cases.fairness import LAW, LONG, SHORT
from cases.outcome import Check, Outcome, at_most, figure, none_of, over
from cases.quiet import beside_floods, check_quiet
from cases.stack import CUSTOMERS_RAISED, Stack, started

BATCH_MS, WORD_MS, WORKERS, BATCH, GATEWAYS = 500.0, 0.5, 32, 8, 2
BACKEND = f"simulated:{BATCH_MS:g}+{WORD_MS:g}"
CAPACITY = WORKERS * BATCH / (BATCH_MS + WORD_MS * BATCH * LONG) * 1000
"""Long requests/s."""
QUIET_RPS, QUIET_CUSTOMERS, FLOODS = 2.0, 10, 3
OVER = 1.2
"""The flood of free customers beside a quiet one, times the capacity."""
ENTERPRISE_WORKERS = 8
"""Ten times the capacity of more workers occupies two processors with rejections."""
ENTERPRISE_SHARE, TIMES, CONNECTIONS = 0.2, 10, 2000
MOST_P99 = 1.1
LEAD_S, WARMUP_S = 5, 3
SHORT_QUEUE = "UPDATE tiers SET max_queue_ms = 1500, max_queue_depth = 1000 WHERE name = 'free'"


def run(*, quick: bool) -> Outcome:
    """Measure quiet customers before and beside floods, then enterprise."""
    seconds = 10 if quick else 60
    with started(workers=WORKERS, batch=BATCH, backend=BACKEND, gateways=GATEWAYS) as stack:
        keys = prepared(stack, QUIET_CUSTOMERS + FLOODS)
        quiet = [Load(key, SHORT, QUIET_RPS) for key in keys[:QUIET_CUSTOMERS]]
        floods = [Load(key, LONG, OVER * CAPACITY / FLOODS) for key in keys[QUIET_CUSTOMERS:]]
        data: dict[str, Any] = {"quiet": beside_floods(stack, WORKERS, quiet, floods, seconds)}
    with started(workers=ENTERPRISE_WORKERS, batch=BATCH, backend=BACKEND, gateways=GATEWAYS) as stack:
        data["enterprise"] = _enterprise(stack, prepared(stack, FLOODS), 6 if quick else 30)
    return Outcome(judge(data), data, [LAW])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge quiet customers and enterprise."""
    found = data["enterprise"]
    title = f"{ENTERPRISE_WORKERS} workers, enterprise beside {TIMES} x the capacity of free"
    return [
        *check_quiet(f"{WORKERS} workers, {QUIET_CUSTOMERS} quiet beside {FLOODS} floods", data["quiet"]),
        figure(f"{title}: p99 alone", f"{found['alone_p99_ms']:.1f} ms"),
        at_most(f"{title}: p99 over that", over(found["p99_ms"], found["alone_p99_ms"]), MOST_P99, " x", 2),
        none_of(f"{title}: refused or failed", found["failed"]),
        figure(f"{title}: of the flood, found no free connection", f"{found['waited']:.1%}"),
    ]


def _enterprise(stack: Stack, free_keys: Sequence[str], seconds: int) -> dict[str, Any]:
    """An open loop of `tierlane bench`: enterprise alone, then beside free customers who send ten times the capacity."""
    # With longer waits, those that wait occupy all connections of the generator, and enterprise finds none.
    stack.sql(CUSTOMERS_RAISED, SHORT_QUEUE)
    # All requests are short.
    capacity = ENTERPRISE_WORKERS * BATCH / (BATCH_MS + WORD_MS * BATCH * SHORT) * 1000
    enterprise = ENTERPRISE_SHARE * capacity
    with tempfile.NamedTemporaryFile("w", prefix="tierlane-keys-") as keys:
        lines = [("enterprise", stack.info.keys["enterprise"]), *(("free", key) for key in free_keys)]
        Path(keys.name).write_text("".join(f"{tier},{key}\n" for tier, key in lines), "utf-8")
        shape = {"keys": keys.name, "input": "word word", "warmup": WARMUP_S, "connections": CONNECTIONS, "echo": "off"}
        alone = stack.bench(rate=enterprise, mix="enterprise=1", duration=2 * seconds, **shape)
        with ThreadPoolExecutor(1) as others:  # A generator of its own: the flood occupies its connections.
            flooding = others.submit(
                stack.bench, rate=TIMES * capacity, mix="free=1", duration=seconds + 2 * LEAD_S, **shape
            )
            time.sleep(LEAD_S)
            beside = stack.bench(rate=enterprise, mix="enterprise=1", duration=seconds, **shape)
            flood = flooding.result()
    found = beside["tiers"]["enterprise"]
    requests = flood["scheduled"] + flood["warmup"]["scheduled"]
    return {
        "capacity": capacity,
        "alone_p99_ms": alone["tiers"]["enterprise"]["p99_e2el_ms"],
        "p50_ms": found["median_e2el_ms"],
        "p99_ms": found["p99_e2el_ms"],
        "failed": found["failed"],
        "goodput": beside["request_throughput"] + flood["request_throughput"],
        "generator_late_p99_ms": beside["lag_ms"]["p99"],
        "flood_late_p99_ms": flood["lag_ms"]["p99"],
        # Without the requests that opened the connections.
        "waited": max(0, flood["waited_for_connection"] - CONNECTIONS) / max(1, requests),
        "errors": flood["errors"],
    }
