"""Runs a role of any checkout that waits longer for Redis, and counts its pauses, so that it can run under valgrind.

Environment: COUNTED_PAUSES, the beginning of the name of the file with the number of pauses, which ends with the process id.
"""
# ruff: noqa: INP001, SLF001 - a script; and versions before a common interface

import asyncio
import mmap
import os
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

PATIENCE_S = 30.0
FILE = Path(f"{os.environ.pop('COUNTED_PAUSES')}.{os.getpid()}")
sleep = asyncio.sleep


def wait_longer_for_redis() -> None:
    """Replace the timeout of commands, which parameters have as their default."""
    try:
        connections: Any = import_module("scheduler.redis_client.connections")
    except ImportError:
        connections = import_module("scheduler.connections")
    timeout_s = connections.COMMAND_TIMEOUT_S
    for function in (connections._client, connections.command_client, connections.bounded.__wrapped__):
        function.__defaults__ = tuple(PATIENCE_S if each == timeout_s else each for each in function.__defaults__)
    connections.COMMAND_TIMEOUT_S = PATIENCE_S


def count_pauses() -> None:
    """Count the calls of `asyncio.sleep`, except those that only let other tasks run."""
    FILE.write_bytes(bytes(8))
    with FILE.open("r+b") as file:
        number = mmap.mmap(file.fileno(), 8)

    async def counted_sleep(delay: float, result: Any = None) -> Any:
        if delay > 0:
            number[:] = (int.from_bytes(number, "little") + 1).to_bytes(8, "little")
        return await sleep(delay, result)

    asyncio.sleep = counted_sleep


wait_longer_for_redis()
count_pauses()
runpy.run_module("tierlane", run_name="__main__", alter_sys=True)
