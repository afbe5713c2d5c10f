"""What a batch takes in this pool now: looked up once a second from what the workers measured."""

import asyncio
from collections.abc import Callable, Sequence

from scheduler.batching.timing import UNKNOWN, pool_service
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.presence import Presence

PAUSE_S = 1.0


class ServiceWatch:
    """Holds the last that was learnt; while Redis is away that stands."""

    def __init__(self, presence: Presence, tiers: Callable[[], Sequence[str]]) -> None:
        self._presence = presence
        self._tiers = tiers
        self.service = UNKNOWN

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(PAUSE_S)

    async def look(self) -> None:
        """Look once; a pool in which nobody has measured anything keeps what is known."""
        try:
            observation = await self._presence.observe(self._tiers())
            self.service = pool_service(observation.workers, self.service)
        except RedisUnavailable:
            return
        except Exception as error:  # noqa: BLE001 - no fault may end this loop
            log_fault("looking up service times failed", error)
