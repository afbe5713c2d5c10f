"""Runs `tierlane up` of any checkout. The processes of one role get a prefix, and all roles run `role.py`.

Environment: COUNTED_ROLE, COUNTED_PREFIX.
"""
# ruff: noqa: INP001 - a script

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROLE, PREFIX = os.environ.pop("COUNTED_ROLE"), os.environ.pop("COUNTED_PREFIX").split()
REDIS = ("valkey-server", "redis-server")


class Popen(subprocess.Popen[Any]):
    """Replaces the class that starts the processes of a stack."""

    def __init__(self, arguments: Sequence[str], *rest: Any, **options: Any) -> None:
        command, first = [str(word) for word in arguments], None
        if command[-3:-1] == ["-m", "tierlane"]:
            first = command.index(sys.executable) if command[-1] == ROLE else None
            command[-3:-1] = [str(Path(__file__).with_name("role.py"))]
        elif ROLE == "redis":
            first = next((at for at, word in enumerate(command) if word.endswith(REDIS)), None)
        if first is not None:
            command[first:first] = PREFIX
        super().__init__(command, *rest, **options)


subprocess.Popen = Popen  # type: ignore[misc, assignment]  # the stack starts all of its processes with it
runpy.run_module("tierlane", run_name="__main__", alter_sys=True)
