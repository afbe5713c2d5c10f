"""All processes that were started here: their CPU and memory, and their end.

This process adopts orphans (on Linux it is their subreaper), so daemons that leave their parent are counted and stopped too.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLITE_S = 10.0
FORCED_S = 5.0


class Usage(NamedTuple):
    """All descendants at one time: CPU seconds since their start, memory, and number.

    `pss_bytes` counts shared pages once; None where the system does not report it.
    """

    cpu_s: float
    rss_bytes: int
    pss_bytes: int | None
    processes: int


def adopt_orphans() -> None:
    """Adopt orphans from now on; only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All living descendants."""
    return psutil.Process().children(recursive=True)


def cpu_seconds() -> float:
    """The CPU time of all descendants and of the children that they have reaped."""
    total = 0.0
    for process in descendants():
        with suppress(psutil.Error):
            times = process.cpu_times()
            reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            total += times.user + times.system + reaped
    return total


def usage() -> Usage:
    """The usage now. Takes milliseconds for each process, so not for the start and end of a measurement."""
    rss, pss, processes = 0, 0, 0
    has_pss = True
    for process in descendants():
        with suppress(psutil.Error):
            rss += process.memory_info().rss
            processes += 1
            whole = process.memory_full_info()
            has_pss = has_pss and hasattr(whole, "pss")
            pss += getattr(whole, "pss", 0)
    return Usage(cpu_seconds(), rss, pss if has_pss else None, processes)


def stop_all(roots: Iterable[psutil.Popen]) -> int:
    """Terminate the roots, then all descendants, then kill the rest; returns the number of killed processes."""
    for root in roots:
        _each([root], "terminate")
    _gone_within(POLITE_S)
    _each(descendants(), "terminate")
    left = _gone_within(FORCED_S)
    _each(left, "kill")
    if still := _gone_within(FORCED_S):
        raise SystemExit(f"These processes cannot be stopped: {', '.join(str(process.pid) for process in still)}.")
    return len(left)


def _each(processes: Iterable[psutil.Process], verb: str) -> None:
    for process in processes:
        with suppress(psutil.Error):
            getattr(process, verb)()


def _gone_within(seconds: float) -> list[psutil.Process]:
    """Wait and reap; returns the remaining descendants."""
    psutil.wait_procs(descendants(), timeout=seconds)
    return descendants()
