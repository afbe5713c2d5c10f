"""The life of a role's process: signals become an event; a refusal to start becomes one sentence and exit code 1."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from scheduler.errors import TierlaneError
from scheduler.failpoints import arm

REFUSED = 1
FAILPOINTS_VARIABLE = "TIERLANE_TEST_FAILPOINTS"


def run_role(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `main` on uvloop until it returns its exit code; it handles SIGTERM and SIGINT itself."""
    if directory := os.environ.get(FAILPOINTS_VARIABLE):
        arm(Path(directory))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except TierlaneError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
