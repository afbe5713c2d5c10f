"""Every process that was started here, however deep and whoever its parent was: counted, and gone in the end.

This process adopts orphans (Linux: it is their subreaper), so that a daemon which leaves its parent is found again among
the descendants, is counted, and is stopped by its pid.
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
    """Of all descendants at one moment: CPU seconds since their beginning, memory, and how many they are.

    `pss_bytes` counts a page that several share once; None where the system does not tell.
    """

    cpu_s: float
    rss_bytes: int
    pss_bytes: int | None
    processes: int


def adopt_orphans() -> None:
    """From now on an orphan below this process becomes its child. Elsewhere than on Linux nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All that live."""
    return psutil.Process().children(recursive=True)


def cpu_seconds() -> float:
    """CPU time of all descendants and of those that they have reaped."""
    total = 0.0
    for process in descendants():
        with suppress(psutil.Error):
            times = process.cpu_times()
            reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            total += times.user + times.system + reaped
    return total


def usage() -> Usage:
    """All of it; takes some milliseconds a process, so not for the edges of a measurement."""
    rss, pss, processes = 0, 0, 0
    shared_is_told = True
    for process in descendants():
        with suppress(psutil.Error):
            rss += process.memory_info().rss
            processes += 1
            whole = process.memory_full_info()
            shared_is_told = shared_is_told and hasattr(whole, "pss")
            pss += getattr(whole, "pss", 0)
    return Usage(cpu_seconds(), rss, pss if shared_is_told else None, processes)


def stop_all(roots: Iterable[psutil.Popen]) -> int:
    """Ask the roots to stop, then all, then kill by pid whatever is left; how many had to be killed."""
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
    """Wait, reap, and tell who is left."""
    psutil.wait_procs(descendants(), timeout=seconds)
    return descendants()
