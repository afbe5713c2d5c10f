"""The Redis of a chaos stack: a server for each cell, or a cluster that has a slot for each.

Cells are counted from 0, the default one first. In a cluster the server of a cell changes: it is asked for at each fault.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path

from tierlane_local.embedded import EmbeddedRedis
from tierlane_local.embedded.cluster import EmbeddedCluster
from tierlane_local.up.cells import cell_names
from tierlane_tools.chaos.faults.cluster import ClusterFaults
from tierlane_tools.chaos.faults.server_clock import ServerClock

# A full disk is simulated by a file size limit, which must cause an error instead of a signal.
LAUNCHER = ("/bin/sh", "-c", 'trap "" XFSZ; exec "$0" "$@"')
PRIMARY = "redis"


def server_names(cells: int) -> list[str]:
    """The names of the targets of faults, one for each cell."""
    return [PRIMARY, *(f"{PRIMARY}-{name}" for name in cell_names(cells))]


class SingleServers:
    """A server for each cell."""

    def __init__(self, home: Path, clock: ServerClock, cells: int) -> None:
        self.names = server_names(cells)
        others = {name: chaos_redis(home / name, clock, name) for name in cell_names(cells)}
        self.members = [chaos_redis(home, clock), *others.values()]
        self.urls = [self.members[0].url, *(f"{server.url}#{name}" for name, server in others.items())]
        self.sockets = [server.socket for server in self.members]

    async def form(self) -> None:
        """Nothing to do."""

    async def server(self, cell: int) -> EmbeddedRedis:
        """The server of this cell."""
        return self.members[cell]


class ClusterServers:
    """A cluster of some primaries with a replica each."""

    sockets: Sequence[Path] = ()

    def __init__(self, home: Path, primaries: int, cells: int) -> None:
        password = secrets.token_urlsafe(24)
        self._cluster = EmbeddedCluster(home, home / "run", primaries, password=password, ephemeral=True)
        self.names = server_names(cells)
        self.members = self._cluster.nodes
        self.urls = [self._cluster.url, *(f"{self._cluster.url}#{name}" for name in cell_names(cells))]

    async def form(self) -> None:
        """Form the cluster. Raises EmbeddedServerError."""
        await self._cluster.form()

    async def server(self, cell: int) -> EmbeddedRedis:
        """The primary of the slot of this cell. Raises FaultImpossible without one."""
        return self.members[await ClusterFaults(self.urls[cell]).owner()]


def chaos_redis(home: Path, clock: ServerClock, cell: str = "") -> EmbeddedRedis:
    """A Redis without persistence, whose clock can be stepped and whose disk can be full."""
    server = EmbeddedRedis(home, home / "run", ephemeral=True, launcher=LAUNCHER, environment=clock.environment)
    server.name = f"{PRIMARY}-{cell}" if cell else server.name
    return server
