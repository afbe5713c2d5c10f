"""The circuit breaker for Redis and for workers: opens when a dependency stops responding, closes when it responds.

    closed     calls are made; enough failures in a row, or half a second of trying without a success, open it
    open       no calls, until a jittered moment at which one probe is let through
    half open  one probe is under way; a success closes, a failure opens again; a lost probe is a failure

Every caller reports each call: `begun`, then `succeeded` or `failed`. A success closes the breaker from any state. The
breaker itself has no I/O and no clock. The breaker of Redis is fed by admission and the heartbeat, and by a probe while
it is open.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Protocol

from redis.asyncio import Redis

from scheduler.errors import RedisUnavailable, StartError
from scheduler.fault_log import log_fault
from scheduler.redis_client.connections import bounded, check_protocol

MAX_FAILURES = 3
SILENCE_S = 0.5
PROBE_AFTER_S = (0.1, 0.4)
PROBE_TIMEOUT_S = 0.5


class BreakerState(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"  # Calls are made.
    OPEN = "open"  # No calls: they would only wait to fail.
    HALF_OPEN = "half_open"  # One probe is under way.


class Breaker:
    """One dependency's breaker. Times are monotonic seconds; `silence_s` of None leaves only the count of failures."""

    def __init__(
        self,
        *,
        max_failures: int = MAX_FAILURES,
        silence_s: float | None = SILENCE_S,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._max_failures = max_failures
        self._silence_s = silence_s
        self._draw = draw
        self._trying_since: float | None = None  # When the first call after the last success was begun.
        self._next_at = 0.0  # Open: when a probe may go. Half open: when the probe counts as lost.
        self.state = BreakerState.CLOSED
        self.failures = 0  # In a row.
        self.opened = 0  # How often it opened, probes aside.

    @property
    def well(self) -> bool:
        """Closed, and the last call that ended was a success."""
        return self.state is BreakerState.CLOSED and self.failures == 0

    def begun(self, now: float) -> None:
        """A call is made."""
        if self._trying_since is None:
            self._trying_since = now

    def succeeded(self) -> None:
        """A call was answered."""
        self._trying_since = None
        self.failures = 0
        self.state = BreakerState.CLOSED

    def failed(self, now: float) -> None:
        """A call was not answered, or not in time."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open(now)
        else:
            self.look(now)

    def stood_still(self, now: float) -> None:
        """Our own process did not run for a while: the silence until now says nothing of the dependency."""
        if self._trying_since is not None:
            self._trying_since = now

    def look(self, now: float) -> BreakerState:
        """Where it stands now: time alone can open it, and can end a probe that nobody reports on."""
        if self.state is BreakerState.CLOSED and (self.failures >= self._max_failures or self._silent(now)):
            self.opened += 1
            self._open(now)
        elif self.state is BreakerState.HALF_OPEN and now >= self._next_at:
            self._open(now)
        return self.state

    def may_probe(self, now: float) -> bool:
        """Whether the caller is to make the one probe now; True makes it half open, and the caller reports the end."""
        if self.look(now) is not BreakerState.OPEN or now < self._next_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._next_at = now + PROBE_TIMEOUT_S
        return True

    def may_call(self, now: float) -> bool:
        """Whether a call may be made now, as a probe where it is not closed."""
        return self.look(now) is BreakerState.CLOSED or self.may_probe(now)

    def _silent(self, now: float) -> bool:
        since = self._trying_since
        return self._silence_s is not None and since is not None and now - since >= self._silence_s

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        # Jittered, so that the gateways of a pool do not all knock at the same moment.
        self._next_at = now + self._draw(*PROBE_AFTER_S)


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


class CallWatch(Protocol):
    """Who is told how calls on Redis go, and says whether one that failed is worth sending again."""

    def begun(self) -> None: ...

    def answered(self) -> None: ...

    def failed(self) -> None: ...

    def try_again(self, tries: int) -> bool: ...


class OnceMore:
    """Nobody listens; a call is tried twice."""

    def begun(self) -> None:
        """Not noted."""

    def answered(self) -> None:
        """Not noted."""

    def failed(self) -> None:
        """Not noted."""

    def try_again(self, tries: int) -> bool:
        """Once."""
        return tries < 2


ONCE_MORE = OnceMore()
