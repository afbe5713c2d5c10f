"""What faults can be done to: processes by place, proxies by place, and the servers themselves, past all proxies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from tierlane.chaos.faults.catalogue import Place
from tierlane.chaos.faults.proxy import FaultProxy
from tierlane.chaos.faults.server_clock import ServerClock


@dataclass(frozen=True)
class Stranger:
    """How somebody who is none of the customers of the load comes to one gateway, and what model there is."""

    host: str
    port: int
    key: str
    model: str


class Ground(Protocol):
    """A stack as faults see it. Targets of a place are counted from 0."""

    @property
    def targets(self) -> Mapping[Place, int]:
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

    def name(self, place: Place, index: int) -> str:
        """What a target is called in events."""

    def processes(self, place: Place, index: int) -> Sequence[psutil.Process]:
        """The processes that are there now, none where it is down; a server with all its children. Takes milliseconds."""

    def proxy(self, place: Place, index: int) -> FaultProxy:
        """One proxy."""

    def redis_proxy_of(self, place: Place, index: int) -> FaultProxy:
        """The proxy between this process and Redis."""
