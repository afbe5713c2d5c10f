"""One fault from its begin to its heal: told to whoever listens, and healed whatever happens meanwhile."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import asyncpg
import psutil
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from tierlane.chaos.ground import Ground
from tierlane.chaos.plan import FaultEvent, What
from tierlane.chaos.schedule import Planned


class FaultImpossible(Exception):
    """The fault cannot be done now; the message says why."""


Doing = Callable[[Ground, Planned], AbstractAsyncContextManager[str]]
"""Does a fault on entry, tells its details, heals it on exit."""

Tell = Callable[[FaultEvent], None]

AWAY = (
    FaultImpossible,
    RedisError,
    RedisUnavailable,
    OSError,
    TimeoutError,
    psutil.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
)
"""What keeps a fault from being done: mostly that another one has taken its target away."""


async def do_fault(ground: Ground, fault: Planned, doing: Mapping[str, Doing], tell: Tell) -> None:
    """Do one fault and heal it after its length, or when cancelled; tell its begin and its end."""
    name, target = fault.kind.name, ground.name(fault.place, fault.index)
    now, error = What.START, "Interrupted."
    try:
        async with doing[name](ground, fault) as details:
            tell(FaultEvent(time.monotonic(), name, target, now, details))
            now, error = What.HEAL, ""
            await asyncio.sleep(fault.length_s)
    except AWAY as caught:
        error = f"{type(caught).__name__}: {caught}".rstrip(": ")
    finally:
        tell(FaultEvent(time.monotonic(), name, target, now, error=error))
