"""The reaper: each pass reaps expired leases, ends overdue requests, and counts healthy GPUs; some passes repair indexes.

Every step is one script on Redis TIME, so any number of reapers may run. A failed step does not skip the others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from scheduler.errors import RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.index_repair import IndexRepair
from scheduler.protocol.presence import Presence
from scheduler.tasks import next_tick

log = structlog.get_logger("scheduler")


REPAIR_EVERY_S = 0.5
NOTICE_S = 60.0
"""How long health reports a repair."""

EMPTY_PASS_S = 0.3
"""The interval of passes over a pool without workers: no batch can be lost there."""


class Reaper:
    """The reaper of one pool, every `pass_ms`. Without `repair`, no index is repaired.

    `notices`: problems of this process for health, in sentences. `standing_in`: it runs in a gateway, without schedulers.
    """

    def __init__(
        self,
        terminations: Terminations,
        presence: Presence,
        tiers: Callable[[], Sequence[str]],
        min_left_ms: Callable[[], int],
        pass_ms: int,
        *,
        standing_in: bool = False,
        notices: Callable[[], Sequence[str]] = tuple,
        repair: IndexRepair | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminations = terminations
        self._presence = presence
        self._tiers = tiers
        self._min_left_ms = min_left_ms
        self._pass_s = pass_ms / 1000
        self._standing_in = standing_in
        self._notices = notices
        self._index_repair = repair
        self._clock = clock
        self._repair_due = 0.0
        self._repaired: dict[str, float] = {}  # Sentences, and until when they are reported.
        self.healthy = 0
        self._known = 0
        self._damaged = 0

    async def run(self) -> None:
        """Run passes; never returns."""
        while True:
            await self.run_once()
            await next_tick(self._pass_s if self._known else max(self._pass_s, EMPTY_PASS_S))

    async def run_once(self) -> None:
        """Run one pass. The repair comes first, because the count reports its notices; the other calls are sent at once."""
        await self._guarded(self._repair)
        await asyncio.gather(*map(self._guarded, (self._reap, self._expire, self._count)))

    async def _guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        with LoggedFaults("a step of the reaper failed"):
            try:
                await step()
            except RedisUnavailable as error:
                log.warning("redis_away", error=str(error))

    async def _repair(self) -> None:
        now = self._clock()
        if self._index_repair is None or now < self._repair_due:
            return
        self._repair_due = now + REPAIR_EVERY_S
        for sentence in await self._index_repair.repair(self._tiers()):
            self._repaired[sentence] = now + NOTICE_S

    async def _reap(self) -> None:
        reaped = await self._terminations.reap(
            self._min_left_ms(), round(self._pass_s * 1000), standing_in=self._standing_in
        )
        if reaped.pushed_again or reaped.retried or reaped.unknown:
            failpoint("reaped")
            log.warning("reaped", pushed_again=reaped.pushed_again, retried=reaped.retried, unknown=reaped.unknown)

    async def _expire(self) -> None:
        ended, _ = await self._terminations.expire(self._tiers())
        if self._terminations.damaged > self._damaged:
            log.error("damaged_rows", noted=self._terminations.damaged, key="damaged")
        self._damaged = self._terminations.damaged
        if ended:
            log.info("expired", ended=ended)

    async def _count(self) -> None:
        now = self._clock()
        self._repaired = {sentence: until for sentence, until in self._repaired.items() if until > now}
        healthy, known = await self._presence.census([*self._notices(), *self._repaired])
        if healthy != self.healthy:
            log.info("healthy_gpus", healthy=healthy, known=known)
        self.healthy, self._known = healthy, known
