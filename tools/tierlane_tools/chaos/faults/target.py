"""The targets of faults (processes, proxies, servers), and one fault from its begin to its heal.

A fault is reported, and healed whatever happens meanwhile.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import asyncpg
import psutil
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from tierlane_tools.chaos.faults.catalogue import BY_NAME
from tierlane_tools.chaos.faults.fault_kind import FaultTarget
from tierlane_tools.chaos.faults.proxy import FaultProxy
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.server_clock import ServerClock
from tierlane_tools.chaos.history import FaultEvent, FaultPhase

Report = Callable[[FaultEvent], None]


@dataclass(frozen=True)
class HostileAccess:
    """The address of one gateway, and the key and model for a client that is no customer of the load."""

    host: str
    port: int
    key: str
    model: str


class StackTargets(ABC):
    """The targets in a stack, counted from 0 for each place. By default it has no proxies and no clock to step."""

    redis_clock = ServerClock(Path())

    @property
    @abstractmethod
    def counts(self) -> Mapping[FaultTarget, int]:
        """The number of targets of each place."""

    @property
    @abstractmethod
    def redis_url(self) -> str:
        """Redis, without a proxy."""

    @property
    def redis_urls(self) -> Sequence[str]:
        """Redis of each cell, the default one first, without a proxy."""
        return (self.redis_url,)

    async def redis_server(self, index: int) -> str:
        """The URL of the server that has this cell now. Raises FaultImpossible if none has it."""
        return self.redis_urls[index]

    @property
    @abstractmethod
    def database_url(self) -> str:
        """PostgreSQL, without a proxy."""

    @abstractmethod
    def name(self, place: FaultTarget, index: int) -> str:
        """The name of a target in events."""

    @abstractmethod
    def processes(self, place: FaultTarget, index: int) -> Sequence[psutil.Process]:
        """The running processes of a target, a server with all its children. Takes milliseconds, in a cluster a second.

        Raises FaultImpossible where no server has the cell.
        """

    def hostile_access(self, index: int) -> HostileAccess:
        """Access to this gateway."""
        raise LookupError(index)

    @property
    def engine_url(self) -> str:
        """The engine behind the workers."""
        raise LookupError

    def proxy(self, place: FaultTarget, index: int) -> FaultProxy:
        """One proxy."""
        raise LookupError(place, index)

    def redis_proxy_of(self, place: FaultTarget, index: int) -> FaultProxy:
        """The proxy between this process and Redis."""
        raise LookupError(place, index)


class FaultImpossible(Exception):
    """The fault cannot be injected now; the message has the reason."""


FaultAction = Callable[[StackTargets, Planned], AbstractAsyncContextManager[str]]
"""Injects a fault on entry, returns its details, heals it on exit."""


UNAVAILABLE = (
    FaultImpossible,
    RedisError,
    RedisUnavailable,
    OSError,
    TimeoutError,
    psutil.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
)
"""Errors that prevent a fault, mostly because another one has made its target unavailable."""


async def inject_fault(
    targets: StackTargets, fault: Planned, actions: Mapping[str, FaultAction], report: Report
) -> None:
    """Inject one fault, heal it after its length or when cancelled, and report begin and end.

    A fault that repeats another one reports each repetition under the name of that.
    """
    if not fault.kind.repeats:
        await _inject_once(targets, fault, actions, report)
        return
    began = time.monotonic()
    for repetition in repetitions(fault):
        await asyncio.sleep(began + repetition.at_s - fault.at_s - time.monotonic())
        await _inject_once(targets, repetition, actions, report)


def repetitions(fault: Planned) -> Iterator[Planned]:
    """The repetitions of a fault: the first at once, the last within its length."""
    kind = BY_NAME[fault.kind.repeats]
    for number in range(1 + math.floor(fault.length_s / fault.kind.every_s)):
        yield replace(fault, at_s=fault.at_s + number * fault.kind.every_s, kind=kind, length_s=0.0)


async def _inject_once(
    targets: StackTargets, fault: Planned, actions: Mapping[str, FaultAction], report: Report
) -> None:
    name, target = fault.kind.name, targets.name(fault.place, fault.index)
    now, error = FaultPhase.START, "Interrupted."
    try:
        async with actions[name](targets, fault) as details:
            report(FaultEvent(time.monotonic(), name, target, now, details))
            now, error = FaultPhase.HEAL, ""
            await asyncio.sleep(fault.length_s)
    except UNAVAILABLE as caught:
        error = f"{type(caught).__name__}: {caught}".rstrip(": ")
    finally:
        report(FaultEvent(time.monotonic(), name, target, now, error=error))
