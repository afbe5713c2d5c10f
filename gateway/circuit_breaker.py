"""The circuit breaker for Redis and for workers: opens when a dependency stops responding, closes when it responds.

    closed     calls are made; enough failures in a row, or half a second without a success, open it
    open       no calls, until a jittered time at which one probe is allowed
    half open  one probe is running: a success closes it, a failure or a lost probe opens it again

Callers report each call: `begun`, then `succeeded` or `failed`. A success closes the breaker in any state. The breaker
itself has no I/O and no clock. For Redis, admission and the heartbeat report their calls, and a probe while it is open.
"""

import asyncio
import math
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

MAX_TRIES = 4
"""The maximum number of attempts of one admission call."""
SUSPENDED_S = 0.2
"""A longer interval between two updates, which run every 25 ms, means that the process was suspended."""
LONG_SUSPENDED_S = 1.0
"""After a longer one, what was last observed is too old for a verdict."""


class BreakerState(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"  # Calls are made.
    OPEN = "open"  # No calls, since they would time out.
    HALF_OPEN = "half_open"  # One probe is running.


class Breaker:
    """The breaker of one dependency. Times are monotonic seconds. `silence_s`: None to count failures only."""

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
        self._trying_since: float | None = None  # Start of the first call after the last success.
        self._next_at = 0.0  # Open: when a probe is allowed. Half open: when the probe counts as lost.
        self.slack_s = 0.0  # Added to the times of silence and of a probe, for a dependency that is far away.
        self.state = BreakerState.CLOSED
        self.failures = 0  # In a row.
        self.opened = 0  # How often it opened, without failed probes.

    @property
    def well(self) -> bool:
        """Closed, and the last completed call was a success."""
        return self.state is BreakerState.CLOSED and self.failures == 0

    def begun(self, now: float) -> None:
        """A call is made."""
        if self._trying_since is None:
            self._trying_since = now

    def succeeded(self) -> None:
        """A call succeeded."""
        self._trying_since = None
        self.failures = 0
        self.state = BreakerState.CLOSED

    def failed(self, now: float) -> None:
        """A call failed or timed out."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open(now)
        else:
            self.update(now)

    def process_was_suspended(self, now: float) -> None:
        """The process was suspended: the time until now does not count as silence of the dependency."""
        if self._trying_since is not None:
            self._trying_since = now

    def update(self, now: float) -> BreakerState:
        """Update and return the state: elapsed time can open the breaker, or make a probe count as lost."""
        if self.state is BreakerState.CLOSED and (self.failures >= self._max_failures or self._silent(now)):
            self.opened += 1
            self._open(now)
        elif self.state is BreakerState.HALF_OPEN and now >= self._next_at:
            self._open(now)
        return self.state

    def may_probe(self, now: float) -> bool:
        """Whether the caller must make the probe now. True makes the breaker half open; the caller reports the result."""
        if self.update(now) is not BreakerState.OPEN or now < self._next_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._next_at = now + PROBE_TIMEOUT_S + self.slack_s
        return True

    def may_call(self, now: float) -> bool:
        """Whether a call may be made now, as a probe if the breaker is not closed."""
        return self.update(now) is BreakerState.CLOSED or self.may_probe(now)

    def _silent(self, now: float) -> bool:
        since = self._trying_since
        silence_s = self._silence_s
        return silence_s is not None and since is not None and now - since >= silence_s + self.slack_s

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        # Jittered, so that the gateways of a pool do not probe at the same time.
        self._next_at = now + self._draw(*PROBE_AFTER_S)


async def ping(client: Redis) -> None:
    """The probe. Raises RedisUnavailable, also if Redis contains data that this version cannot read."""
    async with bounded(client):
        await client.ping()
    try:
        await check_protocol(client)
    except StartError as error:
        raise RedisUnavailable(str(error)) from error


class RedisWatch:
    """Whether Redis is available. `ping` raises RedisUnavailable; `clock`: monotonic seconds.

    `slack_s`: how much longer a first call takes, because of the distance. `on_change` is called as soon as the breaker opens
    or closes.
    """

    def __init__(
        self,
        ping: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
        slack_s: Callable[[], float] = float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._ping = ping
        self._clock = clock
        self._slack_s = slack_s
        self._on_change = on_change
        self._probe: asyncio.Task[None] | None = None
        self._updated_at = clock()
        self._resumed_at = -math.inf
        self.breaker = Breaker()

    @property
    def answers(self) -> bool:
        """Whether calls may be made: the breaker is closed."""
        return self.breaker.state is BreakerState.CLOSED

    def begun(self) -> None:
        """A call is made."""
        self.breaker.begun(self._clock())

    def answered(self) -> None:
        """A call got a reply, of any kind."""
        was_away = not self.answers
        self.breaker.succeeded()
        if was_away:
            self._on_change()

    def failed(self) -> None:
        """A call got no reply."""
        now = self._clock()
        self._check_suspended(now)
        self.breaker.failed(now)
        if not self.answers:
            self._on_change()

    def try_again(self, tries: int) -> bool:
        """Whether to repeat an admission call that failed `tries` times; it is idempotent."""
        return self.answers and tries < MAX_TRIES

    def update(self, now: float) -> None:
        """Update the breaker, and start a probe when it is due. To be called many times a second."""
        self._check_suspended(now)
        self.breaker.slack_s = self._slack_s()
        if self.breaker.may_probe(now):
            self._probe = asyncio.get_running_loop().create_task(self._run_probe())

    def _check_suspended(self, now: float) -> None:
        """After a suspension of this process, its calls are overdue although Redis may have replied long ago."""
        if now - self._updated_at > SUSPENDED_S:
            self.breaker.process_was_suspended(now)
        if now - self._updated_at > LONG_SUSPENDED_S:
            self._resumed_at = now
        self._updated_at = now

    def resumed_at(self) -> float:
        """When this process last resumed from a long suspension; minus infinity if it never was suspended."""
        self._check_suspended(self._clock())
        return self._resumed_at

    async def _run_probe(self) -> None:
        try:
            await self._ping()
        except RedisUnavailable:
            self.failed()
        except Exception as error:  # noqa: BLE001  # any error counts as a failed probe
            log_fault("the probe of Redis failed", error)
            self.failed()
        else:
            self.answered()

    def close(self) -> None:
        """Cancel a running probe."""
        if self._probe is not None:
            self._probe.cancel()


class CallWatch(Protocol):
    """Receives the results of calls to Redis, and decides whether a failed one is repeated."""

    def begun(self) -> None: ...

    def answered(self) -> None: ...

    def failed(self) -> None: ...

    def try_again(self, tries: int) -> bool: ...


class OnceMore:
    """Ignores results; a call is tried twice."""

    def begun(self) -> None:
        """Not noted."""

    def answered(self) -> None:
        """Not noted."""

    def failed(self) -> None:
        """Not noted."""

    def try_again(self, tries: int) -> bool:
        """One repetition."""
        return tries < 2


ONCE_MORE = OnceMore()
