"""Thousands of hostile connections beside correct traffic, which is not affected; memory stays bounded.

The variables `HOSTILE_CONNECTIONS` and `HOSTILE_SECONDS` make the test shorter.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from urllib.parse import urlsplit

import psutil
import pytest

import hostile_connections
from admin import NO_LIMITS, add_customer
from eventually import eventually
from hostile_connections import KINDS
from measured_load import MeasuredLoad, Stream, figures
from stack import Stack

CONNECTIONS = int(os.environ.get("HOSTILE_CONNECTIONS", "5000"))
SECONDS = float(os.environ.get("HOSTILE_SECONDS", "600"))
WARM_S = max(20.0, SECONDS / 10)  # Until connections of every kind have reached all of their deadlines.
GOOD_RATE = 200.0  # Requests/s, less than a third of the capacity.
ENDED_S = 15.0  # The longest deadline is that of bodies, 10 s.
MAY_GROW = 1.10

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS + 240)]


def connections(gateway: psutil.Process, port: int) -> int:
    """The number of connections to the port, in any state."""
    found = gateway.net_connections(kind="tcp")
    return sum(each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in found)


class Memory:
    """The resident memory of a process, sampled once a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.samples: list[int] = []

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            self.samples.append(self._process.memory_info().rss)
            await asyncio.sleep(1.0)

    def between(self, begin_s: float, end_s: float) -> float:
        """The median of the samples in between, in MiB."""
        return statistics.median(self.samples[int(begin_s) : int(end_s)]) / 2**20


async def test_hostile_connections_do_not_affect_others(chaos_stack: Stack) -> None:
    """All correct requests get 200, the memory of the gateway grows by at most 10 %, and all connections end in time."""
    stack = chaos_stack
    await stack.healthy(4)
    good = await add_customer(stack, "good", "enterprise", **NO_LIMITS)
    hostile = await add_customer(stack, "hostile", "free", **NO_LIMITS)
    address = urlsplit(stack.url)
    port = address.port or 80
    (pid,) = stack.pids("gateway").values()
    gateway = psutil.Process(pid)
    memory = Memory(gateway)
    load = MeasuredLoad(stack.url, {"good": Stream(good.key, GOOD_RATE)}, (WARM_S, SECONDS), seed=1)
    arguments = [hostile_connections.__file__, address.hostname or "", str(port), hostile.key, str(CONNECTIONS)]
    pipe = asyncio.subprocess.PIPE
    clients = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
    assert clients.stdin is not None
    try:
        watching = asyncio.create_task(memory.watch())
        intervals = await load.run()
        watching.cancel()
        open_at_the_end, stopped_s = connections(gateway, port), time.monotonic()
        clients.stdin.close()
        output, _ = await clients.communicate()
    finally:
        with suppress(ProcessLookupError):
            clients.kill()
    report = json.loads(output)
    await eventually(lambda: connections(gateway, port) == 0, "every connection has ended", ENDED_S)
    ended_s = time.monotonic()
    begun_s = max(stopped_s, report["begun_s"])  # Thousands of clients do not stop at once.
    last = len(memory.samples)
    begun, ended = memory.between(WARM_S - 10, WARM_S), memory.between(last - 10, last)
    for name, interval in zip(("warm", "measured"), intervals, strict=True):
        print(figures(name, interval, WARM_S if name == "warm" else SECONDS))
    print(f"{sum(report['ended'].values())} hostile connections ended, {open_at_the_end} open: {report['ended']}")
    print(
        f"the last one began {begun_s - stopped_s:.1f} s after the end of the load, and ended {ended_s - begun_s:.1f} s later"
    )
    used = gateway.cpu_times()
    print(f"CPU of the gateway in {last} s: {used.user + used.system:.0f} s")
    print(f"good requests were sent late by {load.late_ms:.0f} ms (p99)")
    print(
        f"resident: {begun:.0f} MiB after {WARM_S:.0f} s, {ended:.0f} MiB at the end, {max(memory.samples) / 2**20:.0f} at most"
    )

    assert [(interval["good"].failures, interval["good"].missing) for interval in intervals] == [(0, 0)] * 2
    assert (report["held"], set(report["ended"])) == ({}, {kind.__name__ for kind in KINDS})
    assert ended_s - begun_s <= ENDED_S
    assert ended <= MAY_GROW * begun
