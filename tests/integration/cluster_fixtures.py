"""A cluster of three primaries and their replicas: real servers on loopback, for failovers and moved slots."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from scheduler.redis_client.cluster import parse
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import DEFAULT_CELL, hash_tag
from tierlane.embedded.cluster import EmbeddedCluster, free_ports

SLOT = key_slot(hash_tag(DEFAULT_CELL).encode())


class ClusterFaults:
    """Faults of a running cluster, by its URL: the number of a server is its place there."""

    def __init__(self, url: str) -> None:
        where = parse(url)
        self.password = where.credentials["password"]
        self.addresses = where.nodes

    async def command(self, number: int, *words: str | int) -> Any:
        """The reply of one server. Raises RedisError, OSError or TimeoutError."""
        host, port = self.addresses[number]
        client = Redis(host=host, port=port, password=self.password, socket_timeout=None, driver_info=None)
        try:
            async with asyncio.timeout(3.0):
                return await client.execute_command(*words)
        finally:
            await client.aclose()

    async def owner(self) -> int:
        """The number of the primary of the slot, as it says itself."""
        for number in range(len(self.addresses)):
            with suppress(RedisError, OSError, TimeoutError):
                own = await self.command(number, "CLUSTER", "MYID")
                for first, last, primary, *_ in await self.command(number, "CLUSTER", "SLOTS"):
                    if first <= SLOT <= last and primary[2] == own:
                        return number
        raise AssertionError("No server has the slot.")

    async def other_primary(self) -> int:
        """The number of a primary that does not have the slot."""
        for number in range(len(self.addresses)):
            nodes = (await self.command(number, "CLUSTER", "NODES")).decode().splitlines()
            flags = next(line.split()[2].split(",") for line in nodes if "myself" in line)
            if "master" in flags and number != await self.owner():
                return number
        raise AssertionError("There is no other primary.")

    async def begin_move(self, source: int, target: int) -> None:
        """From here on, keys of the slot may be moved."""
        source_id, target_id = [(await self.command(n, "CLUSTER", "MYID")).decode() for n in (source, target)]
        await self.command(target, "CLUSTER", "SETSLOT", SLOT, "IMPORTING", source_id)
        await self.command(source, "CLUSTER", "SETSLOT", SLOT, "MIGRATING", target_id)

    async def move_keys(self, source: int, target: int, count: int) -> int:
        """Move up to `count` keys of the slot; returns how many."""
        names = await self.command(source, "CLUSTER", "GETKEYSINSLOT", SLOT, count)
        host, port = self.addresses[target]
        if names:
            words = ("MIGRATE", host, port, "", 0, 2000, "AUTH", self.password, "KEYS")
            await self.command(source, *words, *[name.decode() for name in names])
        return len(names)

    async def end_move(self, source: int, target: int) -> None:
        """Move what is left, and assign the slot."""
        while await self.move_keys(source, target, 100):
            pass
        target_id = (await self.command(target, "CLUSTER", "MYID")).decode()
        for number in (target, source):
            await self.command(number, "CLUSTER", "SETSLOT", SLOT, "NODE", target_id)


class Cluster(EmbeddedCluster):
    """The servers of a test."""

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
    servers = Cluster(tmp_path, tmp_path, 3, password="cluster-password", ephemeral=True, bind=free_ports)
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
