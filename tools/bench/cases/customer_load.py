"""The load of several customers on one stack, sent by one process; its answers, and the GPU time of each customer.

A load with a rate is an open loop, so latency counts from the scheduled time; any other is a number of closed loops. Times
are seconds of the run.
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, NamedTuple

import aiohttp
from cases.stack import Stack

from gateway.operations.health.model import process_name

TIMEOUT_S = 20.0
FAILED_PAUSE_S = 0.1
AUDIT_S = 60.0
"""The time in which the audit has all requests of a load."""
MOST_TRIES = 100
REFUSALS = {429, 503}

# Limits of customers are above the capacity; the tiers have their default shedding.
PREPARE = (
    "UPDATE tiers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12",
    "UPDATE models SET target_utilization = 1.0",
    "INSERT INTO customers (name, tier) SELECT 'fair-' || n, 'free' FROM generate_series(1, {count}) AS n",
)
ISSUE = "SELECT string_agg(issue_api_key('fair-' || n, 'bench'), ' ' ORDER BY n) FROM generate_series(1, {count}) AS n"
SERVED = """
SELECT count(*) FROM requests AS r JOIN customers AS c ON c.id = r.customer_id
WHERE c.name LIKE 'fair-%' AND r.created_at >= to_timestamp({start}) AND r.status = 'completed'
"""
GPU_MS = """
SELECT json_agg(json_build_array(name, second, cost_ms))::text FROM (
    SELECT c.name, floor(extract(epoch FROM r.completed_at) - {start})::int AS second, sum(r.cost_ms) AS cost_ms
    FROM requests AS r JOIN customers AS c ON c.id = r.customer_id
    WHERE r.completed_at >= to_timestamp({start}) AND r.completed_at < to_timestamp({end}) AND r.cost_ms IS NOT NULL
    GROUP BY 1, 2
) AS spent
"""
# The mean duration of a batch, as a request that arrives at any time finds it on a worker: long ones run for longer.
BATCH_MS = """
SELECT sum(ms * ms) / sum(ms) FROM (
    SELECT max(gpu_ms) AS ms FROM requests
    WHERE completed_at >= to_timestamp({start}) AND completed_at < to_timestamp({end}) AND gpu_ms IS NOT NULL
    GROUP BY batch_id
) AS batches
"""


class Window(NamedTuple):
    """A part of a run; `end` does not belong to it."""

    start: float
    end: float


class Answer(NamedTuple):
    """`status` 0: no response. `code`: of an error."""

    at: float
    ms: float
    status: int
    code: str

    @property
    def due(self) -> float:
        """When the request was sent, or should have been."""
        return self.at - self.ms / 1000


@dataclass
class Load:
    """The load of one customer, from `begin_s` to `end_s` of a run, and its answers.

    `rate`: requests/s of an open loop; without one, `loops` closed loops. `gateway`: the name of the one that gets all of it;
    "": any. Only for closed loops.
    """

    key: str
    words: int
    rate: float = 0.0
    loops: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0
    gateway: str = ""
    answers: list[Answer] = field(default_factory=list)


def prepared(stack: Stack, count: int) -> list[str]:
    """Raise the limits, and add free customers `fair-1` to `fair-<count>`; returns their keys."""
    stack.sql(*(statement.format(count=count) for statement in PREPARE))
    return str(stack.value(ISSUE.format(count=count))).split()


def run_loads(
    stack: Stack, loads: Sequence[Load], beside: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> float:
    """Run all loads to their ends, and `beside()` at the same time; returns the start, in seconds since the epoch."""
    return asyncio.run(_run(stack, loads, beside))


def answers_in(loads: Iterable[Load], window: Window) -> list[Answer]:
    """The answers of all loads that came in a part of the run."""
    return [each for load in loads for each in load.answers if window.start <= each.at < window.end]


def answers_due_in(loads: Iterable[Load], window: Window) -> list[Answer]:
    """The answers, whenever they came, to requests that were due in a part of the run."""
    return [each for load in loads for each in load.answers if window.start <= each.due < window.end]


def latencies_of(answers: Iterable[Answer]) -> list[float]:
    """The latencies of successful requests, in ms."""
    return [each.ms for each in answers if each.status == 200]


def percentile(latencies: Sequence[float], percent: int) -> float:
    """0 with fewer than two values."""
    return quantiles(latencies, n=100)[percent - 1] if len(latencies) > 1 else 0.0


def refused(answers: Iterable[Answer]) -> int:
    """The number of rejections."""
    return sum(each.status in REFUSALS for each in answers)


def failed(answers: Iterable[Answer]) -> int:
    """The number of requests without a result that were not rejected."""
    return sum(each.status != 200 and each.status not in REFUSALS for each in answers)


def causes(answers: Iterable[Answer]) -> dict[str, int]:
    """How often each error occurred, by status and code."""
    return dict(Counter(f"{each.status} {each.code}".strip() for each in answers if each.status != 200))


def listed(counts: Mapping[str, int]) -> str:
    """Counts of errors or responses as text."""
    return ", ".join(f"{count:,} x {name}" for name, count in counts.items()) or "none"


def wait_for_audit(stack: Stack, began: float, loads: Iterable[Load]) -> None:
    """Wait until the audit has a row for each result of a run that began then. Raises RuntimeError after AUDIT_S."""
    served = sum(each.status == 200 for load in loads for each in load.answers)
    deadline = time.monotonic() + AUDIT_S
    while (found := int(stack.value(SERVED.format(start=began)))) < served:
        if time.monotonic() > deadline:
            raise RuntimeError(f"After {AUDIT_S:.0f} s the audit has {found:,} rows of {served:,} results.")
        time.sleep(0.5)


def gpu_ms_by_second(stack: Stack, began: float, window: Window, names: Sequence[str]) -> list[list[float]]:
    """The GPU time that each customer paid in each second of a run that began then, in ms."""
    rows = json.loads(stack.value(GPU_MS.format(start=began + window.start, end=began + window.end)) or "[]")
    by_place = {(name, second): cost_ms for name, second, cost_ms in rows}
    seconds = round(window.end - window.start)
    return [[float(by_place.get((name, second), 0.0)) for second in range(seconds)] for name in names]


def batch_ms(stack: Stack, began: float, window: Window) -> float:
    """The mean duration of a batch, weighted by it."""
    return float(stack.value(BATCH_MS.format(start=began + window.start, end=began + window.end)) or 0.0)


async def _run(stack: Stack, loads: Sequence[Load], beside: Callable[[], Coroutine[Any, Any, None]] | None) -> float:
    url = stack.info.http_url + "/v1/inference"
    async with AsyncExitStack() as sessions:
        shared = await sessions.enter_async_context(_session())
        own = [[await sessions.enter_async_context(each) for each in await _own(stack, load)] for load in loads]
        # Whole milliseconds, as `created_at` has: else a first request within the same one would not count.
        began, start = math.floor(1000 * time.time()) / 1000, time.monotonic()
        async with asyncio.TaskGroup() as group:
            if beside:
                group.create_task(beside())
            for load, sessions_of in zip(loads, own, strict=True):
                if load.rate:
                    group.create_task(_open_loop(shared, url, load, start))
                for each in [] if load.rate else sessions_of or [shared] * load.loops:
                    group.create_task(_closed_loop(each, url, load, start))
    return began


async def _own(stack: Stack, load: Load) -> list[aiohttp.ClientSession]:
    """The sessions of a load that has a gateway of its own: one connection each."""
    return [await _session_to(stack, load.gateway) for _ in range(load.loops if load.gateway else 0)]


def _session(connections: int = 0) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections), timeout=timeout)


async def _session_to(stack: Stack, gateway: str) -> aiohttp.ClientSession:
    """A session of one connection, to this gateway: new connections are distributed over all gateways."""
    headers = {"Authorization": f"Bearer {stack.info.service_token}"}
    for _ in range(MOST_TRIES):
        session = _session(connections=1)
        async with session.get(stack.info.http_url + "/internal/dashboard/events", headers=headers) as response:
            found: Any = await response.json()
        if process_name(found["gateway"]) == gateway:
            return session
        await session.close()
    raise RuntimeError(f"None of {MOST_TRIES} connections led to {gateway}.")


async def _open_loop(session: aiohttp.ClientSession, url: str, load: Load, start: float) -> None:
    due = start + load.begin_s
    async with asyncio.TaskGroup() as group:
        while due < start + load.end_s:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(_send(session, url, load, start, due))
            due += 1 / load.rate


async def _closed_loop(session: aiohttp.ClientSession, url: str, load: Load, start: float) -> None:
    await asyncio.sleep(max(0.0, start + load.begin_s - time.monotonic()))
    while time.monotonic() < start + load.end_s:
        wait_s = await _send(session, url, load, start, time.monotonic())
        await asyncio.sleep(wait_s)


async def _send(session: aiohttp.ClientSession, url: str, load: Load, start: float, due: float) -> float:
    """Send one request. Returns the seconds after which a closed loop may send the next."""
    body = {"input": " ".join(["word"] * load.words)}
    code, retry_s = "", 0.0
    try:
        async with session.post(url, json=body, headers={"Authorization": f"Bearer {load.key}"}) as response:
            status = response.status
            text = await response.read()
            if status != 200:
                code = str(json.loads(text)["error"]["code"])
                retry_s = max(FAILED_PAUSE_S, float(response.headers.get("retry-after-ms", 0)) / 1000)
    except (aiohttp.ClientError, TimeoutError) as error:
        status, code, retry_s = 0, type(error).__name__, FAILED_PAUSE_S
    now = time.monotonic()
    load.answers.append(Answer(now - start, (now - due) * 1000, status, code))
    return retry_s
