"""Which pools a scheduler must serve though no model names them: their row was renamed or deleted, and something waits there.

Every scheduler looks once a second and keeps the set `pools` in Redis: what models name, and of the rest what is not
finished. So one that starts later finds it, and a pool that is finished and unnamed is forgotten.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from redis.asyncio import Redis

from ledger.catalog.follower import Catalog
from ledger.jobs import job_pools
from ledger.postgres import AWAY, closing, connect
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.redis_client.keys import Keys, is_pool_name, pools_to_serve
from scheduler.unfinished import Unfinished

LOOK_S = 1.0
JOBS_LOOK_S = 30.0
"""Between two looks at jobs, which wait in PostgreSQL and may be in no queue when Redis came back empty."""
STATEMENT_TIMEOUT_MS = 3000


class LeftPools:
    """`served`: the pools of this process. `names` are to be served beside those that models name."""

    def __init__(
        self,
        client: Redis,
        catalog: Catalog,
        database_url: str,
        served: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unfinished = Unfinished(client)
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
            try:
                await self.turn()
            except RedisUnavailable:
                pass  # What was found last stands; nothing is served without Redis anyway.
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("looking for left pools failed", error)
            await asyncio.sleep(LOOK_S)

    async def turn(self) -> None:
        """Look once. Raises RedisUnavailable."""
        snapshot = self._catalog.snapshot
        if snapshot is None:
            return
        await self._look_at_jobs()
        known, named = await self._unfinished.pools(), pools_to_serve(snapshot.models.values())
        tiers = [tier.name for tier in snapshot.tiers]
        with_jobs = self._with_jobs or frozenset()
        left = {
            pool for pool in (known | set(self._served)) - named - with_jobs if not await self._is_over(pool, tiers)
        }
        self.names = frozenset(left) | (with_jobs - named)
        kept = named | self.names
        await self._unfinished.note(kept, known - kept)

    async def _is_over(self, pool: str, tiers: Collection[str]) -> bool:
        # Before PostgreSQL was asked nobody knows of its jobs: then no pool is forgotten.
        return self._with_jobs is not None and await self._unfinished.is_empty(Keys(pool), tiers)

    async def _look_at_jobs(self) -> None:
        if self._clock() < self._jobs_due:
            return
        self._jobs_due = self._clock() + JOBS_LOOK_S
        try:
            connection = await connect(
                self._url,
                name="tierlane-scheduler",
                connect_timeout_s=STATEMENT_TIMEOUT_MS / 1000,
                statement_timeout_ms=STATEMENT_TIMEOUT_MS,
            )
            async with closing(connection):
                self._with_jobs = frozenset(filter(is_pool_name, await job_pools(connection)))
        except AWAY:
            return
