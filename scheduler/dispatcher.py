"""The dispatcher: sleeps on a wake token, asks the policy, forms batches. Two of them side by side are harmless.

The order of things in one turn: look, decide, form, and decide again on what forming saw; then sleep until somebody
pushes a wake token (an admission, a claim, a finish, a worker whose status changed) or the window of a part batch ends.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog
from redis.asyncio import Redis
from uuid_utils import uuid7

from scheduler.arrivals import ArrivalRate
from scheduler.backoff import Backoff
from scheduler.batch_policy import BatchPolicy, Decision, Snapshot, Waiting, decide
from scheduler.batches import Batches
from scheduler.connections import bounded
from scheduler.errors import RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.keys import Keys
from scheduler.observation import Queues

IDLE_LOOK_S = 1.0
"""The longest sleep without a look, should a wake token be lost with the scheduler that popped it."""

REFUSED_LOOK_S = 0.02
"""The pause after a batch was refused: another dispatcher was first, or the look-ahead was reached meanwhile."""

WAKE_HOLDS_MS = 2000
"""How long a wish to be woken stands; without one, every admission wakes."""

log = structlog.get_logger("scheduler")


class Waker:
    """Turns wake tokens in Redis into an event here. The blocking read has a client of its own."""

    def __init__(self, blocking: Redis, keys: Keys, block_s: float = 1.0) -> None:
        self._client = blocking
        self._key = keys.wake
        self._block_s = block_s
        self._event = asyncio.Event()

    async def run(self) -> None:
        """Read tokens for ever; Redis being away makes it slower, never end."""
        backoff = Backoff()
        while True:
            try:
                async with bounded(self._block_s + 1.0):
                    token = await self._client.blpop([self._key], timeout=self._block_s)
                backoff.reset()
            except RedisUnavailable:
                await backoff.sleep()
                continue
            if token:
                failpoint("wake_popped")
                self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return on the next token, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        finally:
            self._event.clear()


class Dispatcher:
    """Forms batches of one pool by the policy."""

    def __init__(
        self, batches: Batches, waker: Waker, policy: Callable[[], BatchPolicy], clock_s: Callable[[], float]
    ) -> None:
        self._id = uuid7().hex
        self._batches = batches
        self._waker = waker
        self._policy = policy
        self._clock_s = clock_s
        self._arrivals = ArrivalRate()
        self._credit: Mapping[str, float] = {}
        self._depth_left = 0
        self.formed = 0

    async def run(self) -> None:
        """Turn for ever."""
        backoff = Backoff()
        while True:
            try:
                wait_s = await self.turn()
                backoff.reset()
            except RedisUnavailable as error:
                log.warning("redis_away", error=str(error))
                await backoff.sleep()
                continue
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("forming batches failed", error)
                await backoff.sleep()
                continue
            await self._waker.wait(wait_s)

    async def turn(self) -> float:
        """Form every batch that should leave now; returns after how many seconds to look again, unless woken."""
        policy = self._policy()
        names = [tier.name for tier in policy.tiers]
        queues = await self._batches.look(names)
        while True:
            decision = self._decide(queues, policy)
            if not decision.picks:
                return await self._sleep(decision, names)
            before = queues.depth
            failpoint("form_undone")
            formed = await self._batches.form(uuid7().hex, decision.picks, decision.ready_limit, names)
            failpoint("form_unnoted")
            self._credit, queues = decision.credit, formed.queues
            self._depth_left = queues.depth
            self.formed += formed.size
            if not formed.size and queues.depth >= before:
                return REFUSED_LOOK_S

    async def _sleep(self, decision: Decision, tiers: list[str]) -> float:
        """Say what is worth waking for; 0 where it has come already, since nobody would push a token for it now."""
        depth = await self._batches.sleep(self._id, decision.wake_depth, WAKE_HOLDS_MS, tiers)
        if decision.wake_depth and depth >= decision.wake_depth:
            return 0.0
        return IDLE_LOOK_S if decision.wait_ms is None else decision.wait_ms / 1000

    def _decide(self, queues: Queues, policy: BatchPolicy) -> Decision:
        now_s = self._clock_s()
        self._arrivals.record(max(0, queues.depth - self._depth_left), now_s)
        self._depth_left = queues.depth
        snapshot = Snapshot(
            tiers={tier.name: Waiting(tier.depth, tier.oldest_ms) for tier in queues.tiers},
            ready_batches=queues.ready_batches,
            leased_batches=queues.leased_batches,
            workers=max(0, queues.healthy_gpus),
            arrivals_per_s=self._arrivals.per_second(now_s),
        )
        return decide(snapshot, policy, self._credit)
