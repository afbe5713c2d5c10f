"""What faults can be done to (processes, proxies, servers past all proxies), and one fault from its begin to its heal.

A fault is reported to whoever listens, and healed whatever happens meanwhile.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import asyncpg
import psutil
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from tierlane.chaos.faults.catalogue import BY_NAME, FaultTarget, Planned
from tierlane.chaos.faults.proxy import FaultProxy
from tierlane.chaos.faults.server_clock import ServerClock
from tierlane.chaos.history import FaultEvent, What


@dataclass(frozen=True)
class Stranger:
    """How somebody who is none of the customers of the load comes to one gateway, and what model there is."""

    host: str
    port: int
    key: str
    model: str


class StackTargets(Protocol):
    """A stack as faults see it. Targets of a place are counted from 0."""

    @property
    def targets(self) -> Mapping[FaultTarget, int]:
        """How many there are of each place."""

    @property
    def redis_url(self) -> str:
        """Redis itself."""

    @property
    def database_url(self) -> str:
        """PostgreSQL itself."""

    @property
    def redis_clock(self) -> ServerClock:
        """The wall clock of Redis."""

    def stranger(self, index: int) -> Stranger:
        """At this gateway."""

    def name(self, place: FaultTarget, index: int) -> str:
        """What a target is called in events."""

    def processes(self, place: FaultTarget, index: int) -> Sequence[psutil.Process]:
        """The processes that are there now, none where it is down; a server with all its children. Takes milliseconds."""

    def proxy(self, place: FaultTarget, index: int) -> FaultProxy:
        """One proxy."""

    def redis_proxy_of(self, place: FaultTarget, index: int) -> FaultProxy:
        """The proxy between this process and Redis."""


class FaultImpossible(Exception):
    """The fault cannot be done now; the message says why."""


Doing = Callable[[StackTargets, Planned], AbstractAsyncContextManager[str]]
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


async def do_fault(ground: StackTargets, fault: Planned, doing: Mapping[str, Doing], tell: Tell) -> None:
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


async def _do_once(ground: StackTargets, fault: Planned, doing: Mapping[str, Doing], tell: Tell) -> None:
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
