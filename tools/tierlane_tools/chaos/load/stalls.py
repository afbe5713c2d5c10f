"""Stalls of this tool, during which responses are read late."""

import asyncio
import time
from collections.abc import Callable

PERIOD_S = 0.01
MIN_STALL_S = 0.02  # Above the period; shorter stalls are within the tolerance of the invariants.

OnStall = Callable[[float, float], None]


async def watch_stalls(on_stall: OnStall) -> None:
    """Call `on_stall(since, until)` after each stall of this event loop, until cancelled; monotonic seconds."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(PERIOD_S)
        now = time.monotonic()
        if now - last > PERIOD_S + MIN_STALL_S:
            on_stall(last, now)
        last = now
