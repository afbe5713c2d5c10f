"""What the whole machine did meanwhile: figures are worth little when something else computed at the same time."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import resource
import time
from typing import NamedTuple

import psutil


class Reading(NamedTuple):
    """Seconds since some beginning: of the clock, of all cores at work, and of the children that ended here."""

    clock_s: float
    busy_s: float
    ended_s: float


def read() -> Reading:
    """Now."""
    times = psutil.cpu_times()
    # Interrupts are the kernel's share of the load itself, which no process is charged with.
    idle = times.idle + sum(getattr(times, name, 0.0) for name in ("iowait", "irq", "softirq", "guest", "guest_nice"))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Reading(time.monotonic(), sum(times) - idle, ended.ru_utime + ended.ru_stime)


def others_cores(before: Reading, after: Reading, own_s: float) -> float:
    """Cores that were busy on average with what is neither the system (`own_s`) nor the load, which ended in between."""
    wall_s = after.clock_s - before.clock_s
    return max(0.0, (after.busy_s - before.busy_s - own_s - (after.ended_s - before.ended_s)) / wall_s)
