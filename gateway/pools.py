"""The pools of one gateway: its own, and every other pool that a model names, from the time the catalog first does.

A request joins the queues of the pool of its model. A pool that no model names any more is served until the gateway ends;
also by new gateways as long as schedulers report unfinished requests in it, as for disabled models. Its accepted requests
and jobs must end.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog

from gateway.catalog import CatalogView, ModelRow
from gateway.inference.pipeline import InferencePipeline
from gateway.jobs.results import JobResultHandler
from gateway.jobs.submit import JobSubmitHandler
from gateway.pool import PoolParts
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.redis_client.keys import is_pool_name, pools_of, pools_to_serve
from scheduler.tasks import TaskRegistry, end_all

CHECK_S = 0.1
UNFINISHED_EVERY = 10  # Checks per read of the pools with unfinished requests from Redis.

log = structlog.get_logger("gateway")


class Pools:
    """All pools of a gateway. `make`: builds the parts of another pool. `unfinished`: the pools with unfinished requests; may
    raise RedisUnavailable. `only_own`: serve no others. `tasks`: runs their background tasks.
    """

    def __init__(
        self,
        catalog: CatalogView,
        own: PoolParts,
        make: Callable[[str], PoolParts],
        *,
        only_own: bool = False,
        unfinished: Callable[[], Awaitable[set[str]]] | None = None,
        tasks: TaskRegistry | None = None,
    ) -> None:
        self._catalog = catalog
        self._own = own
        self._make = make
        self._only_own = only_own
        self._unfinished = unfinished
        self._others: dict[str, PoolParts] = {}
        self._registry = tasks or TaskRegistry()
        self._tasks: list[asyncio.Task[None]] = []
        self._checked: Mapping[str, ModelRow] | None = None
        self._subscribed = False
        own.inference.elsewhere = self.serving
        own.inference.all_names = self.names
        own.jobs.result.elsewhere = self._results_of
        if own.jobs.serving is not None:
            own.jobs.serving.submit.elsewhere = self._jobs_of

    @property
    def all(self) -> list[PoolParts]:
        """All pools, the gateway's own first."""
        return [self._own, *self._others.values()]

    @property
    def named(self) -> list[PoolParts]:
        """The pools that a model names now; the gateway's own if there are none. The others are expected to be idle."""
        names = self._named()
        return [parts for parts in self.all if parts.config.pool in names] or [self._own]

    def serving(self, model: str) -> InferencePipeline | None:
        """The pipeline of a model of another pool; None if there is none. Raises RequestError `no_capacity` if the catalog has
        just named that pool: the model exists, and the client should retry.
        """
        parts = self._having(model)
        return None if parts is None else parts.inference

    def _jobs_of(self, model: str) -> JobSubmitHandler | None:
        parts = self._having(model)
        return parts.jobs.serving.submit if parts is not None and parts.jobs.serving is not None else None

    def _results_of(self, pool: str) -> JobResultHandler | None:
        return self._others[pool].jobs.result if pool in self._others else None

    def _having(self, model: str) -> PoolParts | None:
        snapshot = self._catalog.snapshot
        row = snapshot.models.get(model) if snapshot else None
        if row is None or not row.enabled:
            return None
        if row.pool not in self._others and self._is_coming(row.pool):
            raise RequestError(ErrorCode.NO_CAPACITY)
        return self._others.get(row.pool)

    def _is_coming(self, pool: str) -> bool:
        return not self._only_own and pool != self._own.config.pool and is_pool_name(pool)

    def names(self) -> frozenset[str]:
        """All models that requests can name."""
        snapshot = self._catalog.snapshot
        return frozenset[str]().union(*(parts.inference.models.names(snapshot) for parts in self.all))

    def has_gpu(self, model: str) -> bool:
        """Whether the pool of a model has a healthy GPU, or lost its last one a moment ago."""
        snapshot, now = self._catalog.snapshot, time.monotonic()
        pools = [parts for parts in self.all if model in parts.inference.models.names(snapshot)]
        return any(not parts.limits.no_gpu(now) for parts in pools)

    @property
    def subscribed(self) -> bool:
        """Whether every pool of the catalog was subscribed once.

        A pool that is added later does not change it: without Redis, it would take all gateways out of service.
        """
        if not self._subscribed:
            here = {parts.config.pool for parts in self.all if parts.subscriber.was_subscribed}
            self._subscribed = (
                {self._own.config.pool} if self._only_own else self._named() | {self._own.config.pool}
            ) <= here
        return self._subscribed

    def _named(self) -> set[str]:
        snapshot = self._catalog.snapshot
        return pools_of(snapshot.models.values()) if snapshot else set()

    async def run(self) -> None:
        """Start to serve pools when models name them; never returns."""
        self._checked = None  # After a restart of this loop, a pool may have been missed.
        for check in itertools.count():
            for pool in self._new() if check % UNFINISHED_EVERY else sorted({*self._new(), *await self._unnamed()}):
                await self._begin(pool)
            await asyncio.sleep(CHECK_S)

    async def _unnamed(self) -> set[str]:
        if self._only_own or self._unfinished is None:
            return set()
        try:
            return await self._unfinished() - {parts.config.pool for parts in self.all}
        except RedisUnavailable:
            return set()

    def _new(self) -> list[str]:
        snapshot = self._catalog.snapshot
        if self._only_own or snapshot is None or snapshot.models is self._checked:
            return []
        self._checked = snapshot.models
        return sorted(pools_to_serve(snapshot.models.values()) - {parts.config.pool for parts in self.all})

    async def _begin(self, pool: str) -> None:
        log.info("serving pool", pool=pool)
        parts = self._make(pool)
        parts.direct.open()
        await parts.heartbeat.heartbeat()
        self._others[pool] = parts
        for name, loop in parts.loops().items():
            run_forever = self._registry.run_forever(f"{pool} {name}", loop)
            self._tasks.append(asyncio.create_task(run_forever, name=f"gateway {pool} {name}"))

    async def close(self) -> None:
        """End the background tasks of the other pools, and close them."""
        await end_all(self._tasks)
        await asyncio.gather(*(parts.close() for parts in self._others.values()))
