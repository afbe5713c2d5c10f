"""The gateway's single subscription: replies on its channel resolve pending requests.

Pub/sub delivers replies quickly but not reliably: Redis drops a subscriber without notice, and a dead connection can
seem alive. So the reader pings once a second, with a timeout of half a second. After each new subscription, and once a
second for requests that are pending longer than that, the stored results are read. No message can end the loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
from redis.asyncio import Redis

from gateway.inference.pending import PendingRequest
from scheduler.errors import RedisUnavailable, TierlaneError
from scheduler.fault_log import LoggedFaults, log_fault
from scheduler.protocol.increments import INCREMENTS_MARK, Increment, decode_increments
from scheduler.protocol.replies import Reply, Results, decode_replies
from scheduler.redis_client.backoff import Backoff
from scheduler.redis_client.connections import pipelined, translated
from scheduler.redis_client.subscription import Subscription, subscribe
from scheduler.tasks import next_tick

log = structlog.get_logger("gateway")

PING_EVERY_S = 1.0
PONG_WITHIN_S = 0.5
LAST_READ_S = 0.02  # A last read after the timeout: if this process was suspended, the pong may be unread.
SUBSCRIBE_WITHIN_S = 0.5  # Without the distance.
CATCH_UP_EVERY_S = 1.0
OFTEN_S = 5.0  # Up to this age the result of a request is looked for each time,
SELDOM_S = 10.0  # later once in this time: thousands of long answers must not cost thousands of reads a second.
FETCH_SIZE = 256


class PendingReplies(Protocol):
    """The part of `PendingRequests` that the subscriber uses; the jobs of a gateway have another implementation."""

    def started_before(self, moment: float) -> Sequence[PendingRequest]: ...

    def resolve_all(self, replies: Iterable[Reply | None]) -> None: ...


class ResponseSubscriber:
    """Keeps one channel subscribed.

    `resubscribed` is called after a lost subscription was restored, `on_increments` with increments of streams.
    `clock`: monotonic seconds.
    """

    def __init__(
        self,
        client: Redis,
        channel: str,
        pending_requests: PendingReplies,
        results: Results,
        *,
        resubscribed: Callable[[], None] = lambda: None,
        on_increments: Callable[[Iterable[Increment]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._channel = channel
        self._pending_requests = pending_requests
        self._results = results
        self._resubscribed = resubscribed
        self._on_increments = on_increments
        self._clock = clock
        self.subscribed = asyncio.Event()  # Set while Redis has acknowledged the subscription and responds.
        self.was_subscribed = False
        self.malformed = 0
        self.reconnects = 0

    async def run(self) -> None:
        """Subscribe and read; subscribe again when the connection is lost; never returns."""
        backoff = Backoff()
        while True:
            try:
                await self._session()
            except RedisUnavailable as error:
                log.warning("subscription lost", channel=self._channel, reason=str(error))
            except Exception as error:  # noqa: BLE001  # no fault may end this loop
                log_fault("subscription failed", error, channel=self._channel)
            if self.subscribed.is_set():
                self.subscribed.clear()
                backoff.reset()
            self.reconnects += 1
            await backoff.sleep()

    async def catch_up_forever(self) -> None:
        """Read the stored results of requests that are pending for more than a second, at first each second; never returns."""
        before = self._clock()
        while True:
            await next_tick(CATCH_UP_EVERY_S)
            now = self._clock()
            waiting = self._pending_requests.started_before(now - CATCH_UP_EVERY_S)
            chosen = [each for each in waiting if is_looked_for(now - each.started, now - before)]
            before = now
            # Without Redis the next round or the deadline sweep reads the results.
            with LoggedFaults("reading stored results failed"), suppress(TierlaneError):
                await self._read_results(chosen)

    async def catch_up(self, started_before: float) -> None:
        """Read the stored results of requests that arrived before this time (monotonic). Raises RedisUnavailable."""
        await self._read_results(self._pending_requests.started_before(started_before))

    async def _read_results(self, waiting: Sequence[PendingRequest]) -> None:
        ids = [pending.id for pending in waiting if pending.verdict is not None]
        for start in range(0, len(ids), FETCH_SIZE):
            self._pending_requests.resolve_all(await self._results.fetch(ids[start : start + FETCH_SIZE]))

    async def _session(self) -> None:
        """Run one subscription, from SUBSCRIBE until it is lost. Raises RedisUnavailable then."""
        within_s = SUBSCRIBE_WITHIN_S + pipelined(self._client).distance.connect_s
        async with translated(), asyncio.timeout(within_s):
            take = lambda message: self.deliver(message)  # noqa: E731, PLW0108 - looked up for each message
            subscription = await subscribe(self._client, self._channel, take)
        try:
            restored, self.was_subscribed = self.was_subscribed, True
            self.subscribed.set()
            await self.catch_up(self._clock())
            if restored:
                self._resubscribed()
            async with translated():
                await _watch(subscription)
        finally:
            subscription.close()

    def deliver(self, message: bytes) -> None:
        """Resolve pending requests with the replies in `message`, or pass on its increments.

        A malformed message is counted and dropped.
        """
        try:
            if message.startswith(INCREMENTS_MARK):
                self._on_increments(decode_increments(message))
            else:
                self._pending_requests.resolve_all(decode_replies(message))
        except ValueError:
            self.malformed += 1


def is_looked_for(age_s: float, since_s: float) -> bool:
    """Whether the result of a request of this age is read, if the last look was `since_s` ago."""
    return age_s < OFTEN_S or age_s // SELDOM_S > (age_s - since_s) // SELDOM_S


async def _watch(subscription: Subscription) -> None:
    """Ping until the subscription ends. Raises what ended it."""
    while not subscription.over.done():
        await asyncio.wait((subscription.over,), timeout=PING_EVERY_S - PONG_WITHIN_S)
        subscription.ping()
        await asyncio.wait((subscription.over,), timeout=PONG_WITHIN_S)
        if not subscription.ponged:
            await asyncio.wait((subscription.over,), timeout=LAST_READ_S)
        if not subscription.ponged:
            raise RedisUnavailable(f"Redis did not respond to a ping within {PONG_WITHIN_S} s.")
    await subscription.over
