"""The pools of one gateway, each in every cell: its own pool, and every other one that a model names, from the time the
catalog first does.

A request joins the queues of the pool of its model, in the cell of its customer. A pool that no model names any more is
served until the gateway ends; also by new gateways as long as schedulers report unfinished requests in it, as for disabled
models. Its accepted requests and jobs must end. A cell that is closed is left.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import structlog
from msgspec import UNSET, UnsetType

from gateway.cells import Homes
from gateway.inference.pipeline import InferencePipeline
from gateway.jobs.results import JobResultHandler
from gateway.jobs.submit import JobSubmitHandler
from gateway.limits.handover import Handover
from gateway.pool import PoolParts
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity, Model
from ratelimit.request_limits import RequestLimits
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Residence
from scheduler.redis_client.connections import server_url
from scheduler.redis_client.keys import DEFAULT_CELL, cell_of, is_pool_name, place_name, pools_of, pools_to_serve
from scheduler.tasks import TaskRegistry, end_all, next_tick

CHECK_S = 0.1
UNFINISHED_EVERY = 10  # Checks per read of the pools with unfinished requests from Redis.

log = structlog.get_logger("gateway")


class ServedPlace(NamedTuple):
    """One pool in one cell, and its background tasks."""

    parts: PoolParts
    tasks: list[asyncio.Task[None]]


class Pools:
    """All pools of a gateway. `make`: builds the parts of a pool in the cell at a Redis URL. `homes`: the cells of customers.

    `only_own`: serve no other pools. `tasks`: runs the background tasks.
    """

    def __init__(
        self,
        catalog: Catalog,
        own: PoolParts,
        make: Callable[[str, str], PoolParts],
        homes: Homes,
        *,
        only_own: bool = False,
        tasks: TaskRegistry | None = None,
    ) -> None:
        self._catalog = catalog
        self._own = own
        self._make = make
        self._homes = homes
        self._only_own = only_own
        self._others: dict[str, ServedPlace] = {}  # By place.
        self._registry = tasks or TaskRegistry()
        self._left: dict[str, asyncio.Task[None]] = {}  # The ends of places in closed cells.
        self._checked: tuple[Mapping[str, Model], object] | None = None
        self._subscribed = False
        own.inference.all_names = self.names
        own.inference.largest = self.largest
        own.inference.limits_of = lambda identity: self.home(identity).inference.customer_limits
        own.jobs.result.elsewhere = self._results_of
        self._connect(own)

    @property
    def all(self) -> list[PoolParts]:
        """All pools in all cells, the gateway's own first."""
        return [self._own, *(served.parts for served in self._others.values())]

    @property
    def named(self) -> list[PoolParts]:
        """The pools that a model names now, in every cell; the gateway's own if there are none. Others should be idle."""
        names = self._named()
        return [parts for parts in self.all if parts.config.pool in names] or [self._own]

    def serving(self, identity: Identity, model: str | UnsetType, cell: str = "") -> InferencePipeline | None:
        """The pipeline of a model's pool in `cell`, or the cell of a customer; None if there is none. UNSET: the gateway's own pool.

        Raises RequestError `no_capacity` if the catalog has just named that pool or cell: the client should retry.
        """
        pool = self._pool_of(model)
        if pool is None:
            return None
        cell = cell or self._homes.of(identity)
        if place_name(pool, cell) not in self._others and self._homes.residence(identity) is Residence.HERE:
            cell = DEFAULT_CELL  # It waits there until its cell is served, if that is not its home still.
        return self.in_cell(pool, cell)

    def in_cell(self, pool: str, cell: str) -> InferencePipeline | None:
        """The pipeline of a pool in a cell, as `serving` returns it."""
        if pool == self._own.config.pool and cell == DEFAULT_CELL:
            return self._own.inference
        found = self._others.get(place_name(pool, cell))
        if found is None and is_pool_name(pool) and (pool == self._own.config.pool or not self._only_own):
            raise RequestError(ErrorCode.NO_CAPACITY)
        return None if found is None else found.parts.inference

    @property
    def own_cells(self) -> list[PoolParts]:
        """The gateway's own pool in every cell."""
        return [parts for parts in self.all if parts.config.pool == self._own.config.pool]

    def home(self, identity: Identity) -> PoolParts:
        """The gateway's own pool in the best cell of a customer; in the default cell while that is not served."""
        found = self._others.get(place_name(self._own.config.pool, self._homes.best(identity)))
        return self._own if found is None else found.parts

    def _connect(self, parts: PoolParts) -> None:
        """Let requests that arrived at these parts be served by others."""
        pool, cell, inference = parts.config.pool, parts.config.cell, parts.inference
        inference.elsewhere = self.serving
        inference.single_cell = self._homes.is_single if cell == DEFAULT_CELL else _never
        inference.residence = self._homes.residence
        parts.handover.homes = self._homes
        parts.handover.others = partial(self._handovers, pool, cell)
        if parts.jobs.serving is not None:
            parts.jobs.serving.submit.elsewhere = self._jobs_of

    def _handovers(self, pool: str, cell: str) -> dict[str, Handover]:
        """Those of a pool in the other cells that are served."""
        cells = self._homes.urls(self._own.config.redis_url)
        return {
            parts.config.cell: parts.handover
            for parts in self.all
            if parts.config.pool == pool and parts.config.cell != cell and parts.config.cell in cells
        }

    def _jobs_of(self, pipeline: InferencePipeline) -> JobSubmitHandler | None:
        for parts in self.all:
            if parts.inference is pipeline and parts.jobs.serving is not None:
                return parts.jobs.serving.submit
        return None

    def _results_of(self, place: str) -> JobResultHandler | None:
        return self._others[place].parts.jobs.result if place in self._others else None

    def _pool_of(self, model: str | UnsetType) -> str | None:
        """The pool of a model; None if it is not served."""
        if model is UNSET:
            return self._own.config.pool
        snapshot = self._catalog.snapshot
        row = snapshot.models.get(model) if snapshot else None
        return row.pool if row is not None and row.enabled else None

    def names(self) -> frozenset[str]:
        """All models that requests can name."""
        snapshot = self._catalog.snapshot
        return frozenset[str]().union(*(parts.inference.models.names(snapshot) for parts in self.all))

    def largest(self) -> RequestLimits:
        """The limits of a request in the pool with the largest ones: a body is read before its pool is known."""
        return max(parts.limits.request for parts in self.all)

    def context_tokens(self, model: str) -> int:
        """The context length of a model; 0 if it is not known."""
        snapshot = self._catalog.snapshot
        pools = (parts for parts in self.all if model in parts.inference.models.names(snapshot))
        return max((parts.limits.request.context_tokens for parts in pools), default=0)

    def has_gpu(self, model: str) -> bool:
        """Whether the pool of a model has a healthy GPU in any cell, or lost its last one a moment ago."""
        snapshot, now = self._catalog.snapshot, time.monotonic()
        pools = [parts for parts in self.all if model in parts.inference.models.names(snapshot)]
        return any(not parts.limits.no_gpu(now) for parts in pools)

    @property
    def subscribed(self) -> bool:
        """Whether every pool of the catalog was subscribed once, in each cell whose Redis responds.

        A pool that is added later does not change it: without Redis, it would take all gateways out of service.
        """
        if not self._subscribed:
            cells = self._homes.urls(self._own.config.redis_url)
            pools = {self._own.config.pool} if self._only_own else self._named() | {self._own.config.pool}
            wanted = {place_name(pool, cell) for pool in pools for cell in cells}
            here = {parts.config.place for parts in self.all if parts.subscriber.was_subscribed}
            lost = (
                {parts.config.place for parts in self.all if parts.heartbeat.redis_problem} if len(cells) > 1 else set()
            )
            self._subscribed = bool(here) and wanted <= here | lost
        return self._subscribed

    def _named(self) -> set[str]:
        snapshot = self._catalog.snapshot
        return pools_of(snapshot.models.values()) if snapshot else set()

    async def run(self) -> None:
        """Serve pools and cells from when the catalog names them; leave closed cells. Never returns."""
        self._checked = None  # After a restart of this loop, a pool may have been missed.
        for check in itertools.count():
            snapshot, changed = self._catalog.snapshot, self._new()
            wanted = dict(changed)
            if not check % UNFINISHED_EVERY:
                wanted |= await self._unnamed()
            for place in sorted(set(wanted) - {parts.config.place for parts in self.all} - self._left.keys()):
                try:
                    await self._begin(*wanted[place])
                except Exception as error:  # noqa: BLE001 - the other cells are served
                    log_fault(f"{place} cannot be served", error)
                    self._checked = None  # It is attempted again.
            if changed and snapshot is not None:
                here = {parts.config.place for parts in self.all}
                self._homes.adopt(snapshot, {cell_of(changed[place][1]) for place in changed.keys() - here})
            await next_tick(CHECK_S)

    async def _unnamed(self) -> dict[str, tuple[str, str]]:
        """The pools with unfinished requests, in each cell."""
        if self._only_own:
            return {}
        own = self.own_cells
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
        urls = self._homes.urls(self._own.config.redis_url)
        for place, served in list(self._others.items()):
            if served.parts.config.cell not in urls:
                self._leave(place)
        own = self._own.config.pool
        pools = {own} if self._only_own else {own} | pools_to_serve(snapshot.models.values())
        return {place_name(pool, cell): (pool, url) for pool in pools for cell, url in urls.items()}

    async def _begin(self, pool: str, redis_url: str) -> None:
        parts = self._make(pool, await server_url(redis_url))
        place = parts.config.place
        self._connect(parts)
        log.info("serving pool", pool=place)
        parts.direct.open()
        await parts.heartbeat.heartbeat()
        run_forever = self._registry.run_forever
        tasks = [
            asyncio.create_task(run_forever(f"{place} {name}", loop), name=f"gateway {place} {name}")
            for name, loop in parts.loops().items()
        ]
        self._others[place] = ServedPlace(parts, tasks)

    def _leave(self, place: str) -> None:
        """End a place whose cell is closed. Requests that still wait in it get `no_capacity`."""
        log.info("pool no longer served", pool=place)
        if (jobs := self._others[place].parts.jobs.serving) is not None:
            jobs.submit.left = True
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


def _never() -> bool:
    return False


async def _end(served: ServedPlace) -> None:
    await served.parts.handover.turn()  # Requests whose customers have left the cell are submitted in the new one.
    await served.parts.sweep.end_all(ErrorCode.NO_CAPACITY)
    await end_all(served.tasks)
    await served.parts.close()
