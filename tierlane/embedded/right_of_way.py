"""The right of way of the embedded Redis on processors that it shares with every role.

A batch passes through Redis several times, and each time it would wait for the end of somebody's slice. Linux weighs
sessions before processes where it groups them (sched(7), "The autogroup feature"), so both weights are set. Only who may
lower a nice value can do this, as root can; for everybody else all stays as it is.
"""

import contextlib
import os
from pathlib import Path

# Of -20 to 19. With 1,000 connections on two processors 5 to 10 % more requests, with 2,000 as many; -5 gives half of it.
# A rewrite of the append-only file inherits it, on at most one processor.
NICE = -10


def give_right_of_way(pid: int, proc: Path = Path("/proc"), nice: int = NICE) -> bool:
    """Let the process `pid`, which leads a session of its own, go before others; return whether that was allowed."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # A kernel without such groups has no such file.
        (proc / str(pid) / "autogroup").write_text(str(nice))
    return True
