"""Ending loops that do not end by themselves.

One `cancel` is not enough on Python 3.11: the Redis client awaits its writes with `asyncio.wait_for`, which loses a
cancellation that comes as the write completes (one in eight was lost in a trial), and the loop would go on for ever.
"""

import asyncio
from collections.abc import Iterable

AGAIN_S = 0.05


async def end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel every task, again and again, until all have ended; what they raised is dropped."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
