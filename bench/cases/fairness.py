"""Customers of one tier whose limits are above what the GPUs can do: a quiet one beside floods, and saturated ones.

The time of the model depends on its inputs: ten times the words cost about ten times as much of it. One process sends all
loads. Those of floods and of quiet customers are open loops, so latency counts from the scheduled time; saturated customers
have a closed loop each, and their GPU time is that of the audit.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, NamedTuple

import aiohttp
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import Stack, started

BACKEND, WORKERS, BATCH, GATEWAYS = "simulated:20+0.25", 8, 8, 2
SHORT, LONG = 4, 40
"""Words of a request."""
QUIET_RPS, FLOOD_RPS, QUIET_CUSTOMERS, FLOODS = 6.0, 600.0, 50, 3
SATURATED, WORDS_IN_FLIGHT, APART_S = 10, 1200, 2.0
WEIGHTS = (1.0, 2.0, 4.0)
MOST_P99, LEAST_INDEX, MOST_ERROR = 1.2, 0.98, 3.0
CUSTOMERS = QUIET_CUSTOMERS + FLOODS
TIMEOUT_S = 20.0

# Limits of customers are above the capacity; the tier has its default shedding, but for the customers that are saturated.
PREPARE = (
    "UPDATE tiers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12",
    "UPDATE models SET target_utilization = 1.0",
    "INSERT INTO customers (name, tier) SELECT 'fair-' || n, 'free' FROM generate_series(1, {count}) AS n",
)
ISSUE = "SELECT string_agg(issue_api_key('fair-' || n, 'bench'), ' ' ORDER BY n) FROM generate_series(1, {count}) AS n"
WITHOUT_SHEDDING = "UPDATE tiers SET shed_depth = NULL, shed_wait_ms = NULL"
GPU_MS = """
SELECT json_object_agg(name, cost_ms)::text FROM (
    SELECT c.name, sum(r.cost_ms) AS cost_ms FROM requests AS r JOIN customers AS c ON c.id = r.customer_id
    WHERE r.completed_at BETWEEN to_timestamp({start}) AND to_timestamp({end}) GROUP BY c.name
) AS spent
"""
AUDIT_S = 8.0
"""The time in which the audit has all requests of a load."""
WEIGH = "UPDATE customers SET weight = {weight} WHERE name = 'fair-{number}'"


@dataclass
class Load:
    """The load of one customer and its results. `rate` requests/s of an open loop, or a closed loop without one."""

    key: str
    words: int
    rate: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    refused: int = 0
    failed: int = 0


def run(*, quick: bool) -> Outcome:
    """Measure a quiet customer alone and beside floods, then saturated customers with equal and with other weights."""
    seconds = 10.0 if quick else 30.0
    with started(workers=WORKERS, batch=BATCH, backend=BACKEND, gateways=GATEWAYS) as stack:
        stack.sql(*(statement.format(count=CUSTOMERS) for statement in PREPARE))
        keys = str(stack.value(ISSUE.format(count=CUSTOMERS))).split()
        data = {
            "quiet": _beside_floods(stack, keys, 1, 1, seconds),
            "many_quiet": _beside_floods(stack, keys, QUIET_CUSTOMERS, FLOODS, seconds),
            "equal": _saturated(stack, keys, [1.0] * SATURATED, seconds),
            "weights": _saturated(stack, keys, WEIGHTS, seconds),
        }
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge each load."""
    checks = []
    for name, title in (("quiet", "one beside a flood"), ("many_quiet", f"{QUIET_CUSTOMERS} beside {FLOODS} floods")):
        found = data[name]
        checks += [
            figure(f"quiet customers, {title}: p99 alone", f"{found['alone_p99_ms']:.1f} ms"),
            at_most(f"{title}: p99 over that", over(found["p99_ms"], found["alone_p99_ms"]), MOST_P99, " x", 2),
            none_of(f"{title}: requests of quiet customers refused or failed", found["refused"]),
        ]
    equal, weights = data["equal"], data["weights"]
    return [
        *checks,
        at_least(
            f"{SATURATED} saturated customers, costs 1:10: Jain index of GPU time", equal["index"], LEAST_INDEX, "", 4
        ),
        at_most("weights 1:2:4: largest error of a share", weights["error"] * 100, MOST_ERROR, " %", 2),
        figure("requests/s of all", f"{equal['rps']:.0f}, {weights['rps']:.0f}"),
    ]


def _beside_floods(stack: Stack, keys: Sequence[str], quiet: int, floods: int, seconds: float) -> dict[str, Any]:
    def loads(flooded: int) -> list[Load]:
        few = [Load(key, SHORT, QUIET_RPS) for key in keys[:quiet]]
        return few + [Load(key, LONG, FLOOD_RPS / floods) for key in keys[QUIET_CUSTOMERS : QUIET_CUSTOMERS + flooded]]

    alone = asyncio.run(_run(stack, loads(0), seconds))[:quiet]
    beside = asyncio.run(_run(stack, loads(floods), seconds))
    flood = beside[quiet:]
    return {
        "alone_p99_ms": _p99(alone),
        "p99_ms": _p99(beside[:quiet]),
        "refused": sum(load.refused + load.failed for load in beside[:quiet]),
        "flood_p99_ms": _p99(flood),
        "flood_answered": sum(len(load.latencies_ms) for load in flood),
        "flood_refused": sum(load.refused for load in flood),
    }


def _saturated(stack: Stack, keys: Sequence[str], weights: Sequence[float], seconds: float) -> dict[str, Any]:
    stack.sql(
        WITHOUT_SHEDDING, *(WEIGH.format(weight=weight, number=number) for number, weight in enumerate(weights, 1))
    )
    loads = [Load(key, LONG if n % 2 else SHORT) for n, key in enumerate(keys[: len(weights)])]
    asyncio.run(_run(stack, loads, seconds, APART_S))
    end = time.time()
    time.sleep(AUDIT_S)
    spent = json.loads(str(stack.value(GPU_MS.format(start=end - seconds, end=end))))
    gpu_ms = [float(spent[f"fair-{number}"]) for number in range(1, len(weights) + 1)]
    shares = [each / weight for each, weight in zip(gpu_ms, weights, strict=True)]
    fair = sum(gpu_ms) / sum(weights)
    return {
        "index": sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)),
        "error": max(abs(share / fair - 1) for share in shares),
        "shares": shares,
        "rps": sum(len(load.latencies_ms) for load in loads) / seconds,
        "refused": sum(load.refused for load in loads),
    }


class Window(NamedTuple):
    """Responses between two times (monotonic seconds) count."""

    start: float
    end: float


async def _run(stack: Stack, loads: Sequence[Load], seconds: float, apart_s: float = 0.0) -> Sequence[Load]:
    """Run all loads; only responses in the last `seconds` count. `apart_s`: seconds between the starts of closed loops."""
    url = stack.info.http_url + "/v1/inference"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.monotonic() + 1.0 + apart_s * len(loads)
        window = Window(start, start + seconds)
        async with asyncio.TaskGroup() as group:
            for number, load in enumerate(loads):
                if load.rate:
                    group.create_task(_open_loop(session, url, load, window))
                    continue
                for _ in range(WORDS_IN_FLIGHT // load.words):
                    group.create_task(_closed_loop(session, url, load, window, number * apart_s))
    return loads


async def _open_loop(session: aiohttp.ClientSession, url: str, load: Load, window: Window) -> None:
    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while due < window.end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(_send(session, url, load, due, window))
            due += 1 / load.rate


async def _closed_loop(session: aiohttp.ClientSession, url: str, load: Load, window: Window, wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    while time.monotonic() < window.end:
        wait_s = await _send(session, url, load, time.monotonic(), window)
        await asyncio.sleep(wait_s)


async def _send(session: aiohttp.ClientSession, url: str, load: Load, due: float, window: Window) -> float:
    """Send one request. Returns the seconds after which a rejected one may be sent again."""
    body = {"input": " ".join(["word"] * load.words)}
    try:
        async with session.post(url, json=body, headers={"Authorization": f"Bearer {load.key}"}) as response:
            await response.read()
            status, retry_ms = response.status, float(response.headers.get("retry-after-ms", 0))
    except (aiohttp.ClientError, TimeoutError):
        status, retry_ms = 0, 0.0
    now = time.monotonic()
    if window.start <= now < window.end:
        load.latencies_ms += [(now - due) * 1000] if status == 200 else []
        load.refused += status in {429, 503}
        load.failed += status not in {200, 429, 503}
    return retry_ms / 1000


def _p99(loads: Sequence[Load]) -> float:
    latencies = [ms for load in loads for ms in load.latencies_ms]
    return quantiles(latencies, n=100)[98] if len(latencies) > 1 else 0.0
