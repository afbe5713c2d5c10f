"""One measurement, the same for every system: outputs checked, one idle connection, warm-up, load, outputs checked again.

The CPU of other processes is measured too, because it disturbs the figures.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
import descendants
import psutil
import wrk

POLL_S = 0.2
REQUEST_TIMEOUT_S = 5.0
CONCURRENT_CHECKS = 96
"""Enough for several batches."""
QUIET_CORES = 0.2
"""The CPU of other processes that is ignored, in cores."""


class JobError(Exception):
    """A system returned no or a wrong response; the message says which."""


def wait_for(target: wrk.Target, within_s: float, still_alive: Callable[[], None]) -> None:
    """Send requests until one gets the right response. Raises JobError, and what `still_alive` raises."""
    deadline = time.monotonic() + within_s
    while True:
        still_alive()
        try:
            return asyncio.run(_send_all(target, 1))
        except JobError as error:
            if time.monotonic() > deadline:
                raise JobError(f"no right response within {within_s:.0f} s: {error}") from None
        time.sleep(POLL_S)


def check(target: wrk.Target) -> None:
    """Check that each of many concurrent requests gets its own output. Raises JobError."""
    asyncio.run(_send_all(target, CONCURRENT_CHECKS))


async def _send_all(target: wrk.Target, count: int) -> None:
    headers = {"Authorization": f"Bearer {target.keys[0]}"} if target.keys else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(_send(session, target.url, f"text {number}") for number in range(count)))


async def _send(session: aiohttp.ClientSession, url: str, text: str) -> None:
    try:
        async with session.post(url, json={"input": text}) as response:
            if response.status != 200:
                raise JobError(f"status {response.status}")
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise JobError(f"{type(error).__name__}: {error}") from None
    if not isinstance(body, dict) or body.get("output") != text[::-1]:
        raise JobError(f"a wrong output for {text!r}: {str(body)[:80]}")


class MachineReading(NamedTuple):
    """Seconds since some start: of the clock, of all busy cores, and of ended children of this process."""

    clock_s: float
    busy_s: float
    ended_s: float


def read_machine() -> MachineReading:
    """Read the clock and the CPU of the whole machine."""
    times = psutil.cpu_times()
    # Interrupts belong to the load, but are charged to no process.
    idle = times.idle + sum(getattr(times, name, 0.0) for name in ("iowait", "irq", "softirq", "guest", "guest_nice"))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return MachineReading(time.monotonic(), sum(times) - idle, ended.ru_utime + ended.ru_stime)


def _others_cores(before: MachineReading, after: MachineReading, own_s: float) -> float:
    """The mean number of cores used by neither the system (`own_s`) nor the load, which ended in between."""
    wall_s = after.clock_s - before.clock_s
    return max(0.0, (after.busy_s - before.busy_s - own_s - (after.ended_s - before.ended_s)) / wall_s)


class Plan(NamedTuple):
    """Seconds of each part, connections of the load, and the most attempts until no other process disturbs."""

    connections: int
    seconds: int
    idle_s: int
    warm_s: int
    attempts: int


class Counted(NamedTuple):
    """One measured load; `others_cores` is the CPU of other processes."""

    load: wrk.Figures
    cpu_us: float
    others_cores: float

    @property
    def quiet(self) -> bool:
        """Whether no other process disturbed the figures."""
        return self.others_cores <= QUIET_CORES


class Measured(NamedTuple):
    """The result; `idle` is the load of one connection, `answered_in_all` counts every load."""

    counted: Counted
    idle: wrk.Figures
    memory: descendants.Usage
    answered_in_all: int
    attempts: int


def measure(target: wrk.Target, plan: Plan) -> Measured:
    """Measure a system; of several loads the least disturbed is returned. Raises JobError and WrkError."""
    check(target)
    idle = wrk.load(target, 1, plan.idle_s)
    warm = wrk.load(target, plan.connections, plan.warm_s)
    loads = [_count(target, plan)]
    while len(loads) < plan.attempts and not loads[-1].quiet:
        loads.append(_count(target, plan))
    memory = descendants.usage()
    check(target)
    answered = idle.answered + warm.answered + sum(counted.load.answered for counted in loads)
    best = min(loads, key=lambda counted: counted.others_cores)
    return Measured(best, idle, memory, answered, len(loads))


def _count(target: wrk.Target, plan: Plan) -> Counted:
    before, before_s = read_machine(), descendants.cpu_seconds()
    load = wrk.load(target, plan.connections, plan.seconds)
    cpu_s, after = descendants.cpu_seconds() - before_s, read_machine()
    return Counted(load, cpu_s / load.answered * 1e6, _others_cores(before, after, cpu_s))
