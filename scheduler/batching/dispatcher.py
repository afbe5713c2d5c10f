"""The dispatcher: sleeps on a wake token, asks the policy, forms batches. Two of them side by side are harmless.

The order in one turn: observe, decide, form, and decide again on what forming saw; then sleep until the window of a
part batch ends or a wake token comes: an admission, a claim or a finish that the dispatcher wished to be woken for, or
a worker whose status changed. The wish is kept in Redis from turn to turn; only a new one is sent. Service times are
looked up once a second from what the workers measured.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import structlog
from redis.asyncio import Redis
from uuid_utils import uuid7

from scheduler.batching.policy import BatchPolicy, Decision, PoolSnapshot, TierQueue, WakeCondition, plan
from scheduler.batching.timing import UNKNOWN, ArrivalRate, Service, pool_service
from scheduler.errors import RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.batches import Batches, Formed
from scheduler.protocol.pool_view import Queues
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import blocking_read
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Backoff

IDLE_LOOK_S = 1.0
"""The longest sleep without a look, should a wake token be lost with the scheduler that popped it."""

REFUSED_LOOK_S = 0.02
"""The pause after a batch was refused: another dispatcher was first, or the look-ahead was reached meanwhile."""

WAKE_HOLDS_MS = 2000
"""How long a wish to be woken stands; without one, every admission, claim and finish wakes."""

WISH_ALIKE = 0.25
"""A wish is left as it stands while the depth that is wanted now differs by no more: the rate of arrivals is never quite
the same, and the window holds all the same."""

log = structlog.get_logger("scheduler")


class Waker:
    """Turns wake tokens in Redis into an event here. The blocking read has a client of its own.

    It reads only while somebody sleeps: a token that comes while the dispatcher works is for what it is about to see, and
    the script that shows it takes the token away.
    """

    def __init__(self, blocking: Redis, keys: Keys, block_s: float = 1.0) -> None:
        self._client = blocking
        self._key = keys.wake
        self._block_s = block_s
        self._event = asyncio.Event()
        self._asleep = asyncio.Event()

    async def run(self) -> None:
        """Read tokens for ever; Redis being away makes it slower, never end."""
        backoff = Backoff()
        while True:
            await self._asleep.wait()
            try:
                token = await blocking_read(self._client, b"BLPOP", self._key, self._block_s, block_s=self._block_s)
                backoff.reset()
            except RedisUnavailable:
                await backoff.sleep()
                continue
            if token:
                failpoint("wake_popped")
                self._asleep.clear()
                self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return on the next token, at the latest after `timeout_s`."""
        self._asleep.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        finally:
            self._event.clear()


class Dispatcher:
    """Forms batches of one pool by the policy; `service` says what a batch takes there."""

    def __init__(
        self,
        batches: Batches,
        waker: Waker,
        policy: Callable[[], BatchPolicy],
        clock_s: Callable[[], float],
        service: Callable[[], Service] = lambda: UNKNOWN,
    ) -> None:
        self._id = uuid7().hex
        self._batches = batches
        self._waker = waker
        self._policy = policy
        self._clock_s = clock_s
        self._service = service
        self._arrivals = ArrivalRate()
        self._credit: Mapping[str, float] = {}
        self._depth_left = 0
        self._workers = 0
        self._ready_limit = 1
        self._told: tuple[WakeCondition, float] | None = None
        self._due_s = -math.inf
        self._looked_s = 0.0
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
        names = [tier.name for tier in sorted(policy.tiers, key=lambda tier: tier.priority)]
        queues = await self._begin(policy, names)
        while True:
            decisions = self._decide(queues, policy)
            decision = decisions[0]
            self._ready_limit = decision.ready_limit
            if decision.picks:
                before = queues.depth
                queues, formed = await self._form_all(decisions, policy, names)
                if not formed and queues.depth >= before:
                    return await self._refused(decision, names)
            elif self._stands(decision.wish):
                return IDLE_LOOK_S if decision.wait_ms is None else decision.wait_ms / 1000
            else:
                queues = await self._tell(decision.wish, names)

    async def _begin(self, policy: BatchPolicy, names: list[str]) -> Queues:
        """The first look. Most often we wake because so many wait as we wished for: then they leave in the same call."""
        if self._told is None or self._told[0].ready >= 0 or not self._told[0].depth:
            return await self._batches.look(names)
        everything = [(name, policy.max_batch_size) for name in names]
        return (await self._form(everything, policy, names, fewest=self._told[0].depth)).queues

    async def _form_all(
        self, decisions: Sequence[Decision], policy: BatchPolicy, names: list[str]
    ) -> tuple[Queues, int]:
        """All of them, sent in one go: what waits after the last, and how many requests are in batches now."""
        formed = await asyncio.gather(*(self._form(decision.picks, policy, names) for decision in decisions))
        self._credit = decisions[-1].credit
        self._due_s = self._looked_s - decisions[-1].since_ms / 1000
        return formed[-1].queues, sum(each.size for each in formed)

    async def _form(
        self, picks: Sequence[tuple[str, int]], policy: BatchPolicy, names: list[str], fewest: int = 0
    ) -> Formed:
        failpoint("form_undone")
        formed = await self._batches.form(
            uuid7().hex,
            picks,
            self._ready_limit,
            names,
            max_tokens=policy.max_batch_tokens,
            aged_ms=policy.ageing_ms,
            fewest=fewest,
        )
        if formed.size:
            failpoint("form_unnoted")
        self._depth_left -= formed.size + formed.dropped
        self.formed += formed.size
        return formed

    async def _refused(self, decision: Decision, names: list[str]) -> float:
        """More stand ready than we knew of: look again when a worker has taken one, or soon."""
        await self._tell(WakeCondition(0, decision.ready_limit - 1), names)
        return REFUSED_LOOK_S

    def _stands(self, wish: WakeCondition) -> bool:
        """Whether what we were told to be woken for last will do, and for long enough."""
        if self._told is None or self._clock_s() - self._told[1] > WAKE_HOLDS_MS / 2000:
            return False
        told = self._told[0]
        # To be woken once nothing runs any more, though nothing waits, is one wake-up too many, and cheaper than telling.
        alike = told.ready == wish.ready or (told.ready, wish.ready) == (-1, -2)
        return alike and abs(told.depth - wish.depth) <= WISH_ALIKE * min(told.depth, wish.depth)

    async def _tell(self, wish: WakeCondition, names: list[str]) -> Queues:
        """Ask to be woken for this; what has come meanwhile is in the reply, since nobody pushes a token for it now."""
        queues = await self._batches.look(names, self._id, wish, WAKE_HOLDS_MS)
        self._told = wish, self._clock_s()
        return queues

    def _decide(self, queues: Queues, policy: BatchPolicy) -> list[Decision]:
        self._looked_s = now_s = self._clock_s()
        self._arrivals.record(max(0, queues.depth - self._depth_left), now_s)
        self._depth_left = queues.depth
        if queues.healthy_gpus >= 0:  # Nobody counted yet in a Redis that came back empty; the next pass will.
            self._workers = queues.healthy_gpus
        snapshot = PoolSnapshot(
            tiers={tier.name: TierQueue(tier.depth, tier.oldest_ms) for tier in queues.tiers},
            ready_batches=queues.ready_batches,
            leased_batches=queues.leased_batches,
            workers=self._workers,
            arrivals_per_s=self._arrivals.per_second(now_s),
            service=self._service(),
            since_ms=(now_s - self._due_s) * 1000,
        )
        return plan(snapshot, policy, self._credit)


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
