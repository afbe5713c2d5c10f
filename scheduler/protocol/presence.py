"""Heartbeats of workers and gateways, the census of healthy GPUs, observations of a pool, and cordons.

A worker's heartbeat can be sent without waiting: one write, no task, no future, no timer, and its reply is read when it
comes. Idle workers do little else, so an unchanged one only says so.

Cordoned workers finish what they run and claim nothing more. PostgreSQL holds who is cordoned, so that neither a
restart of the worker nor the loss of Redis lifts it. Schedulers tell Redis, which tells each worker in the reply to its
heartbeat.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.batches import GATEWAY_GONE_MS
from scheduler.protocol.limits import KEEP_MS as KEEP_REFUSALS_MS
from scheduler.protocol.limits import KEPT_A_GATEWAY, MAX_A_BEAT, RejectionRecord
from scheduler.protocol.pool_view import GatewayStats, Observation, Queues, WorkerReport, WorkerView
from scheduler.redis_client.connections import bounded, line_of
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Argument
from scheduler.redis_client.scripts import Script, inner

LOOK_S = 0.1
"""Between two looks at the catalog, which cost nothing."""

AGAIN_S = 1.0
"""After so long Redis is told again, should it have been emptied."""

log = structlog.get_logger("scheduler")


class CordonStatus(IntEnum):
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


class CordonSync:
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


WHOLE_EVERY_S = 10.0
"""After so long all is said again: a worker's row gets a new TTL with that only."""

_KEEP_MS = 310_000  # Five minutes from the last beat, which may be ten seconds younger than the last whole one.
_UNKNOWN = -1

_encode = msgspec.msgpack.Encoder().encode


def beat_words(heartbeat: WorkerReport) -> tuple[Argument, ...]:
    """What the script `worker_beat` is told of a worker."""
    return (
        heartbeat.id,
        heartbeat.status,
        round(heartbeat.utilization, 4),
        heartbeat.in_flight,
        _encode(heartbeat),
        _KEEP_MS,
    )


class _HeartbeatReply:
    """The answer to one pulse, in a future's place on the line."""

    __slots__ = ("_stands", "_wrong", "pending")

    def __init__(self, wrong: Callable[[], None], stands: Callable[[CordonStatus], None]) -> None:
        self._wrong = wrong
        self._stands = stands
        self.pending = False

    def done(self) -> bool:
        """Whether nobody cares any more."""
        return not self.pending

    def set_result(self, reply: Any, /) -> None:
        """It arrived."""
        self.pending = False
        if reply == _UNKNOWN:
            self._wrong()
        else:
            self._stands(reply)

    def set_exception(self, error: RedisError, /) -> None:  # noqa: ARG002 - whatever it is, a call that is awaited tells
        """It did not arrive, or the script is not known."""
        self.pending = False
        self._wrong()


class AsyncHeartbeat:
    """The pulses of one worker. `wrong` is called when one came to nothing: a beat that is awaited must follow.

    `clock` is monotonic seconds. `stands` is told what the answer says of the worker.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        wrong: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        stands: Callable[[CordonStatus], None] = lambda _: None,
    ) -> None:
        self._line = line_of(client)
        self._script = Script("worker_beat", client, keys)
        self._wrong = wrong
        self._clock = clock
        self._stands = stands
        self._heard = _HeartbeatReply(wrong, stands)
        self._said: WorkerReport | None = None
        self._as_before = b""
        self._whole_at = 0.0

    @property
    def pending(self) -> bool:
        """Whether the answer to the last one is not here yet."""
        return self._heard.pending

    def send(self, heartbeat: WorkerReport) -> bool:
        """Send one; the same object again says that nothing has changed. False without a connection, or while one is
        pending.
        """
        heard = self._heard
        if heard.pending or not self._line.tell(self._command(heartbeat), heard):
            return False
        heard.pending = True
        return True

    def forget(self) -> None:
        """Say all the next time: what Redis knows is not certain."""
        self._said = None

    def give_up(self) -> None:
        """Wait no more for the answer: the connection is taken for dead."""
        self._heard.pending = False
        self._heard = _HeartbeatReply(
            self._wrong, self._stands
        )  # The old one may still have its place in the order of the old connection.
        self._line.retire()

    def _command(self, heartbeat: WorkerReport) -> bytes:
        now = self._clock()
        if heartbeat is self._said and now - self._whole_at < WHOLE_EVERY_S:
            return self._as_before
        if self._said is None or heartbeat.id != self._said.id:
            self._as_before = self._script.packed(heartbeat.id)
        self._said, self._whole_at = heartbeat, now
        return self._script.packed(*beat_words(heartbeat))


GONE_MS = 1000
"""A worker that was silent for so long does not count."""

_COUNT_HOLDS_MS = 3000

NOTICE_MS = 5000
"""How long what a scheduler says of itself is repeated: it says it with each of its ten passes a second."""

COUNT_OUTLIVES_S = 10.0
"""How long the count that was made before Redis went away is believed when Redis comes back empty."""

_beat = msgspec.msgpack.Decoder(WorkerReport)
_stats = msgspec.msgpack.Decoder(GatewayStats)
_observed = msgspec.msgpack.Decoder(
    tuple[
        Queues,
        list[tuple[str, float, bool, bool, msgspec.Raw]],
        list[tuple[float, msgspec.Raw]],
        int,
        int,
        float,
        float,
        list[str],
    ]
)


class BeatReply(NamedTuple):
    """What Redis says to a gateway that beats.

    `epoch_us` is when this Redis was first used: another one than before means that it may have lost what it was told.
    `memory_share` of its limit is in use, 0.0 where it has none. `policy` is its maxmemory-policy, "" where it does not tell.
    """

    epoch_us: int
    memory_share: float
    policy: str = ""


class _Census(NamedTuple):
    """The last count made of heartbeats alone, in which epoch, and until when it stands (seconds of the clock)."""

    healthy: int
    epoch: bytes
    until_s: float

    def later(self, now_s: float, epoch: bytes, healthy: int, gone_s: float) -> "_Census":
        """After another count: in a new epoch this one stands until every worker that lives must have beaten."""
        if epoch == self.epoch or now_s >= self.until_s:
            return _Census(healthy, epoch, now_s + COUNT_OUTLIVES_S)
        return self._replace(until_s=min(self.until_s, now_s + gone_s))


_NEVER_COUNTED = _Census(0, b"", -math.inf)


class Presence:
    """Heartbeats and observation on one pool. All raise RedisUnavailable."""

    def __init__(
        self, client: Redis, keys: Keys, *, gone_ms: int = GONE_MS, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._keys = keys
        self._gone_ms = gone_ms
        self._clock_s = clock_s
        self._counted = _NEVER_COUNTED
        self._worker_beat = Script("worker_beat", client, keys)
        self._gateway_beat = Script("gateway_beat", client, keys)
        self._census = Script("census", client, keys)
        self._observe = Script("observe", client, keys)

    async def worker_beat(self, heartbeat: WorkerReport) -> CordonStatus:
        """Register or refresh a worker; must come before its first claim, which the answer may forbid."""
        return CordonStatus(await self._worker_beat(*beat_words(heartbeat)))

    def pulse(
        self, wrong: Callable[[], None], stands: Callable[[CordonStatus], None] = lambda _: None
    ) -> AsyncHeartbeat:
        """For a worker that beats again and again, once it has registered."""
        return AsyncHeartbeat(self._client, self._keys, wrong, stands=stands)

    def local_host(self) -> str:
        """The address of this machine from which Redis is reached; "" where there is no connection over TCP."""
        return line_of(self._client).local_host

    async def worker_gone(self, worker_id: str) -> None:
        """A graceful leave: the worker is forgotten, not counted as lost."""
        await self._forget(self._keys.gpus, worker_id, self._keys.gpu(worker_id))

    async def gateway_beat(self, stats: GatewayStats, refusals: Sequence[RejectionRecord] = ()) -> BeatReply:
        """Register or refresh a gateway, and keep what it refused since its last beat: the oldest 256, oldest first."""
        refused = [_encode(refusal) for refusal in refusals[:MAX_A_BEAT]]
        epoch_us, share, policy = await self._gateway_beat(
            stats.gateway_id, _encode(stats), GATEWAY_GONE_MS, KEPT_A_GATEWAY, KEEP_REFUSALS_MS, *refused
        )
        return BeatReply(int(epoch_us), float(share), policy.decode())

    async def gateway_gone(self, gateway_id: str) -> None:
        """A graceful leave, once nothing waits there any more."""
        await self._forget(self._keys.gateways, gateway_id, self._keys.gateway(gateway_id))

    async def _forget(self, index: str, member: str, key: str) -> None:
        async with bounded():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.zrem(index, member)
            pipeline.delete(key)
            await pipeline.execute()

    async def census(self, notices: Sequence[str] = ()) -> tuple[int, int]:
        """Count into `healthy_gpu_count`: (healthy, known). `notices` are kept for health.

        Redis forgets its workers when it comes back empty. What was counted before stands for as long as a silent worker
        does, or nothing would be formed, and free be shed, until each has beaten again.
        """
        last, now_s = self._counted, self._clock_s()
        held = last.epoch if now_s < last.until_s else b""
        healthy, known, epoch = await self._census(
            self._gone_ms, _COUNT_HOLDS_MS, last.healthy, held, NOTICE_MS, *notices
        )
        self._counted = last.later(now_s, epoch, healthy, self._gone_ms / 1000)
        return healthy, known

    async def observe(self, tiers: Sequence[str]) -> Observation:
        """One atomic look at the pool."""
        return decode_observation(await self._observe(_encode(tiers), self._gone_ms))


def decode_observation(packed: bytes) -> Observation:
    """From the observe script's reply. A beat that cannot be read leaves its worker unhealthy, never the look undone."""
    queues, workers, gateways, outbox, dlq, passed_ms, worked_ms, notices = _observed.decode(packed)
    told = [(age_ms, stats) for age_ms, stats in ((age_ms, _gateway(raw)) for age_ms, raw in gateways) if stats]
    return Observation(
        now_ms=queues.now_ms,
        tiers={tier.name: tier for tier in queues.tiers},
        workers=[_view(row) for row in workers],
        gateways=[stats for _, stats in told],
        ready_batches=queues.ready_batches,
        leased_batches=queues.leased_batches,
        outbox=outbox,
        dlq=dlq,
        gateway_ages_ms={stats.gateway_id: age_ms for age_ms, stats in told},
        scheduler_age_ms=passed_ms if passed_ms >= 0 else None,
        pass_age_ms=worked_ms if worked_ms >= 0 else None,
        notices=notices,
    )


def _view(row: tuple[str, float, bool, bool, msgspec.Raw]) -> WorkerView:
    worker_id, age_ms, healthy, pausing, raw = row
    heartbeat = _unpacked(_beat, raw)
    if heartbeat is None:
        heartbeat = WorkerReport(worker_id, "unknown", 0.0, 0, 0.0, 0.0, "", "")
        healthy = pausing = False
    return WorkerView(
        id=worker_id,
        status=heartbeat.status,
        utilization=heartbeat.utilization,
        in_flight=heartbeat.in_flight,
        age_ms=age_ms,
        healthy=healthy,
        rps=heartbeat.rps,
        service_p95_ms=heartbeat.service_p95_ms,
        backend=heartbeat.backend,
        model_version=heartbeat.model_version,
        direct=heartbeat.direct,
        base_ms=heartbeat.base_ms,
        item_ms=heartbeat.item_ms,
        seen_batch=heartbeat.seen_batch,
        gpu=heartbeat.gpu,
        padding_waste=heartbeat.padding_waste,
        pausing=pausing,
        model_pid=heartbeat.model_pid,
        width=heartbeat.width,
        fresh_batch=heartbeat.fresh_batch,
        served_rps=heartbeat.served_rps,
    )


def _gateway(raw: msgspec.Raw) -> GatewayStats | None:
    return _unpacked(_stats, raw)


_T = TypeVar("_T")


def _unpacked(decoder: msgspec.msgpack.Decoder[_T], raw: msgspec.Raw) -> _T | None:
    """Lua packs a nested msgpack text as a string: cut its header, then decode what is inside."""
    try:
        return decoder.decode(inner(bytes(raw)))
    except (msgspec.MsgspecError, ValueError):
        return None
