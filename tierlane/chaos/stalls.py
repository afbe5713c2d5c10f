"""How long this tool itself stood still: an answer that came meanwhile was read late, and the stack is not to blame."""

import asyncio
import time
from collections.abc import Callable

PERIOD_S = 0.01
LEAST_S = 0.02  # Above the period: what is shorter disappears in the slack of the laws.

OnStall = Callable[[float, float], None]


async def watch_stalls(on_stall: OnStall) -> None:
    """Call `on_stall(since, until)` after each standstill of this event loop, until cancelled; monotonic seconds."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(PERIOD_S)
        now = time.monotonic()
        if now - last > PERIOD_S + LEAST_S:
            on_stall(last, now)
        last = now
