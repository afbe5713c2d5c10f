"""One fault from its begin to its heal: told to whoever listens, and healed whatever happens meanwhile."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import asyncpg
import psutil
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from tierlane.chaos.faults.catalogue import BY_NAME
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
    """Do one fault and heal it after its length, or when cancelled; tell its begin and its end.

    One that repeats a blow tells each blow under the name of that.
    """
    if not fault.kind.repeats:
        await _do_once(ground, fault, doing, tell)
        return
    began = time.monotonic()
    for blow in blows(fault):
        await asyncio.sleep(began + blow.at_s - fault.at_s - time.monotonic())
        await _do_once(ground, blow, doing, tell)


def blows(fault: Planned) -> Iterator[Planned]:
    """What a fault that repeats a blow comes to: the first at once, the last within its length."""
    kind = BY_NAME[fault.kind.repeats]
    for number in range(1 + math.floor(fault.length_s / fault.kind.every_s)):
        yield replace(fault, at_s=fault.at_s + number * fault.kind.every_s, kind=kind, length_s=0.0)


async def _do_once(ground: Ground, fault: Planned, doing: Mapping[str, Doing], tell: Tell) -> None:
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
