"""The pools that a scheduler serves: its own, each that a model names, and those that are left unfinished.

A pool whose model was renamed or deleted is served while something waits there. Every scheduler looks once a second and
keeps the set `pools` in Redis: what models name, and of the rest what is not finished. So one that starts later finds
it, and a pool that is finished and unnamed is forgotten.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress

from redis.asyncio import Redis

from ledger.catalog.follower import Catalog
from ledger.jobs import job_pools
from ledger.postgres import AWAY, closing, connect
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.pool_view import Unfinished
from scheduler.redis_client.connections import tag_at
from scheduler.redis_client.keys import DEFAULT_CELL, Keys, is_pool_name, pools_to_serve
from scheduler.tasks import next_tick
from tierlane.settings.model import Settings

LEFT_POOLS_LOOK_S = 1.0
JOBS_LOOK_S = 30.0
"""Between two looks at jobs, which wait in PostgreSQL and may be in no queue when Redis came back empty."""
STATEMENT_TIMEOUT_MS = 3000


class LeftPools:
    """The pools of the cell of `client`. `served`: those of this process. `names` are to be served beside those that models
    name.
    """

    def __init__(
        self,
        client: Redis,
        catalog: Catalog,
        database_url: str,
        served: Collection[str],
        *,
        cell: str = DEFAULT_CELL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unfinished = Unfinished(client)
        self._tag = tag_at(client)
        self._cell = cell
        self._catalog = catalog
        self._url = database_url
        self._served = served
        self._clock = clock
        self._with_jobs: frozenset[str] | None = None
        self._jobs_due = clock()
        self.names: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            # What was found last stands; nothing is served without Redis anyway.
            with LoggedFaults("looking for left pools failed"), suppress(RedisUnavailable):
                await self.turn()
            await next_tick(LEFT_POOLS_LOOK_S)

    async def turn(self) -> None:
        """Look once. Raises RedisUnavailable."""
        snapshot = self._catalog.snapshot
        if snapshot is None:
            return
        if self._clock() >= self._jobs_due:
            self._jobs_due = self._clock() + JOBS_LOOK_S
            with suppress(*AWAY):
                connection = await connect(
                    self._url,
                    name="tierlane-scheduler",
                    connect_timeout_s=STATEMENT_TIMEOUT_MS / 1000,
                    statement_timeout_ms=STATEMENT_TIMEOUT_MS,
                )
                async with closing(connection):
                    places = [place.partition("@") for place in await job_pools(connection)]
                here = {pool for pool, _, cell in places if (cell or DEFAULT_CELL) == self._cell}
                self._with_jobs = frozenset(filter(is_pool_name, here))
        known, named = await self._unfinished.pools(), pools_to_serve(snapshot.models.values())
        tiers = [tier.name for tier in snapshot.tiers]
        with_jobs = self._with_jobs or frozenset()
        left = (known | set(self._served)) - named - with_jobs
        if self._with_jobs is not None:  # Until PostgreSQL was read, its jobs are unknown: then no pool is removed.
            left = {pool for pool in left if not await self._unfinished.is_empty(Keys(pool, self._tag), tiers)}
        self.names = frozenset(left) | (with_jobs - named)
        kept = named | self.names
        await self._unfinished.note(kept, known - kept)


def wanted_pools(settings: Settings, catalog: Catalog) -> set[str]:
    """Its own, and each that a model names, even a disabled one: an outbox that is not emptied loses audit records."""
    if catalog.snapshot is None or settings.serve_pools != "all":
        return {settings.pool}
    return {settings.pool} | pools_to_serve(catalog.snapshot.models.values())
