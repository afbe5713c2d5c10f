"""Overshoot: one key sends far above its limit to all gateways, and no interval may admit more than its bucket holds.

The times of admission are read from Redis, where `admit` writes them by the clock of the buckets, to the millisecond. The
bound is checked for every interval between two admissions. Times of the clients would be longer by the latency, and so
allow too much.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import aiohttp

from admin import NewCustomer
from eventually import eventually
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from stack import Stack

PAUSE_S = 0.015  # Between a response and the next request of a connection: short enough to exceed the limit many times.
REQUESTS_A_CONNECTION = 40  # Then a new connection, which may reach a restarted gateway.
TICK_MS = 1.0  # Times are cut to whole milliseconds, so an interval may be longer by this.
NOT_REFUNDED = frozenset({"poison_request", "invalid_request", "cancelled"})
"""Any other failure refunds the token, so that another request may be admitted instead."""


class InForce(NamedTuple):
    """A rate that a gateway may apply from `since_ms` to `until_ms`, on the clock of Redis."""

    since_ms: float
    until_ms: float
    rate: float


def always(rate: float) -> list[InForce]:
    """A rate that does not change."""
    return [InForce(0.0, float("inf"), rate)]


def allowance(rates: Sequence[InForce], begin_ms: float, end_ms: float) -> float:
    """The tokens that the highest rate in force at each time adds in an interval."""
    inner = {edge for rate in rates for edge in rate[:2] if begin_ms < edge < end_ms}
    edges = sorted({begin_ms, end_ms} | inner)
    total = 0.0
    for begin, end in pairwise(edges):
        highest = max(rate.rate for rate in rates if rate.since_ms <= begin and rate.until_ms >= end)
        total += (end - begin) / 1000 * highest
    return total


def most_missing(admitted_ms: Sequence[int], burst: float, rates: Sequence[InForce]) -> float:
    """The tokens that a bucket, full at the start, lacks at worst for these admissions; 0 where it never does."""
    level, at, worst = burst, float(admitted_ms[0]), 0.0
    for moment in admitted_ms:
        level = min(burst, level + allowance(rates, at, moment)) - 1
        at = float(moment)
        worst = min(worst, level)
    return abs(worst)


@dataclass
class Hammered:
    """Responses: ids with 200, rejections by code, and requests without a response."""

    completed: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0

    @property
    def sent(self) -> int:
        return len(self.completed) + self.refused.total() + self.unanswered


async def hammer(stack: Stack, customer: NewCustomer, connections: int, seconds: float) -> Hammered:
    """Send on a number of connections, each soon after its last response."""
    sent = Hammered()
    end = time.monotonic() + seconds
    await asyncio.gather(*[_connection(stack.url, customer, end, sent) for _ in range(connections)])
    return sent


async def _connection(url: str, customer: NewCustomer, end: float, sent: Hammered) -> None:
    while time.monotonic() < end:
        timeout = aiohttp.ClientTimeout(total=10)
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector, headers=customer.headers, timeout=timeout) as session:
            for _ in range(REQUESTS_A_CONNECTION):
                if time.monotonic() < end:
                    await _send(session, url, sent)


async def _send(session: aiohttp.ClientSession, url: str, sent: Hammered) -> None:
    try:
        async with session.post(f"{url}/v1/inference", json={"input": "again"}) as answer:
            body = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError):
        sent.unanswered += 1
    else:
        if answer.status == 200:
            sent.completed.add(body["request_id"])
        else:
            sent.refused[body["error"]["code"]] += 1
    await asyncio.sleep(PAUSE_S)


class Entered(NamedTuple):
    """The requests of a customer in Redis: the time of each admission, and the ids of those that were refunded."""

    at_ms: dict[str, int]
    given_back: frozenset[str]


async def entered(stack: Stack, customer: NewCustomer) -> Entered:
    """The requests of the customer that were admitted in the last half minute, for which Redis keeps them."""
    url = stack.home_url(customer.id)
    client, keys = command_client(url), Keys.at(url)
    try:
        prefix = keys.request("")
        names = [name.decode() async for name in client.scan_iter(f"{prefix}*", count=1000)]
        async with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(name, "who", "env", "code")
            rows = await pipeline.execute()
    finally:
        await client.aclose()
    ours = {
        name.removeprefix(prefix): (int(env[:13]), (code or b"").decode())
        for name, (who, env, code) in zip(names, rows, strict=True)
        if who is not None and who.decode().split(" ")[1] == customer.id
    }
    given_back = frozenset(name for name, (_, code) in ours.items() if code and code not in NOT_REFUNDED)
    return Entered({name: at for name, (at, _) in ours.items()}, given_back)


async def gateways_of(stack: Stack, ids: set[str]) -> set[str]:
    """The gateways that accepted these requests, once each has exactly one completed row."""

    async def audited() -> set[str]:
        rows = await stack.rows(sorted(ids))
        assert [i for i, found in rows.items() if len(found) > 1] == []
        closed = [found[0] for found in rows.values() if found and found[0]["status"] == "completed"]
        return {row["gateway_id"] for row in closed} if len(closed) == len(ids) else set()

    return await eventually(audited, f"{len(ids)} rows", 20.0)


class Finding(NamedTuple):
    """The figures of one run: admissions without refunds, their bound, and the tokens that a bucket lacks for them."""

    sent: int
    admitted: int
    completed: int
    bound: float
    missing: float
    seconds: float

    def told(self, run: str) -> str:
        return (
            f"{run}: {self.sent} sent, {self.admitted} admitted in {self.seconds:.3f} s, bound {self.bound:.2f}, "
            f"{self.completed} got 200, the bucket lacks {self.missing:.3f} tokens at worst"
        )


def judge(sent: Hammered, found: Entered, burst: float, rates: Sequence[InForce]) -> Finding:
    """Compare the admissions without refunds with the bound."""
    moments = sorted(at for name, at in found.at_ms.items() if name not in found.given_back)
    begin, end = moments[0], moments[-1]
    bound = burst + allowance(rates, begin, end + TICK_MS)
    missing = most_missing(moments, burst, rates)
    return Finding(sent.sent, len(moments), len(sent.completed), bound, missing, (end - begin) / 1000)


def never_over(finding: Finding, sent: Hammered, found: Entered, highest_rate: float) -> None:
    """Assert that the admissions are within the bound over the whole run and over every interval."""
    assert finding.admitted <= finding.bound
    assert finding.missing <= highest_rate * TICK_MS / 1000
    assert sent.completed <= set(found.at_ms)
    assert finding.completed <= finding.admitted
