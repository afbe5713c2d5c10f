"""Overshoot: one key hammered over all gateways, and the proof that no moment let in more than its bucket holds.

Admissions are read from Redis, where each request's row has the moment at which `admit` let it in, on the clock that the
buckets run on. So the time that a limit is multiplied with is not a client's, from the first request sent to the last
answer, which would be longer and forgive as much as the answers take; it is the one between two admissions, to the
millisecond. And the bound is held for every stretch between two admissions, not only for the whole run.
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

PAUSE_S = 0.015  # Between an answer and the next request of a connection: enough to ask for many times the limit.
ASKS_A_CONNECTION = 40  # Then a new one, so that a gateway that was started again gets its part.
TICK_MS = 1.0  # Redis' time is cut to whole milliseconds, so a stretch may be this much longer than it looks.
THEIRS = frozenset({"poison_request", "invalid_request", "cancelled"})
"""Any other failure gives back what was charged, so that another request may enter in the place of that one."""


class InForce(NamedTuple):
    """A rate that some gateway may hold from `since_ms` to `until_ms`, on Redis' clock."""

    since_ms: float
    until_ms: float
    rate: float


def always(rate: float) -> list[InForce]:
    """A rate that is never changed."""
    return [InForce(0.0, float("inf"), rate)]


def allowance(rates: Sequence[InForce], begin_ms: float, end_ms: float) -> float:
    """Requests that the highest rate in force at each moment gives from one moment to another."""
    inner = {edge for rate in rates for edge in rate[:2] if begin_ms < edge < end_ms}
    edges = sorted({begin_ms, end_ms} | inner)
    total = 0.0
    for begin, end in pairwise(edges):
        highest = max(rate.rate for rate in rates if rate.since_ms <= begin and rate.until_ms >= end)
        total += (end - begin) / 1000 * highest
    return total


def most_missing(admitted_ms: Sequence[int], burst: float, rates: Sequence[InForce]) -> float:
    """How many tokens a bucket that begins full was short of, at worst, had it let these in; 0 where it never was."""
    level, at, worst = burst, float(admitted_ms[0]), 0.0
    for moment in admitted_ms:
        level = min(burst, level + allowance(rates, at, moment)) - 1
        at = float(moment)
        worst = min(worst, level)
    return abs(worst)


@dataclass
class Hammered:
    """What the clients saw: ids that were answered with 200, refusals by code, and requests without an answer."""

    completed: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0

    @property
    def sent(self) -> int:
        return len(self.completed) + self.refused.total() + self.unanswered


async def hammer(stack: Stack, customer: NewCustomer, connections: int, seconds: float) -> Hammered:
    """So many connections, each asking again soon after each answer."""
    seen = Hammered()
    end = time.monotonic() + seconds
    await asyncio.gather(*[_one(stack.url, customer, end, seen) for _ in range(connections)])
    return seen


async def _one(url: str, customer: NewCustomer, end: float, seen: Hammered) -> None:
    while time.monotonic() < end:
        timeout = aiohttp.ClientTimeout(total=10)
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector, headers=customer.headers, timeout=timeout) as session:
            for _ in range(ASKS_A_CONNECTION):
                if time.monotonic() < end:
                    await _ask(session, url, seen)


async def _ask(session: aiohttp.ClientSession, url: str, seen: Hammered) -> None:
    try:
        async with session.post(f"{url}/v1/inference", json={"input": "again"}) as answer:
            body = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError):
        seen.unanswered += 1
    else:
        if answer.status == 200:
            seen.completed.add(body["request_id"])
        else:
            seen.refused[body["error"]["code"]] += 1
    await asyncio.sleep(PAUSE_S)


class Entered(NamedTuple):
    """What Redis knows of a customer's requests: when each was let in, and the ids of those that were paid back."""

    at_ms: dict[str, int]
    given_back: frozenset[str]


async def entered(stack: Stack, customer: NewCustomer) -> Entered:
    """Every request of the customer that was let in during the last half minute; Redis keeps their rows so long."""
    client, keys = command_client(stack.redis_url), Keys()
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
    given_back = frozenset(name for name, (_, code) in ours.items() if code and code not in THEIRS)
    return Entered({name: at for name, (at, _) in ours.items()}, given_back)


async def gateways_of(stack: Stack, ids: set[str]) -> set[str]:
    """Which gateways accepted these, once the audit has them all: every 200 has exactly one row, which is completed."""

    async def all_there() -> set[str]:
        rows = await stack.rows(sorted(ids))
        assert [i for i, found in rows.items() if len(found) > 1] == []
        closed = [found[0] for found in rows.values() if found and found[0]["status"] == "completed"]
        return {row["gateway_id"] for row in closed} if len(closed) == len(ids) else set()

    return await eventually(all_there, f"{len(ids)} rows", 20.0)


class Finding(NamedTuple):
    """The figures of one story: what was let in and kept, what may be, and what a bucket would have been short of."""

    sent: int
    admitted: int
    completed: int
    bound: float
    missing: float
    seconds: float

    def told(self, story: str) -> str:
        return (
            f"{story}: {self.sent} sent, {self.admitted} admitted in {self.seconds:.3f} s, bound {self.bound:.2f}, "
            f"{self.completed} answered with 200, a bucket was short of {self.missing:.3f} at worst"
        )


def judge(seen: Hammered, found: Entered, burst: float, rates: Sequence[InForce]) -> Finding:
    """The admissions that were not paid back, against the bound."""
    moments = sorted(at for name, at in found.at_ms.items() if name not in found.given_back)
    begin, end = moments[0], moments[-1]
    bound = burst + allowance(rates, begin, end + TICK_MS)
    missing = most_missing(moments, burst, rates)
    return Finding(seen.sent, len(moments), len(seen.completed), bound, missing, (end - begin) / 1000)


def never_over(finding: Finding, seen: Hammered, found: Entered, highest_rate: float) -> None:
    """What holds in every story: the count is within the bound, in the whole and in every stretch of it."""
    assert finding.admitted <= finding.bound
    assert finding.missing <= highest_rate * TICK_MS / 1000
    assert seen.completed <= set(found.at_ms)
    assert finding.completed <= finding.admitted
