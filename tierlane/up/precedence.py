"""Who waits for whom where there are more processes than processors: gateways for everybody else.

Nearly all work of a stack is done in gateways, in stretches of milliseconds, and all of it passes through Redis, in
stretches of much less. With equal rights Redis, a scheduler or a worker waits for a gateway's stretch to end at every
step of every batch, though the gateway then only waits for them. A tenth of the throughput of a machine of two cores
hung on it (docs/performance.md).
"""

import contextlib
import os
from pathlib import Path

NICE = {"gateway": 5}
"""By role; the others stay as they were started. Less than this hardly matters, more makes no difference."""


def set_precedence(role: str, pid: int) -> None:
    """Lower the rights of a process that was just started. Where the system does not let us, all are equal as before."""
    nice = NICE.get(role)
    if nice is None:
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    # Linux shares time between sessions first, and each member of the stack has one of its own (sched(7), "autogroup").
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")
