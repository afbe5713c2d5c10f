"""The pools that a gateway serves now, each in every cell, and which of them serves a call.

A request joins the queues of the pool of its model, in the cell of its customer. gateway/pool_lifecycle.py adds and removes
pools as the catalog changes.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from gateway.cells import Homes
from gateway.config import GatewayConfig
from gateway.served_models import model_not_found, model_required
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from ratelimit.request_limits import RequestLimits
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Residence
from scheduler.redis_client.keys import DEFAULT_CELL, is_pool_name, place_name, pools_of

if TYPE_CHECKING:
    from gateway.inference.pipeline import InferencePipeline
    from gateway.jobs.service import Jobs
    from gateway.limits.customer_limits import CustomerLimits
    from gateway.limits.handover import Handover
    from gateway.pool import PoolParts


class Pools:
    """The pools of one gateway. `homes`: the cells of customers. The first one that is added is the gateway's own."""

    def __init__(self, catalog: Catalog, homes: Homes, config: GatewayConfig) -> None:
        self.homes = homes
        self._catalog = catalog
        self.config = config
        self._own_place = config.place
        self._served: dict[str, PoolParts] = {}  # By place.
        self._subscribed = False

    def add(self, parts: "PoolParts") -> None:
        """Serve a pool in a cell from now on."""
        self._served[parts.config.place] = parts

    def remove(self, place: str) -> None:
        """Serve it no more."""
        del self._served[place]

    @property
    def own(self) -> "PoolParts":
        """The gateway's own pool in the default cell."""
        return self._served[self._own_place]

    @property
    def all(self) -> "list[PoolParts]":
        """All pools in all cells, the gateway's own first."""
        return list(self._served.values())

    @property
    def own_cells(self) -> "list[PoolParts]":
        """The gateway's own pool in every cell."""
        return [parts for parts in self.all if parts.config.pool == self.config.pool]

    @property
    def named(self) -> "list[PoolParts]":
        """The pools that a model names now, in every cell; the gateway's own if there are none. Others should be idle."""
        names = self.model_pools()
        return [parts for parts in self.all if parts.config.pool in names] or [self.own]

    def model_pools(self) -> set[str]:
        """The pools that models name."""
        snapshot = self._catalog.snapshot
        return pools_of(snapshot.models.values()) if snapshot else set()

    def place(self, identity: Identity, model: str | UnsetType, cell: str = "") -> "InferencePipeline":
        """The pipeline of a model's pool in `cell`, or the cell of a customer. UNSET: the gateway's own pool.

        It is that of the gateway's own pool for a model that no pool serves, which rejects it. Raises RequestError
        `no_capacity` if the catalog has just named that pool or cell: the client should retry.
        """
        own = self.own.inference
        is_here = model is UNSET or model in own.models.names(self._catalog.snapshot)
        if is_here and not cell and self.homes.is_single():
            return own
        pool = self._pool_of(model)
        if pool is None:
            return own
        cell = cell or self.homes.of(identity)
        if place_name(pool, cell) not in self._served and self.homes.residence(identity) is Residence.HERE:
            cell = DEFAULT_CELL  # It waits there until its cell is served, if that is not its home still.
        return self.in_cell(pool, cell) or own

    def permitted(self, identity: Identity, model: str | UnsetType, param: str) -> str | UnsetType:
        """The model that a caller may use: the named one; without a name the default one (UNSET), or the first of its own.

        Raises RequestError `model_not_found` with `param` for any other.
        """
        allowed = identity.models
        if allowed is None or model in allowed:
            return model
        names = self.names()
        if model is not UNSET:
            raise model_not_found(param, names, allowed)
        if self.own.inference.models.unnamed(self._catalog.snapshot) in allowed:
            return UNSET
        for name in allowed:
            if name in names:
                return name
        raise model_required(param, names, allowed)

    def in_cell(self, pool: str, cell: str) -> "InferencePipeline | None":
        """The pipeline of a pool in a cell; None if no pool has this name. Raises RequestError as `place`."""
        if pool == self.config.pool and cell == DEFAULT_CELL:
            return self.own.inference
        found = self._served.get(place_name(pool, cell))
        if found is None and is_pool_name(pool) and (pool == self.config.pool or not self.config.only_own):
            raise RequestError(ErrorCode.NO_CAPACITY)
        return None if found is None else found.inference

    def home(self, identity: Identity) -> "PoolParts":
        """The gateway's own pool in the best cell of a customer; in the default cell while that is not served."""
        return self._served.get(place_name(self.config.pool, self.homes.best(identity)), self.own)

    def limits_of(self, identity: Identity) -> "CustomerLimits":
        """The limits of a customer in its cell."""
        return self.home(identity).inference.customer_limits

    def jobs_of(self, place: str) -> "Jobs":
        """The jobs of a place; those of the gateway's own pool for one that is not served."""
        return self._served.get(place, self.own).jobs

    def handovers(self, pool: str, cell: str) -> "Mapping[str, Handover]":
        """Those of a pool in the other cells that are served, by cell."""
        cells = self.homes.urls(self.config.redis_url)
        return {
            parts.config.cell: parts.handover
            for parts in self.all
            if parts.config.pool == pool and parts.config.cell != cell and parts.config.cell in cells
        }

    def _pool_of(self, model: str | UnsetType) -> str | None:
        """The pool of a model; None if it is not served."""
        if model is UNSET:
            return self.config.pool
        snapshot = self._catalog.snapshot
        row = snapshot.models.get(model) if snapshot else None
        return row.pool if row is not None and row.enabled else None

    def names(self) -> frozenset[str]:
        """All models that requests can name."""
        snapshot = self._catalog.snapshot
        return frozenset[str]().union(*(parts.inference.models.names(snapshot) for parts in self.all))

    def largest(self) -> RequestLimits:
        """The limits of a request in the pool with the largest ones: a body is read before its pool is known."""
        if len(self._served) == 1:
            return self._served[self._own_place].limits.request
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
            cells = self.homes.urls(self.config.redis_url)
            pools = {self.config.pool} if self.config.only_own else self.model_pools() | {self.config.pool}
            wanted = {place_name(pool, cell) for pool in pools for cell in cells}
            here = {parts.config.place for parts in self.all if parts.subscriber.was_subscribed}
            lost = (
                {parts.config.place for parts in self.all if parts.heartbeat.redis_problem} if len(cells) > 1 else set()
            )
            self._subscribed = bool(here) and wanted <= here | lost
        return self._subscribed

    @property
    def redis_problem(self) -> str | None:
        """Why the last heartbeat to a Redis failed, without addresses; None if none failed."""
        problems = (parts.heartbeat.redis_problem for parts in self.all)
        return next((problem.partition(": ")[0] for problem in problems if problem), None)
