"""The pools of a gateway as the catalog changes: a pool is served from the time the catalog first names it.

A pool that no model names any more is served until the gateway ends; also by new gateways as long as schedulers report
unfinished requests in it, as for disabled models. Its accepted requests and jobs must end. A cell that is closed is left.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog

from gateway.pool import PoolParts
from gateway.pools import Pools
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Model
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.redis_client.connections import server_url
from scheduler.redis_client.keys import cell_of, place_name, pools_to_serve
from scheduler.tasks import TaskRegistry, end_all, next_tick

CHECK_S = 0.1
UNFINISHED_EVERY = 10  # Checks per read of the pools with unfinished requests from Redis.

log = structlog.get_logger("gateway")


class ServedPlace(NamedTuple):
    """One pool in one cell, and its background tasks."""

    parts: PoolParts
    tasks: list[asyncio.Task[None]]


class PoolLifecycle:
    """Adds pools to `pools`, and removes them. `make`: builds the parts of a pool in the cell at a Redis URL."""

    def __init__(
        self,
        catalog: Catalog,
        pools: Pools,
        make: Callable[[str, str], PoolParts],
        tasks: TaskRegistry,
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._make = make
        self._registry = tasks
        self._others: dict[str, ServedPlace] = {}  # By place; all but the gateway's own pool in the default cell.
        self._left: dict[str, asyncio.Task[None]] = {}  # The ends of places in closed cells.
        self._checked: tuple[Mapping[str, Model], object] | None = None

    async def run(self) -> None:
        """Serve pools and cells from when the catalog names them; leave closed cells. Never returns."""
        self._checked = None  # After a restart of this loop, a pool may have been missed.
        for check in itertools.count():
            snapshot, changed = self._catalog.snapshot, self._new()
            wanted = dict(changed)
            if not check % UNFINISHED_EVERY:
                wanted |= await self._unnamed()
            for place in sorted(set(wanted) - {parts.config.place for parts in self._pools.all} - self._left.keys()):
                try:
                    await self._begin(*wanted[place])
                except Exception as error:  # noqa: BLE001 - the other cells are served
                    log_fault(f"{place} cannot be served", error)
                    self._checked = None  # It is attempted again.
            if changed and snapshot is not None:
                here = {parts.config.place for parts in self._pools.all}
                self._pools.homes.adopt(snapshot, {cell_of(changed[place][1]) for place in changed.keys() - here})
            await next_tick(CHECK_S)

    async def _unnamed(self) -> dict[str, tuple[str, str]]:
        """The pools with unfinished requests, in each cell."""
        if self._pools.config.only_own:
            return {}
        own = self._pools.own_cells
        found: dict[str, tuple[str, str]] = {}
        for parts, pools in zip(own, await asyncio.gather(*map(_unfinished, own)), strict=True):
            cell = parts.config.cell
            found |= {place_name(pool, cell): (pool, parts.config.redis_url) for pool in pools}
        return found

    def _new(self) -> dict[str, tuple[str, str]]:
        """All pools and URLs by place, if the catalog has changed; ends the places of closed cells."""
        snapshot = self._catalog.snapshot
        if snapshot is None or (snapshot.models, snapshot.cells) == self._checked:
            return {}
        self._checked = (snapshot.models, snapshot.cells)
        urls = self._pools.homes.urls(self._pools.config.redis_url)
        for place, served in list(self._others.items()):
            if served.parts.config.cell not in urls:
                self._leave(place)
        own = self._pools.config.pool
        pools = {own} if self._pools.config.only_own else {own} | pools_to_serve(snapshot.models.values())
        return {place_name(pool, cell): (pool, url) for pool in pools for cell, url in urls.items()}

    async def _begin(self, pool: str, redis_url: str) -> None:
        parts = self._make(pool, await server_url(redis_url))
        place = parts.config.place
        log.info("serving pool", pool=place)
        parts.direct.open()
        await parts.heartbeat.heartbeat()
        run_forever = self._registry.run_forever
        tasks = [
            asyncio.create_task(run_forever(f"{place} {name}", loop), name=f"gateway {place} {name}")
            for name, loop in parts.loops().items()
        ]
        self._others[place] = ServedPlace(parts, tasks)
        self._pools.add(parts)

    def _leave(self, place: str) -> None:
        """End a place whose cell is closed. Requests that still wait in it get `no_capacity`."""
        log.info("pool no longer served", pool=place)
        self._pools.remove(place)
        if (jobs := self._others[place].parts.jobs.serving) is not None:
            jobs.leave()
        ending = asyncio.create_task(_end(self._others.pop(place)), name=f"gateway {place} end")
        self._left[place] = ending
        ending.add_done_callback(lambda _: self._ended(place))

    def _ended(self, place: str) -> None:
        del self._left[place]
        self._checked = None  # If its cell was opened again meanwhile, it is served again.

    async def close(self) -> None:
        """End the background tasks of the other pools, and close them."""
        await asyncio.gather(*self._left.values(), return_exceptions=True)
        await end_all([task for served in self._others.values() for task in served.tasks])
        await asyncio.gather(*(served.parts.close() for served in self._others.values()))


async def _unfinished(parts: PoolParts) -> set[str]:
    try:
        return await parts.unfinished()
    except RedisUnavailable:
        return set()


async def _end(served: ServedPlace) -> None:
    await served.parts.handover.turn()  # Requests whose customers have left the cell are submitted in the new one.
    await served.parts.sweep.end_all(ErrorCode.NO_CAPACITY)
    await end_all(served.tasks)
    await served.parts.close()
