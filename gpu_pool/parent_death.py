"""A model process must not outlive its supervisor: the kernel ends it, even inside a kernel launch or a C call.

PR_SET_PDEATHSIG is Linux only (prctl(2)); everywhere, end-of-file on the socket to the supervisor does the same for
any process whose interpreter still runs.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` (the process that started it) ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It died before the line above.
        os._exit(0)
