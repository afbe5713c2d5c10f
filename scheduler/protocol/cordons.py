"""Cordons of workers: a cordoned worker finishes its batches and claims no more.

The cordons are stored in PostgreSQL, so that a restart of the worker or a loss in Redis does not lift them. Schedulers copy
them to Redis, whose reply to a heartbeat contains the worker's.
"""

import math
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.errors import RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script
from scheduler.tasks import next_tick

CHECK_S = 0.1
"""Interval of checks of the catalog in memory."""

REWRITE_S = 1.0
"""Interval of writes to Redis, in case it lost its data."""

log = structlog.get_logger("scheduler")


def _cordon(packed_workers: bytes, tpot_ms: str) -> None: ...


class Cordons:
    """The script `cordon` of one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("cordon", _cordon, client, keys)

    async def write(self, workers: Collection[str], tpot_ms: float = 0.0) -> int:
        """Cordon exactly these workers, and store the objective for all of them. Returns the number of changed cordons."""
        return int(await self._script(msgspec.msgpack.encode(sorted(workers)), f"{tpot_ms:g}"))


class CordonSync:
    """Writes cordons and the objective `tpot_ms` to Redis when they change, and once a second.

    `wanted`: the cordons, None if not known. `clock_s`: monotonic seconds.
    """

    def __init__(
        self,
        cordons: Cordons,
        wanted: Callable[[], frozenset[str] | None],
        clock_s: Callable[[], float],
        tpot_ms: Callable[[], float] = float,
    ) -> None:
        self._cordons = cordons
        self._wanted = wanted
        self._clock_s = clock_s
        self._tpot_ms = tpot_ms
        self._written: tuple[frozenset[str], float] | None = None
        self._written_at = -math.inf

    async def run(self) -> None:
        """Write cordons; never returns."""
        while True:
            # Without Redis it is retried after REWRITE_S at the latest.
            with LoggedFaults("writing cordons failed"), suppress(RedisUnavailable):
                await self.sync()
            await next_tick(CHECK_S)

    async def sync(self) -> None:
        """Write the cordons if they changed or REWRITE_S has passed. Raises RedisUnavailable."""
        wanted, tpot_ms, now = self._wanted(), self._tpot_ms(), self._clock_s()
        if wanted is None or ((wanted, tpot_ms) == self._written and now - self._written_at < REWRITE_S):
            return
        changed = await self._cordons.write(wanted, tpot_ms)
        if changed:
            log.info("cordons_written", cordoned=len(wanted), changed=changed)
        self._written, self._written_at = (wanted, tpot_ms), now
