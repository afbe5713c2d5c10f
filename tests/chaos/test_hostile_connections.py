"""Thousands of hostile connections beside good traffic: nobody else notices, memory stays, and every connection ends.

`HOSTILE_CONNECTIONS` and `HOSTILE_SECONDS` in the environment make it shorter.
"""

import asyncio
import os
import resource
import statistics
import time
from urllib.parse import urlsplit

import psutil
import pytest

from admin import NO_LIMITS, add_customer
from eventually import eventually
from hostile_connections import KINDS, Crowd
from measured_load import MeasuredLoad, Stream, told
from stack import Stack

CONNECTIONS = int(os.environ.get("HOSTILE_CONNECTIONS", "5000"))
SECONDS = float(os.environ.get("HOSTILE_SECONDS", "600"))
WARM_S = max(20.0, SECONDS / 10)  # Until every kind has gone through all of its deadlines.
GOOD_RATE = 200.0  # Requests/s, under a third of the capacity.
ENDED_S = 15.0  # The longest deadline is that of bodies, 10 s.
MAY_GROW = 1.10

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS + 240)]


def connections(gateway: psutil.Process, port: int) -> int:
    """Open connections to the port, in whatever state."""
    found = gateway.net_connections(kind="tcp")
    return sum(each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in found)


class Memory:
    """The resident memory of a process, a figure a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.seen: list[int] = []

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self.seen.append(self._process.memory_info().rss)
            await asyncio.sleep(1.0)

    def between(self, begin_s: float, end_s: float) -> float:
        """The median of this time, in MiB."""
        return statistics.median(self.seen[int(begin_s) : int(end_s)]) / 2**20


async def test_hostile_connections_harm_nobody_else(chaos_stack: Stack) -> None:
    """All good requests are answered 200; the gateway's memory stays within a tenth; all connections end in time."""
    stack = chaos_stack
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    await stack.healthy(4)
    good = await add_customer(stack, "good", "enterprise", **NO_LIMITS)
    hostile = await add_customer(stack, "hostile", "free", **NO_LIMITS)
    where = urlsplit(stack.url)
    port = where.port or 80
    (pid,) = stack.pids("gateway").values()
    gateway = psutil.Process(pid)
    crowd = Crowd(where.hostname or "", port, hostile.key, CONNECTIONS)
    memory = Memory(gateway)
    load = MeasuredLoad(stack.url, {"good": Stream(good.key, GOOD_RATE)}, (WARM_S, SECONDS), seed=1)
    watching, attacking = asyncio.create_task(memory.watch()), asyncio.create_task(crowd.run())
    stretches = await load.run()
    watching.cancel()
    open_at_the_end = connections(gateway, port)
    crowd.stop.set()
    await eventually(lambda: connections(gateway, port) == 0, "every connection has ended", ENDED_S)
    await attacking
    last = len(memory.seen)
    begun, ended = memory.between(WARM_S - 10, WARM_S), memory.between(last - 10, last)
    for name, stretch in zip(("warm", "measured"), stretches, strict=True):
        print(told(name, stretch, WARM_S if name == "warm" else SECONDS))
    print(f"{sum(crowd.ended.values())} hostile connections ended, {open_at_the_end} open: {dict(crowd.ended)}")
    used = gateway.cpu_times()
    print(f"CPU in {last} s: gateway {used.user + used.system:.0f} s, this process {time.process_time():.0f} s")
    print(f"good requests were sent late by {load.late_ms:.0f} ms (p99)")
    print(
        f"resident: {begun:.0f} MiB after {WARM_S:.0f} s, {ended:.0f} MiB at the end, {max(memory.seen) / 2**20:.0f} at most"
    )

    assert [(stretch["good"].failures, stretch["good"].missing) for stretch in stretches] == [(0, 0)] * 2
    assert (crowd.held, set(crowd.ended)) == ({}, {kind.__name__ for kind in KINDS})
    assert ended <= MAY_GROW * begun
