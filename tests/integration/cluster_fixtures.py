"""A cluster of three primaries and their replicas: real servers on loopback, for failovers and moved slots."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from scheduler.redis_client.connections import command_client
from tierlane_local.embedded.cluster import EmbeddedCluster, free_ports
from tierlane_tools.chaos.faults.cluster import ClusterFaults

CLUSTER_PASSWORD = "cluster-password"


class Cluster(EmbeddedCluster):
    """The servers of a test."""

    def _options(self, port: int, bus_port: int) -> list[str]:
        return [*super()._options(port, bus_port), "--enable-debug-command", "local"]

    @property
    def faults(self) -> ClusterFaults:
        return ClusterFaults(self.url)

    async def signal_owner(self, sign: int) -> int:
        """Send a signal to the primary of the slot; its number."""
        number = await self.faults.owner()
        os.kill(self.nodes[number].pid, sign)
        return number


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Six servers."""
    servers = Cluster(tmp_path, tmp_path, 3, password=CLUSTER_PASSWORD, ephemeral=True, bind=free_ports)
    try:
        await servers.start()
        yield servers
    finally:
        for node in servers.nodes:
            if node.alive:
                os.kill(node.pid, signal.SIGCONT)
        await servers.stop()


@pytest.fixture
async def cluster_client(cluster: Cluster) -> AsyncIterator[Redis]:
    """A command client of the primary of the slot."""
    client = command_client(cluster.url)
    yield client
    await client.aclose()
