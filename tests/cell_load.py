"""Customers in cells that change or are lost: a steady load of each, and by how much they were above their limits."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import aiohttp
import asyncpg

from admin import NewCustomer, add_customer, known, sql
from eventually import eventually
from key_leaks import leaked_keys
from load import Answer, ask, verdict
from overshoot import TICK_MS, always, most_missing
from scheduler.protocol.pool_view import Unfinished
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from stack import Stack

TIERS = ("enterprise", "paid", "free")


@dataclass
class Sender:
    """A customer, the requests/s that it sends, and its limits. `keyed`: each request has an Idempotency-Key of its own.

    `refused`: the code with which its requests are refused; those of a customer of several cells also while a cell is new to it.
    """

    customer: NewCustomer
    tier: str
    rate: float
    limits: Mapping[str, Any]
    refused: str = ""
    keyed: bool = False
    answers: list[Answer] = field(default_factory=list)

    async def run(self, stack: Stack, session: aiohttp.ClientSession, done: Callable[[], bool]) -> None:
        """Send until `done`, and wait for all responses."""
        url, began = stack.url, time.monotonic()
        async with asyncio.TaskGroup() as group:
            for n in count():
                await asyncio.sleep(max(0.0, began + n / self.rate - time.monotonic()))
                if done():
                    return
                group.create_task(self._ask(stack, session, url, n))

    async def _ask(self, stack: Stack, session: aiohttp.ClientSession, url: str, number: int) -> None:
        headers = {"Idempotency-Key": f"{self.customer.name}-{number}"} if self.keyed else {}
        self.answers.append(await ask(session, stack, self.tier, self.customer.key, url, **headers))

    @property
    def expected(self) -> set[tuple[int, str | None]]:
        """The statuses and codes that it may get."""
        new_cell = [(429, "rate_limit_exceeded")] if "spread" in self.limits else []
        return {(200, None), *new_cell, *([(429, self.refused)] if self.refused else [])}

    @property
    def longest_s(self) -> float:
        """The time until its latest response."""
        return max((answer.seconds for answer in self.answers), default=0.0)

    @property
    def statuses(self) -> Counter[tuple[int, str | None]]:
        """The number of responses by status and code."""
        return Counter((each.status, each.code) for each in self.answers)


async def add_sender(
    stack: Stack, name: str, tier: str, rate: float, refused: str = "", *, keyed: bool = False, **limits: Any
) -> Sender:
    """A new customer. Limits are columns of `customers`; `per_10_s` is a quota of requests."""
    quota = limits.pop("per_10_s", None)
    customer = await add_customer(stack, name, tier, **limits)
    if quota is not None:
        add = "INSERT INTO quotas (customer_id, quota) VALUES ($1, $2)"
        await sql(stack, add, customer.id, f"{quota} per 10 seconds")
    return Sender(customer, tier, rate, limits | {"per_10_s": quota}, refused, keyed)


async def send(stack: Stack, senders: Sequence[Sender], done: Callable[[], bool]) -> None:
    """Send the requests of all customers until `done`, and wait for all responses."""
    await known(senders[-1].customer, stack.url, 20)  # At all gateways.
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for each in senders:
            group.create_task(each.run(stack, session, done))


def lost(answers: Sequence[Answer]) -> dict[str, int]:
    """The numbers of requests without a response, with that of another request, or with the id of another one."""
    found = verdict(list(answers))
    return {kind: found[kind] for kind in ("unanswered", "crossed", "duplicated") if found[kind]}


def urls_of(stack: Stack) -> dict[str, str]:
    """The URL of each cell."""
    return stack.cells


class Audited(NamedTuple):
    """The row of a request: its admission and its end, in ms by the clock of Redis, which is the same in all cells here."""

    customer_id: str
    status: str
    mode: str
    admitted_ms: int
    ended_ms: int


async def audited(stack: Stack, senders: Sequence[Sender], more: int = 0) -> dict[str, Audited]:
    """All rows of these customers by id, once there is one for each response with a result, and for so many more requests.

    Fails if there are others, or one is open.
    """
    completed = {answer.request_id or "" for each in senders for answer in each.answers if answer.status == 200}
    query = "SELECT id, customer_id::text, status, mode, latency_ms, completed_at FROM requests WHERE customer_id::text = ANY($1)"

    async def complete() -> dict[str, Audited]:
        found = await sql(stack, query, [each.customer.id for each in senders])
        rows = {row["id"]: _audited(row) for row in found if row["status"] in ("completed", "failed")}
        others = [tuple(row.values()) for row in found if row["id"] not in completed]
        assert len(others) <= more, others
        return rows if completed <= rows.keys() and len(rows) == len(completed) + more else {}

    return await eventually(complete, f"{len(completed) + more} closed rows", 30.0)


def _audited(row: asyncpg.Record) -> Audited:
    ended_ms = round(row["completed_at"].timestamp() * 1000)
    return Audited(row["customer_id"], row["status"], row["mode"], ended_ms - round(row["latency_ms"]), ended_ms)


class Overshoot(NamedTuple):
    """Of one customer: tokens above rate and burst, open requests above the concurrency, and requests above the quota.

    `used`: the part of the rate, with the burst, that was used.
    """

    admitted: int
    tokens: float
    open: int
    units: int
    used: float

    @property
    def none(self) -> bool:
        return not (self.tokens or self.open or self.units)


def overshoot(sender: Sender, rows: Collection[Audited]) -> Overshoot:
    """Of a customer, by its rows."""
    limits, times = sender.limits, sorted(row.admitted_ms for row in rows)
    tokens, used, rate = 0.0, 1.0, limits.get("requests_per_second", 0.0)
    if rate and times:
        tokens = max(0.0, most_missing(times, limits["burst"], always(rate)) - rate * TICK_MS / 1000)
        used = len(times) / (limits["burst"] + rate * (times[-1] - times[0]) / 1000)
    windows, quota = Counter(at // 10_000 for at in times), limits["per_10_s"] or len(times)
    return Overshoot(
        len(times),
        tokens,
        max(
            0, most_open([(row.admitted_ms, row.ended_ms) for row in rows]) - limits.get("max_concurrency", len(times))
        ),
        max(0, max(windows.values(), default=0) - quota),
        used,
    )


def most_open(spans: Collection[tuple[float, float]]) -> int:
    """The most requests that were open at one time."""
    most = now_open = 0
    for _, change in sorted([*((begin, 1) for begin, _ in spans), *((end, -1) for _, end in spans)]):
        now_open += change
        most = max(most, now_open)
    return most


async def left_in_cells(stack: Stack) -> dict[str, Any]:
    """What has not ended in each cell: requests and records, leases of customers, keys without a time to live."""
    found: dict[str, Any] = {}
    for cell, url in urls_of(stack).items():
        client, keys = command_client(url, 5.0), Keys.at(url)
        try:
            remaining = await Unfinished(client).remaining(keys, TIERS)
            names = [name async for name in client.scan_iter(f"{keys.tag}rl:leases:*", count=1000)]
            now_s, us = await client.time()
            now_ms = now_s * 1000 + us // 1000
            leases = sum([await client.zcount(name, f"({now_ms}", "+inf") for name in names])
            found[cell] = {"unfinished": sum(remaining), "leases": leases, "without_ttl": await leaked_keys(client)}
        finally:
            await client.aclose()
    return {cell: each for cell, each in found.items() if any(each.values())}
