"""The dispatcher: waits for a wake token, applies the batch policy, forms batches. Several may run at the same time.

One turn observes the queues, decides, forms batches, and decides again with the queues that forming returned. Then the
dispatcher sleeps until the window of a part batch ends, or until a wake token arrives: from an admission, claim or finish
that meets its wake condition, or from a worker that can run batches now, or no longer. The wake condition is stored in Redis
and sent only when it changes. Service times are read once a second from the heartbeats of the workers.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog
from redis.asyncio import Redis
from uuid_utils import uuid7

from ratelimit.request_limits import LANGUAGE_MODEL, limits_of_workers
from scheduler.batching.arrival_rate import ArrivalRate
from scheduler.batching.decision import Decision
from scheduler.batching.policy import plan
from scheduler.batching.service import UNKNOWN, Service, pool_service
from scheduler.batching.slot_policy import fill, kept_free
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy
from scheduler.batching.withdrawal import withdrawal
from scheduler.errors import RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.fault_log import LoggedFaults, log_fault
from scheduler.protocol.batches import Batches, Formed
from scheduler.protocol.pool_view import Queues, TierDepth, with_background
from scheduler.protocol.presence import Presence
from scheduler.protocol.wake_condition import FIRST_IDLE, FREE_SLOT, NEVER, NO_WORKER, WakeCondition
from scheduler.redis_client.backoff import Backoff
from scheduler.redis_client.connections import blocking_read
from scheduler.redis_client.keys import Keys
from scheduler.tasks import next_tick

MAX_SLEEP_S = 1.0
"""The longest sleep, in case a wake token was lost with the scheduler that popped it."""

REFUSED_PAUSE_S = 0.02
"""The pause after a batch was refused: another dispatcher was first, or the look-ahead was reached meanwhile."""

WAKE_VALID_MS = 2000
"""How long a wake condition is valid; without one, every admission, claim and finish pushes a wake token."""

SIMILAR_DEPTH = 0.25
"""The stored wake condition is kept while the depth of the new one differs by no more than this share, since the arrival
rate varies all the time and the window ends the sleep in any case."""

STANDBY_S = 0.1
"""How much later the timer of a dispatcher ends after another one formed the batch that both waited for: two timers for each
batch would cost twice the scripts. Also the longest sleep until a worker is idle. If the dispatcher that has the timer or the
token is killed, one part batch leaves later by this time."""

log = structlog.get_logger("scheduler")

PAUSE_S = 1.0


class Waker:
    """Waits for wake tokens in Redis. The blocking read has a client of its own.

    It reads only while the dispatcher sleeps: a token that arrives while the dispatcher works announces requests that its next
    read of the queues returns, and the script of that read deletes the token.
    """

    def __init__(self, blocking: Redis, keys: Keys, block_s: float = 1.0) -> None:
        self._client = blocking
        self._key = keys.wake
        self._block_s = block_s
        self._event = asyncio.Event()
        self._asleep = asyncio.Event()

    async def run(self) -> None:
        """Read tokens; never returns. While Redis is unavailable, it retries with backoff."""
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

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next token, at most `timeout_s`. Returns False after that."""
        self._asleep.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._event.wait()
        except TimeoutError:
            return False
        finally:
            self._event.clear()


class Dispatcher:
    """Forms batches of one pool by the policy. `service`: the duration of its batches; `slot_workers`: its workers with slots."""

    def __init__(
        self,
        batches: Batches,
        waker: Waker,
        policy: Callable[[], BatchPolicy],
        clock_s: Callable[[], float],
        service: Callable[[], Service] = lambda: UNKNOWN,
        *,
        slot_workers: Callable[[], Sequence[str]] = tuple,
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
        self._wake_condition: tuple[WakeCondition, float] | None = None
        self._due_s = -math.inf
        self._pace_ms = math.inf
        """All queued requests leave at the end of the present sleep if no batch was formed for this time, else a decision is needed."""
        self._has_timer = False
        self._stands_by = False
        self._observed_s = 0.0
        self._slot_workers = slot_workers
        self._withdrawals = 0
        self._withdrawn_s = -math.inf
        self._has_slots = False
        self._kept_free = 0
        self.formed = 0

    async def run(self) -> None:
        """Form batches; never returns."""
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
            if await self._waker.wait(wait_s):
                # No other dispatcher gets this token, so this one must form the batch.
                self._stands_by = False
                if self._has_timer:
                    self._pace_ms = math.inf

    async def turn(self) -> float:
        """Form all batches that should leave now. Returns the seconds until the next turn, unless woken."""
        policy = self._policy()
        names = with_background([tier.name for tier in policy.order])
        queues = await self._read_queues(policy, names)
        while True:
            decisions = self._decide(queues, policy)
            decision = decisions[0]
            self._ready_limit = decision.ready_limit
            if decision.picks:
                before = queues.depth
                formed = await asyncio.gather(*(self._form(each.picks, policy, names) for each in decisions))
                queues, self._credit = formed[-1].queues, decisions[-1].credit
                self._due_s = self._observed_s - decisions[-1].since_ms / 1000
                if queues.depth >= before and not any(each.size for each in formed):
                    # More batches are ready than were observed, or fewer slots are free: try again when that changes, or soon.
                    changed = WakeCondition(0, decision.ready_limit - 1)
                    await self._set_wake_condition(WakeCondition(1, FREE_SLOT) if self._has_slots else changed, names)
                    return REFUSED_PAUSE_S
            elif self._is_current(decision.condition):
                return await self._sleep_s(decision, queues, policy)
            else:
                queues = await self._set_wake_condition(decision.condition, names)

    async def _sleep_s(self, decision: Decision, queues: Queues, policy: BatchPolicy) -> float:
        """The seconds until the next turn, unless woken. Withdraws runs of lower tiers if the highest one would wait too long for
        a slot.
        """
        self._pace_ms, self._has_timer = decision.pace_ms, decision.wait_ms is not None
        if decision.wait_ms is None:
            sleep_s = STANDBY_S if decision.condition.ready == FIRST_IDLE else MAX_SLEEP_S
        else:
            sleep_s = decision.wait_ms / 1000 + (STANDBY_S if self._stands_by and decision.pace_ms < math.inf else 0.0)
        if queues.slots is None or queues.slots.free:
            return sleep_s
        now_s = self._clock_s()
        wanted = withdrawal(self._snapshot(queues, now_s), policy, (now_s - self._withdrawn_s) * 1000)
        if wanted is None:
            return sleep_s
        workers = self._slot_workers()
        if wanted.runs and workers:
            self._withdrawals += 1
            self._withdrawn_s = now_s
            # In turn: how many such runs each worker has is not known here.
            await self._batches.withdraw(workers[self._withdrawals % len(workers)], wanted.runs, wanted.queues)
        return min(sleep_s, wanted.wait_ms / 1000)

    async def _read_queues(self, policy: BatchPolicy, names: list[str]) -> Queues:
        """Read the queues. If a number of requests or a time was waited for, also form a batch in the same call if it is met."""
        pace_ms, self._pace_ms = self._pace_ms, math.inf
        stored = self._wake_condition[0] if self._wake_condition is not None else NEVER
        fewest = stored.depth if stored.ready in (FIRST_IDLE, NO_WORKER) else 0
        if not fewest and pace_ms == math.inf:
            return await self._batches.look(names)
        slept_ms = (self._clock_s() - self._observed_s) * 1000
        everything = [(tier.name, policy.max_batch_size) for tier in policy.order]
        formed = await self._form(everything, policy, names, fewest, pace_ms)
        if self._has_timer and pace_ms < math.inf:
            self._stands_by = not formed.size and 0 <= formed.queues.since_formed_ms < slept_ms
        return formed.queues

    async def _form(
        self,
        picks: Sequence[tuple[str, int]],
        policy: BatchPolicy,
        names: list[str],
        fewest: int = 0,
        pace_ms: float = math.inf,
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
            pace_ms=-1 if pace_ms == math.inf else max(0, math.floor(pace_ms) - 1),  # Redis rounds times down.
            kept_free=self._kept_free,
        )
        if formed.size:
            failpoint("form_unnoted")
        self._depth_left -= formed.size + formed.dropped
        self.formed += formed.size
        return formed

    def _is_current(self, condition: WakeCondition) -> bool:
        """Whether the stored wake condition is close enough to `condition`, and valid for long enough."""
        if self._wake_condition is None or self._clock_s() - self._wake_condition[1] > WAKE_VALID_MS / 2000:
            return False
        stored = self._wake_condition[0]
        # An unnecessary wake-up for the first idle worker costs less than sending a new condition.
        similar = stored.ready == condition.ready or (stored.ready, condition.ready) == (FIRST_IDLE, NO_WORKER)
        return similar and abs(stored.depth - condition.depth) <= SIMILAR_DEPTH * min(stored.depth, condition.depth)

    async def _set_wake_condition(self, condition: WakeCondition, names: list[str]) -> Queues:
        """Store the wake condition. Returns the queues: requests that arrived meanwhile push no token any more."""
        queues = await self._batches.look(names, self._id, condition, WAKE_VALID_MS)
        self._wake_condition = condition, self._clock_s()
        return queues

    def _snapshot(self, queues: Queues, now_s: float) -> PoolSnapshot:
        return PoolSnapshot(
            tiers=_by_tier(queues.interactive),
            background=_by_tier(queues.background),
            ready_batches=queues.ready_batches,
            leased_batches=queues.leased_batches,
            workers=self._workers,
            arrivals_per_s=self._arrivals.per_second(now_s),
            service=self._service(),
            since_ms=(now_s - self._due_s) * 1000,
            since_formed_ms=math.inf if queues.since_formed_ms < 0 else queues.since_formed_ms,
            quiet=queues.quiet,
            slots=queues.slots,
        )

    def _decide(self, queues: Queues, policy: BatchPolicy) -> list[Decision]:
        self._observed_s = now_s = self._clock_s()
        self._arrivals.record(max(0, queues.depth - self._depth_left), now_s)
        self._depth_left = queues.depth
        if queues.healthy_gpus >= 0:  # -1 if Redis lost the count; the next pass of a reaper restores it.
            self._workers = queues.healthy_gpus
        snapshot = self._snapshot(queues, now_s)
        self._has_slots = queues.slots is not None
        if queues.slots is None:
            return plan(snapshot, policy, self._credit)
        self._kept_free = kept_free(queues.slots, policy)
        return fill(snapshot, policy, self._credit)


def _by_tier(queues: Mapping[str, TierDepth]) -> dict[str, TierQueue]:
    return {name: TierQueue(queue.depth, queue.oldest_ms) for name, queue in queues.items()}


class ServiceWatch:
    """Keeps the last known service times, also while Redis is unavailable."""

    def __init__(self, presence: Presence, tiers: Callable[[], Sequence[str]]) -> None:
        self._presence = presence
        self._tiers = tiers
        self.service = UNKNOWN
        self.slot_workers: Sequence[str] = ()
        """The healthy workers with slots."""
        self.limits = LANGUAGE_MODEL
        """The limits of a request by the backend of the workers."""

    async def run(self) -> None:
        """Update once a second; never returns."""
        while True:
            await self.update()
            await next_tick(PAUSE_S)

    async def update(self) -> None:
        """Update once; keeps the known times if no worker has measured any."""
        with LoggedFaults("reading service times failed"), suppress(RedisUnavailable):
            observation = await self._presence.observe(self._tiers())
            self.service = pool_service(observation.workers, self.service)
            self.limits = limits_of_workers(observation.workers, self.limits)
            self.slot_workers = [each.id for each in observation.workers if each.healthy and each.slots]
