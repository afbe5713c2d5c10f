"""Cordoned workers: they finish what they run and claim nothing more, until they are uncordoned.

PostgreSQL holds who is cordoned, so that neither a restart of the worker nor the loss of Redis lifts it. Schedulers tell
Redis, which tells each worker in the answer to its heartbeat.
"""

import asyncio
import math
from collections.abc import Callable, Collection
from enum import IntEnum

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

LOOK_S = 0.1
"""Between two looks at the catalog, which cost nothing."""

AGAIN_S = 1.0
"""After so long Redis is told again, should it have been emptied."""

log = structlog.get_logger("scheduler")


class Standing(IntEnum):
    """What Redis says of a worker in the answer to its heartbeat (`worker_beat.lua`)."""

    FREE = 0
    CORDONED = 1
    UNKNOWN = 2
    """Nobody has told this Redis who is cordoned: it was emptied a moment ago. What was said before holds."""


class Cordons:
    """The cordon script on one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("cordon", client, keys)

    async def tell(self, workers: Collection[str]) -> int:
        """These are cordoned and no others; how many that changes."""
        return int(await self._script(msgspec.msgpack.encode(sorted(workers))))


class CordonKeeper:
    """Tells Redis when `wanted` gives another answer than before, and each second; None is for not knowing.

    `clock_s` is monotonic seconds.
    """

    def __init__(
        self, cordons: Cordons, wanted: Callable[[], frozenset[str] | None], clock_s: Callable[[], float]
    ) -> None:
        self._cordons = cordons
        self._wanted = wanted
        self._clock_s = clock_s
        self._told: frozenset[str] | None = None
        self._told_at = -math.inf

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                await self.look()
            except RedisUnavailable:
                pass  # It is told again soon.
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("telling of cordons failed", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look. Raises RedisUnavailable."""
        wanted, now = self._wanted(), self._clock_s()
        if wanted is None or (wanted == self._told and now - self._told_at < AGAIN_S):
            return
        changed = await self._cordons.tell(wanted)
        if changed:
            log.info("cordons_told", cordoned=len(wanted), changed=changed)
        self._told, self._told_at = wanted, now
