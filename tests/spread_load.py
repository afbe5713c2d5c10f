"""Customers of four cells with three times their limits, allotters with faults, and the figures of what was admitted.

One customer is limited by its rate, one by its concurrency and one by a quota of ten seconds. Times of admission are those that
`admit` wrote, by the clocks of the servers, which are one clock here.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from eventually import eventually
from overshoot import TICK_MS
from pool import WIDE, Pool
from scheduler.cells.shares import WHOLE
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.redis import EmbeddedRedis
from tierlane_tools.chaos.faults.proxy import HOST, FaultProxy, NetworkFault

CELLS = ("default", "east", "north", "west")
RATE, BURST, CONCURRENCY, QUOTA, WINDOW_S = 400.0, 40.0, 80, 400, 10
OVER = 3.0  # Times the limit that is sent.
OPEN_MS, SLACK_MS = 500, 500  # A request is open until its deadline, and for the slack of its lease.
STEP_S = 0.02
SETTLE_S = 3.0  # In this time the parts follow the load.
SHIFT_S = 2.5  # The load moves to other cells this often while a fault is active.
TIERS = [msgspec.structs.replace(tier, max_depth=10**7, places=10**7) for tier in WIDE]
UNLIMITED = 1e6
CUT = NetworkFault(drop_requests=True, drop_replies=True)


class Customer(NamedTuple):
    """A customer of a run: its limits as those of a submission, and requests/s that are sent."""

    id: str
    limits: Mapping[str, Any]
    sent_per_s: float

    def row(self, cells: Sequence[str] = CELLS) -> dict[str, Any]:
        """Its row in the catalog of an allotter."""
        limits = {"max_concurrency": 0, "quotas": ()} | dict(self.limits)
        return {
            "id": self.id,
            "cells": list(cells),
            "rate": limits["rate"],
            "burst": limits["burst"],
            "concurrency": limits["max_concurrency"],
            "quotas": limits["quotas"],
            "shared": len(cells) > 1,
        }


def customers(run: str) -> tuple[Customer, Customer, Customer]:
    """Three customers, each with one limit."""
    quota = ((f"{WINDOW_S}second", QUOTA),)
    open_s = (OPEN_MS + SLACK_MS) / 1000
    return (
        Customer(f"{run}-rate", {"rate": RATE, "burst": BURST}, OVER * RATE),
        Customer(
            f"{run}-concurrency",
            {"rate": UNLIMITED, "burst": UNLIMITED, "max_concurrency": CONCURRENCY},
            OVER * CONCURRENCY / open_s,
        ),
        Customer(f"{run}-quota", {"rate": UNLIMITED, "burst": UNLIMITED, "quotas": quota}, OVER * QUOTA / WINDOW_S),
    )


@dataclass
class AllotterProcess:
    """One allotter behind proxies of its own; `name` changes with each start."""

    name: str
    directory: Path
    proxies: dict[str, FaultProxy]
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def configuration(self) -> Path:
        return self.directory / f"{self.name}.json"

    @property
    def id(self) -> str:
        return f"{self.name}-{self.starts}"

    def start(self) -> None:
        """Start the process."""
        self.starts += 1
        script = Path(__file__).parent / "allotter_process.py"
        command = [sys.executable, str(script), self.id, str(self.configuration)]
        self.process = subprocess.Popen(command)

    def kill(self) -> None:
        """End it at once, suspended or not."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def signal(self, sign: int) -> None:
        """Send a signal."""
        assert self.process is not None
        os.kill(self.process.pid, sign)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Its catalog."""
        urls = {name: cell_url(f"redis://{HOST}:{proxy.port}/0", name) for name, proxy in self.proxies.items()}
        new = self.configuration.with_suffix(".new")
        new.write_text(json.dumps({"cells": urls, "customers": list(rows)}), "utf-8")
        new.replace(self.configuration)


def cell_url(url: str, cell: str) -> str:
    """The URL of a cell."""
    return url if cell == "default" else f"{url}#{cell}"


@dataclass
class World:
    """Four servers, and two allotters."""

    servers: dict[str, EmbeddedRedis]
    pools: dict[str, Pool]
    allotters: list[AllotterProcess]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def catalog(self, *rows: Mapping[str, Any]) -> None:
        """Set the customers of all allotters."""
        self.rows |= {row["id"]: dict(row) for row in rows}
        for allotter in self.allotters:
            allotter.write(list(self.rows.values()))

    async def active(self) -> AllotterProcess:
        """The allotter that has claimed the default cell, once one has."""

        async def found() -> AllotterProcess | None:
            name, ends = await self.pools["default"].client.hmget("allotter", "id", "until")
            alive = name is not None and int(ends) > await self.pools["default"].now_ms()
            return next((each for each in self.allotters if alive and each.id == name.decode()), None)

        return await eventually(found, "an allotter is active", 20.0)

    async def parts(self, customer_id: str, cell: str) -> list[int]:
        """The end of the lease, and the stored parts of a customer in a cell; empty without."""
        pool = self.pools[cell]
        async with bounded():
            stored = await pool.client.hget(f"{pool.keys.tag}rl:customer:{customer_id}", "share")
        return [int(part) for part in stored.split()] if stored else []

    async def divided(self, customer_id: str) -> None:
        """Wait until every cell has a part of a customer's limits."""

        async def found() -> bool:
            parts = [await self.parts(customer_id, cell) for cell in CELLS]
            return all(len(part) == 4 and part[1] > 0 for part in parts)

        await eventually(found, "the limits are divided", 20.0)

    async def usable(self, customer_id: str, load: Mapping[str, float]) -> float:
        """The part of a limit that can be used with this load in each cell, in parts of the limit."""
        parts = {cell: (await self.parts(customer_id, cell))[1] for cell in CELLS}
        return sum(min(part / WHOLE, load[cell]) for cell, part in parts.items())

    @contextmanager
    def cut(self, allotters: Sequence[AllotterProcess], cells: Sequence[str], fault: NetworkFault = CUT) -> Any:
        """A network fault between allotters and cells."""
        with ExitStack() as stack:
            for allotter in allotters:
                for cell in cells:
                    stack.enter_context(allotter.proxies[cell].inject(fault))
            yield
        for allotter in allotters:
            for cell in cells:
                allotter.proxies[cell].cut()  # A connection whose bytes were dropped is no use any more.


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """Start everything; the allotters divide the limits of customers that `catalog` names."""
    servers, pools, proxies = {}, {}, []
    for cell in CELLS:
        home = directory / cell
        home.mkdir()
        servers[cell] = EmbeddedRedis(home, home / "s", ephemeral=True)
        await servers[cell].start()
        url = cell_url(servers[cell].url, cell)
        pools[cell] = Pool(command_client(url), Keys.at(url))
    found = World(servers, pools, [])
    try:
        for name in ("one", "two"):
            own = {cell: FaultProxy(f"{name}>{cell}", socket_of(servers[cell])) for cell in CELLS}
            for proxy in own.values():
                await proxy.start()
                proxies.append(proxy)
            found.allotters.append(AllotterProcess(name, directory, own))
        found.catalog()
        for allotter in found.allotters:
            allotter.start()
        yield found
    finally:
        for allotter in found.allotters:
            allotter.kill()
        for proxy in proxies:
            await proxy.stop()
        for cell, server in servers.items():
            await pools[cell].client.aclose()
            await server.stop()


def socket_of(server: EmbeddedRedis) -> Path:
    """The socket of a server."""
    return Path(server.url.removeprefix("unix://").partition("?")[0])


class Load:
    """Sends the requests of all customers to the cells, in parts that may change."""

    def __init__(self, world: World, of: Sequence[Customer], parts: Sequence[float]) -> None:
        self._world = world
        self._customers = of
        self.parts = dict(zip(CELLS, parts, strict=True))
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Send until this is cancelled."""
        async with asyncio.TaskGroup() as group:
            for cell in CELLS:
                group.create_task(self._send(cell))

    async def _send(self, cell: str) -> None:
        pool, due = self._world.pools[cell], dict.fromkeys((each.id for each in self._customers), 0.0)
        at = time.monotonic()
        while True:
            await asyncio.sleep(STEP_S)
            elapsed_s, at = min(0.2, time.monotonic() - at), time.monotonic()
            submissions = []
            for each in self._customers:
                due[each.id] += each.sent_per_s * self.parts[cell] * elapsed_s
                count, due[each.id] = int(due[each.id]), due[each.id] % 1
                submissions += [
                    pool.submission(customer_id=each.id, total_ms=OPEN_MS, queue_ms=OPEN_MS, spread=4, **each.limits)
                    for _ in range(count)
                ]
                self.sent[each.id] += count
            try:
                verdicts = await pool.admit(submissions, TIERS) if submissions else []
            except RedisUnavailable:
                continue
            for submission, verdict in zip(submissions, verdicts, strict=True):
                self.outcomes[submission.customer_id, verdict.outcome.value] += 1


class Watch:
    """The largest sum of the parts in force in all cells at one time, of rates and of concurrency."""

    def __init__(self, world: World, of: Sequence[Customer]) -> None:
        self._world = world
        self._customers = of
        self.most = 0
        self.moments = 0

    async def run(self) -> None:
        """Watch until this is cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            for each in self._customers:
                with suppress(RedisUnavailable):
                    await self._look(each.id)

    async def _look(self, customer_id: str) -> None:
        """Two equal reads of all cells, one after the other: what they show was in force between them."""
        first = [await self._world.parts(customer_id, cell) for cell in CELLS]
        now_ms = time.time() * 1000
        if first != [await self._world.parts(customer_id, cell) for cell in CELLS]:
            return
        known = [parts for parts in first if parts]
        self.moments += 1
        for kind in (1, 2):
            self.most = max(self.most, sum(p[kind] if p[0] > now_ms else p[kind] // 2 for p in known))


async def admitted(world: World) -> dict[str, list[int]]:
    """The times of all admissions in ms, by customer."""
    found: dict[str, list[int]] = {}
    for pool in world.pools.values():
        names = [name async for name in pool.client.scan_iter(f"{pool.keys.prefix}request:*", count=1000)]
        async with pool.client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(name, "who", "env")
            rows = await pipeline.execute()
        for who, env in rows:
            if who is not None:
                found.setdefault(who.decode().split(" ")[1], []).append(int(env[:13]))
    return {customer_id: sorted(times) for customer_id, times in found.items()}


def missing_tokens(times: Sequence[int], began_ms: float) -> float:
    """The tokens that one bucket with the whole limit, which was empty when the customer was new, lacks at worst.

    0 if the limit was never exceeded in any interval. Times are cut to whole milliseconds.
    """
    level, at, worst = 0.0, began_ms, 0.0
    for moment in times:
        level = min(BURST, level + (moment - at) / 1000 * RATE) - 1
        worst, at = max(worst, -level), float(moment)
    return max(0.0, worst - RATE * TICK_MS / 1000)


def most_open(times: Sequence[int]) -> int:
    """The most requests that were open at one time, in all cells."""
    events = sorted([*((at, 1) for at in times), *((at + OPEN_MS + SLACK_MS, -1) for at in times)])
    count = most = 0
    for _, change in events:
        count += change
        most = max(most, count)
    return most


class Figures(NamedTuple):
    """Of one run. `over`: tokens above rate and burst, open requests above the concurrency, units above the quota.

    `parts`: the largest sum of parts in ten-thousandths; `usable`: the part of the rate that was usable with the quiet load.
    """

    sent: int
    over: tuple[float, int, int]
    parts: int
    usable: float
    rate_used: float
    open_used: float
    quota_used: float

    def told(self, run: str) -> str:
        """One line."""
        tokens, requests, units = self.over
        return (
            f"{run}: {self.sent} sent; over the limits: {tokens:.3f} tokens, {requests} open, {units} of the quota; "
            f"parts at most {self.parts / 100:.2f} %; "
            f"usable {self.usable:.1%} of the rate; used {self.rate_used:.1%} of the rate, {self.open_used:.1%} of the concurrency, {self.quota_used:.1%} of the quota"
        )


@dataclass
class Run:
    """One run. `began_ms`: when its customers were new; `quiet_ms`: the time whose use is measured."""

    customers: Sequence[Customer]
    load: Load
    watch: Watch
    began_ms: float
    quiet_ms: tuple[float, float] = (0.0, 1.0)
    usable: float = 0.0

    def figures(self, times: Mapping[str, Sequence[int]]) -> Figures:
        """The figures, by the times of all admissions."""
        rate, concurrency, quota = (times.get(each.id, []) for each in self.customers)
        begin, end = self.quiet_ms
        windows = Counter(at // (WINDOW_S * 1000) for at in quota)
        whole = [n for n in windows if n * WINDOW_S * 1000 >= begin and (n + 1) * WINDOW_S * 1000 <= end]
        open_s, quiet_s = (OPEN_MS + SLACK_MS) / 1000, (end - begin) / 1000
        over = (
            missing_tokens(rate, self.began_ms),
            max(0, most_open(concurrency) - CONCURRENCY),
            max(0, max(windows.values(), default=0) - QUOTA),
        )
        return Figures(
            self.load.sent.total(),
            over,
            self.watch.most,
            self.usable,
            sum(begin <= at < end for at in rate) / (RATE * max(quiet_s, 1e-3)),
            sum(begin <= at < end for at in concurrency) * open_s / (CONCURRENCY * max(quiet_s, 1e-3)),
            sum(windows[n] for n in whole) / (QUOTA * len(whole)) if whole else 1.0,
        )


async def shift(load: Load) -> None:
    """Move the load to other cells, for ever."""
    while True:
        load.parts = dict(zip(CELLS, [*list(load.parts.values())[1:], load.parts[CELLS[0]]], strict=True))
        await asyncio.sleep(SHIFT_S)


async def run_fault(world: World, name: str, fault: Any, parts: Sequence[float], quiet_s: float) -> Figures:
    """The figures of a run: a quiet time with this load, then the fault, while the load moves."""
    of = customers(name)
    run = Run(of, Load(world, of, parts), Watch(world, of), time.time() * 1000)
    world.rows.clear()
    world.catalog(*[each.row() for each in of])
    for each in of:
        await world.divided(each.id)
    tasks = [asyncio.create_task(run.load.run()), asyncio.create_task(run.watch.run())]
    try:
        await asyncio.sleep(SETTLE_S)
        run.quiet_ms = time.time() * 1000, (time.time() + quiet_s) * 1000
        await asyncio.sleep(quiet_s)
        run.usable = await world.usable(of[0].id, {cell: OVER * part for cell, part in run.load.parts.items()})
        if fault is not None:
            tasks.append(asyncio.create_task(shift(run.load)))
            await fault(world)
            await asyncio.sleep(SHIFT_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = run.figures(await admitted(world))
    for pool in world.pools.values():
        await forget(pool.client, pool.keys)
    return found


async def forget(client: Redis, keys: Keys) -> None:
    """Remove the requests of a run."""
    names = [name async for name in client.scan_iter(f"{keys.prefix}request:*", count=1000)]
    for start in range(0, len(names), 500):
        await client.unlink(*names[start : start + 500])
    await client.unlink(keys.queue("free"), keys.outbox)
