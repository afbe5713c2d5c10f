"""Redis's breaker: fed by admission and the heartbeat, which call it all the time, and by a probe while it is open."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from gateway.circuit_breaker import Breaker, BreakerState
from scheduler.errors import RedisUnavailable, StartError
from scheduler.fault_log import log_fault
from scheduler.redis_client.connections import bounded, check_protocol

MAX_TRIES = 4
"""Sending one admission call more often helps nobody, whatever the breaker says."""
STANDSTILL_S = 0.2
"""Between two looks, which are made every 25 ms."""


async def ping(client: Redis) -> None:
    """The probe. Raises RedisUnavailable, also where Redis holds what this version cannot read."""
    async with bounded():
        await client.ping()
    try:
        await check_protocol(client)
    except StartError as error:
        raise RedisUnavailable(str(error)) from error


class RedisWatch:
    """Whether Redis answers. `ping` raises RedisUnavailable; `clock` is monotonic seconds."""

    def __init__(self, ping: Callable[[], Awaitable[object]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ping = ping
        self._clock = clock
        self._probe: asyncio.Task[None] | None = None
        self._looked_at = clock()
        self.breaker = Breaker()
        self.on_change: Callable[[], None] = lambda: None
        """Called as soon as it opens or closes, so that nobody waits for the next look."""

    @property
    def answers(self) -> bool:
        """Whether calls are worth making."""
        return self.breaker.state is BreakerState.CLOSED

    def begun(self) -> None:
        """A call is made."""
        self.breaker.begun(self._clock())

    def answered(self) -> None:
        """It was answered, whatever the answer."""
        was_away = not self.answers
        self.breaker.succeeded()
        if was_away:
            self.on_change()

    def failed(self) -> None:
        """It was not answered."""
        now = self._clock()
        self._excuse(now)
        self.breaker.failed(now)
        if not self.answers:
            self.on_change()

    def try_again(self, tries: int) -> bool:
        """Whether an admission call that failed so often is sent once more, which its idempotency allows."""
        return self.answers and tries < MAX_TRIES

    def look(self, now: float) -> None:
        """Let time do its part, and send a probe when it is due; to be called many times a second."""
        self._excuse(now)
        if self.breaker.may_probe(now):
            self._probe = asyncio.get_running_loop().create_task(self._knock())

    def _excuse(self, now: float) -> None:
        """A process that stood still finds its calls overdue, though Redis may have answered them long ago."""
        if now - self._looked_at > STANDSTILL_S:
            self.breaker.stood_still(now)
        self._looked_at = now

    async def _knock(self) -> None:
        try:
            await self._ping()
        except RedisUnavailable:
            self.failed()
        except Exception as error:  # noqa: BLE001  # an answer of any kind would have been one
            log_fault("the probe of Redis failed", error)
            self.failed()
        else:
            self.answered()

    def close(self) -> None:
        """Drop the probe that is under way."""
        if self._probe is not None:
            self._probe.cancel()
