"""Faults of a cluster: the server that has a cell, an orderly failover, and a slot that moves key by key.

While the slot of a cell moves, no server has all of its keys. If a server dies meanwhile, the move is completed from and to
the primaries that have keys of the slot then.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from scheduler.redis_client.cluster import parse
from scheduler.redis_client.keys import cell_of, hash_tag
from tierlane_local.embedded.cluster import NodeView, parse_nodes
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.target import FaultImpossible, StackTargets

COMMAND_TIMEOUT_S = 3.0
VIEW_TIMEOUT_S = 1.0
MIGRATE_MS = 2000
AT_ONCE = 20  # Keys of one MIGRATE while the move lasts, and of one at its end.
MANY = 200
EVERY_S = 0.1
COMPLETED_WITHIN_S = 15.0  # Another fault may have stopped or killed a server meanwhile.
AWAY = (FaultImpossible, RedisError, OSError, TimeoutError)


class ClusterFaults:
    """A running cluster, by the URL of one of its cells. The number of a server is its place in the URL."""

    def __init__(self, url: str) -> None:
        where = parse(url.partition("#")[0])
        self._password = where.credentials["password"]
        self._addresses = where.nodes
        self.slot = key_slot(hash_tag(cell_of(url)).encode())

    async def command(self, number: int, *words: str | int, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        """The reply of one server. Raises RedisError, OSError or TimeoutError."""
        host, port = self._addresses[number]
        client = Redis(host=host, port=port, password=self._password, socket_timeout=None, driver_info=None)
        try:
            async with asyncio.timeout(timeout_s):
                return await client.execute_command(*words)  # type: ignore[no-untyped-call]
        finally:
            await client.aclose()

    async def owner(self) -> int:
        """The number of the primary of the slot, as it says itself. Raises FaultImpossible without one."""
        return (await self._owner())[0]

    async def other_primary(self) -> int:
        """A primary that does not have the slot: the one with most keys of it, as after a move that was not completed."""
        owner, view = await self._owner()
        found = [self._number(node) for node in view if node.slots and not node.is_failing]
        keys = {
            number: int(await self.command(number, "CLUSTER", "COUNTKEYSINSLOT", self.slot))
            for number in found
            if number != owner
        }
        if not keys:
            raise FaultImpossible("There is no other primary.")
        return max(keys, key=lambda number: keys[number])

    async def replica(self) -> int:
        """A replica of the primary of the slot. Raises FaultImpossible without one."""
        owner, view = await self._owner()
        primary = next(node.id for node in view if self._number(node) == owner)
        for node in view:
            if node.primary == primary and not node.is_failing:
                return self._number(node)
        raise FaultImpossible("The primary has no replica.")

    async def begin_move(self, source: int, target: int) -> None:
        """From here on, keys of the slot may be moved."""
        source_id, target_id = [await self._id(number) for number in (source, target)]
        await self.command(target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", source_id)
        await self.command(source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", target_id)

    async def move_keys(self, source: int, target: int, count: int) -> int:
        """Move up to `count` keys of the slot; returns how many."""
        names = await self.command(source, "CLUSTER", "GETKEYSINSLOT", self.slot, count)
        host, port = self._addresses[target]
        if names:
            words = ("MIGRATE", host, port, "", 0, MIGRATE_MS, "REPLACE", "AUTH", self._password, "KEYS")
            await self.command(source, *words, *[name.decode() for name in names])
        return len(names)

    async def end_move(self, source: int, target: int) -> None:
        """Move what is left, and assign the slot."""
        while await self.move_keys(source, target, MANY):
            pass
        target_id = await self._id(target)
        for number in (target, source):
            await self.command(number, "CLUSTER", "SETSLOT", self.slot, "NODE", target_id)

    async def _owner(self) -> tuple[int, list[NodeView]]:
        """The primary of the slot and what it sees. Of several, such as one that was stopped, the last elected."""
        asked = [self._view(number) for number in range(len(self._addresses))]
        claims: list[tuple[int, int, list[NodeView]]] = []
        for number, view in enumerate(await asyncio.gather(*asked)):
            claims += [(node.epoch, number, view) for node in view if "myself" in node.flags and node.has(self.slot)]
        if not claims:
            raise FaultImpossible("No server has the slot.")
        _, number, view = max(claims, key=lambda claim: claim[0])
        return number, view

    async def _view(self, number: int) -> list[NodeView]:
        with suppress(RedisError, OSError, TimeoutError):
            return parse_nodes((await self.command(number, "CLUSTER", "NODES", timeout_s=VIEW_TIMEOUT_S)).decode())
        return []

    async def _id(self, number: int) -> str:
        return str((await self.command(number, "CLUSTER", "MYID")).decode())

    def _number(self, node: NodeView) -> int:
        return next(number for number, (_, port) in enumerate(self._addresses) if port == node.port)


@asynccontextmanager
async def failed_over(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """The replica of the primary that has the cell takes over, after it has all data."""
    cluster = ClusterFaults(targets.redis_urls[fault.index])
    replica = await cluster.replica()
    await cluster.command(replica, "CLUSTER", "FAILOVER")
    yield f"to redis-{replica + 1}"


@asynccontextmanager
async def slot_moved(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Keys of the slot move during the fault, a few at once; at its end the others follow, and the slot."""
    cluster = ClusterFaults(targets.redis_urls[fault.index])
    source, target = await cluster.owner(), await cluster.other_primary()
    await cluster.begin_move(source, target)
    moving = asyncio.create_task(_keep_moving(cluster, source, target), name="move the slot")
    try:
        yield f"slot {cluster.slot} from redis-{source + 1} to redis-{target + 1}"
    finally:
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        await _complete(cluster, target)


async def _keep_moving(cluster: ClusterFaults, source: int, target: int) -> None:
    while True:
        await cluster.move_keys(source, target, AT_ONCE)
        await asyncio.sleep(EVERY_S)


async def _complete(cluster: ClusterFaults, target: int) -> None:
    deadline = time.monotonic() + COMPLETED_WITHIN_S
    while True:
        try:
            owner = await cluster.owner()
            if owner == target:
                return
            target = await cluster.other_primary()
            await cluster.begin_move(owner, target)
            await cluster.end_move(owner, target)
        except AWAY:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(EVERY_S)
