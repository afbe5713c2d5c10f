"""Heartbeats of workers and gateways, the count of healthy GPUs, observations of a pool, and cordons.

A worker's heartbeat can be sent without waiting: one write, without task, future or timer; its reply is processed when it
arrives. Heartbeats are most of the work of an idle worker, so an unchanged one contains only the id.

Cordoned workers finish their batches and claim no more. The cordons are stored in PostgreSQL, so that a restart of the worker
or a loss in Redis does not lift them. Schedulers copy them to Redis, whose reply to a heartbeat contains the worker's.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.batches import GATEWAY_GONE_MS
from scheduler.protocol.limits import KEEP_MS as KEEP_REFUSALS_MS
from scheduler.protocol.limits import MAX_PER_GATEWAY, MAX_PER_HEARTBEAT, RejectionRecord
from scheduler.protocol.pool_view import GatewayStats, Observation, Queues, WorkerReport, WorkerView, with_background
from scheduler.redis_client.connections import bounded, pipelined
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Argument
from scheduler.redis_client.scripts import Script, inner
from scheduler.tasks import next_tick

CHECK_S = 0.1
"""Interval of checks of the catalog in memory."""

REWRITE_S = 1.0
"""Interval of writes to Redis, in case it lost its data."""

log = structlog.get_logger("scheduler")


class CordonStatus(IntEnum):
    """The cordon of a worker in the reply to its heartbeat (`worker_beat.lua`)."""

    FREE = 0
    CORDONED = 1
    UNKNOWN = 2
    """Redis has lost its data, and has no list of cordons yet: the worker keeps its previous state."""


class WorkerBeatReply(NamedTuple):
    """The reply to a worker's heartbeat. `moves`: the packed document of `scheduler/cells/moves.py`; None with one cell.

    `tpot_ms`: the objective for the milliseconds per token, the smallest of the pool's models; 0: none.
    """

    cordon: CordonStatus
    moves: bytes | None = None
    tpot_ms: float = 0.0

    @classmethod
    def of(cls, reply: Any) -> "WorkerBeatReply":
        """From the reply of `worker_beat`."""
        cordon, moves, tpot_ms, *_ = (*reply, None, 0) if isinstance(reply, list) else (reply, None, 0)
        return cls(CordonStatus(cordon), moves, float(tpot_ms or 0))


class Cordons:
    """The script `cordon` of one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("cordon", client, keys)

    async def write(self, workers: Collection[str], tpot_ms: float = 0.0) -> int:
        """Cordon exactly these workers, and store the objective for all of them. Returns the number of changed cordons."""
        return int(await self._script(msgspec.msgpack.encode(sorted(workers)), f"{tpot_ms:g}"))


class CordonSync:
    """Writes cordons and the objective `tpot_ms` to Redis when they change, and once a second.

    `wanted`: the cordons, None if not known. `clock_s`: monotonic seconds.
    """

    def __init__(
        self,
        cordons: Cordons,
        wanted: Callable[[], frozenset[str] | None],
        clock_s: Callable[[], float],
        tpot_ms: Callable[[], float] = float,
    ) -> None:
        self._cordons = cordons
        self._wanted = wanted
        self._clock_s = clock_s
        self._tpot_ms = tpot_ms
        self._written: tuple[frozenset[str], float] | None = None
        self._written_at = -math.inf

    async def run(self) -> None:
        """Write cordons; never returns."""
        while True:
            # Without Redis it is retried after REWRITE_S at the latest.
            with LoggedFaults("writing cordons failed"), suppress(RedisUnavailable):
                await self.sync()
            await next_tick(CHECK_S)

    async def sync(self) -> None:
        """Write the cordons if they changed or REWRITE_S has passed. Raises RedisUnavailable."""
        wanted, tpot_ms, now = self._wanted(), self._tpot_ms(), self._clock_s()
        if wanted is None or ((wanted, tpot_ms) == self._written and now - self._written_at < REWRITE_S):
            return
        changed = await self._cordons.write(wanted, tpot_ms)
        if changed:
            log.info("cordons_written", cordoned=len(wanted), changed=changed)
        self._written, self._written_at = (wanted, tpot_ms), now


COMPLETE_EVERY_S = 10.0
"""Interval of complete heartbeats, which renew the lifetime of the worker's row."""

_KEEP_MS = 310_000  # Five minutes after the last heartbeat, which may be ten seconds after the last complete one.
_UNKNOWN = -1

_encode = msgspec.msgpack.Encoder().encode


def heartbeat_arguments(heartbeat: WorkerReport) -> tuple[Argument, ...]:
    """The arguments of `worker_beat` for a complete heartbeat."""
    slots = (heartbeat.free_slots if heartbeat.free_slots >= 0 else "", heartbeat.slots) if heartbeat.slots else ()
    return (
        heartbeat.id,
        heartbeat.status,
        round(heartbeat.utilization, 4),
        heartbeat.in_flight,
        _encode(heartbeat),
        _KEEP_MS,
        *slots,
    )


class _HeartbeatReply:
    """Receives the reply to one heartbeat, in place of a future."""

    __slots__ = ("_on_failure", "_on_reply", "pending")

    def __init__(self, on_failure: Callable[[], None], on_reply: Callable[[WorkerBeatReply], None]) -> None:
        self._on_failure = on_failure
        self._on_reply = on_reply
        self.pending = False

    def done(self) -> bool:
        """Whether the reply is not needed any more."""
        return not self.pending

    def set_result(self, reply: Any, /) -> None:
        """The reply arrived."""
        self.pending = False
        if reply == _UNKNOWN:
            self._on_failure()
        else:
            self._on_reply(WorkerBeatReply.of(reply))

    def set_exception(self, error: RedisError, /) -> None:  # noqa: ARG002 - an awaited call reports the error
        """The call failed, or Redis does not have the script."""
        self.pending = False
        self._on_failure()


class AsyncHeartbeat:
    """Heartbeats of one worker without waiting. `on_failure` is called after a failure: then an awaited heartbeat must follow.

    `clock`: monotonic seconds. `on_reply` receives each reply.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        on_reply: Callable[[WorkerBeatReply], None] = lambda _: None,
    ) -> None:
        self._pipelined = pipelined(client)
        self._script = Script("worker_beat", client, keys)
        self._on_failure = on_failure
        self._clock = clock
        self._on_reply = on_reply
        self._reply = _HeartbeatReply(on_failure, on_reply)
        self._sent: WorkerReport | None = None
        self._unchanged = b""
        self._completed_at = 0.0

    @property
    def pending(self) -> bool:
        """Whether the reply to the last heartbeat has not arrived yet."""
        return self._reply.pending

    @property
    def distance_s(self) -> float:
        """How long the reply may be under way."""
        return self._pipelined.distance.call_s

    def send(self, heartbeat: WorkerReport) -> bool:
        """Send a heartbeat; if `heartbeat` is the same object as before, without its content. Returns False without a connection
        or while a reply is pending.
        """
        reply_sink = self._reply
        if reply_sink.pending or not self._pipelined.send_now(self._command(heartbeat), reply_sink):
            return False
        reply_sink.pending = True
        return True

    def forget(self) -> None:
        """Send a complete heartbeat next time, because Redis may have lost the last one."""
        self._sent = None

    def give_up(self) -> None:
        """Stop waiting for the reply, and retire the connection."""
        self._reply.pending = False
        # The old one may still have its place in the order of the old connection.
        self._reply = _HeartbeatReply(self._on_failure, self._on_reply)
        self._pipelined.retire()

    def _command(self, heartbeat: WorkerReport) -> bytes:
        now = self._clock()
        if heartbeat is self._sent and now - self._completed_at < COMPLETE_EVERY_S:
            return self._unchanged
        if self._sent is None or heartbeat.id != self._sent.id:
            self._unchanged = self._script.packed(heartbeat.id)
        self._sent, self._completed_at = heartbeat, now
        return self._script.packed(*heartbeat_arguments(heartbeat))


GONE_MS = 1000
"""A worker without a heartbeat for this time is not healthy."""

_COUNT_HOLDS_MS = 3000

NOTICE_MS = 5000
"""How long a notice of a scheduler is kept; it is sent with each of its ten passes per second."""

MOVES_KEEP_MS = 2000
"""How long `moves` is kept; it is written four times a second."""

COUNT_VALID_S = 10.0
"""How long the last count is used after Redis lost its data."""

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
        int,
    ]
)


class BeatReply(NamedTuple):
    """The reply to a gateway's heartbeat.

    `epoch_us`: when this Redis was first used; if it changes, Redis may have lost data. `memory_share`: the used share of its
    memory limit, 0.0 without a limit. `policy`: its maxmemory-policy, "" if not known.
    """

    epoch_us: int
    memory_share: float
    policy: str = ""


class _Census(NamedTuple):
    """The last count of healthy workers, its epoch, and until when it is valid (seconds of the clock)."""

    healthy: int
    epoch: bytes
    until_s: float

    def updated(self, now_s: float, epoch: bytes, healthy: int, gone_s: float) -> "_Census":
        """The state after another count. In a new epoch, the old count is valid until all workers have sent a heartbeat."""
        if epoch == self.epoch or now_s >= self.until_s:
            return _Census(healthy, epoch, now_s + COUNT_VALID_S)
        return self._replace(until_s=min(self.until_s, now_s + gone_s))


_NEVER_COUNTED = _Census(0, b"", -math.inf)


class Presence:
    """Heartbeats and observations of one pool. All methods raise RedisUnavailable."""

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

    async def worker_beat(self, heartbeat: WorkerReport) -> WorkerBeatReply:
        """Register or refresh a worker. Required before its first claim, which the reply may forbid."""
        return WorkerBeatReply.of(await self._worker_beat(*heartbeat_arguments(heartbeat)))

    def async_heartbeat(
        self, on_failure: Callable[[], None], on_reply: Callable[[WorkerBeatReply], None] = lambda _: None
    ) -> AsyncHeartbeat:
        """Heartbeats without waiting, for a registered worker."""
        return AsyncHeartbeat(self._client, self._keys, on_failure, on_reply=on_reply)

    def local_host(self) -> str:
        """The local address of the connection to Redis; "" without a TCP connection."""
        return pipelined(self._client).local_host

    async def worker_gone(self, worker_id: str) -> None:
        """Remove a worker that stops; it does not count as lost."""
        await self._forget(self._keys.gpus, worker_id, self._keys.gpu(worker_id))

    async def gateway_beat(self, stats: GatewayStats, rejections: Sequence[RejectionRecord] = ()) -> BeatReply:
        """Register or refresh a gateway, and store the oldest 256 rejections since its last heartbeat, the oldest first."""
        packed = [_encode(rejection) for rejection in rejections[:MAX_PER_HEARTBEAT]]
        epoch_us, share, policy = await self._gateway_beat(
            stats.gateway_id, _encode(stats), GATEWAY_GONE_MS, MAX_PER_GATEWAY, KEEP_REFUSALS_MS, *packed
        )
        return BeatReply(int(epoch_us), float(share), policy.decode())

    async def gateway_gone(self, gateway_id: str) -> None:
        """Remove a gateway that stops, once it has no pending requests."""
        await self._forget(self._keys.gateways, gateway_id, self._keys.gateway(gateway_id))

    async def _forget(self, index: str, member: str, key: str) -> None:
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.zrem(index, member)
            pipeline.delete(key)
            await pipeline.execute()

    async def publish_moves(self, packed: bytes) -> None:
        """Write `moves`, which workers read with their heartbeats."""
        async with bounded(self._client):
            await self._client.set(self._keys.moves, packed, px=MOVES_KEEP_MS)

    async def moves(self) -> bytes | None:
        """The present `moves`; None: there is none."""
        async with bounded(self._client):
            packed = await self._client.get(self._keys.moves)
        return packed if isinstance(packed, bytes) else None

    async def census(self, notices: Sequence[str] = ()) -> tuple[int, int]:
        """Update `healthy_gpu_count`. Returns (healthy, known) workers. `notices`: problems for health.

        After a loss of its data, Redis has no workers until they send heartbeats. The previous count is valid meanwhile, or no
        batches would be formed and requests be rejected.
        """
        last, now_s = self._counted, self._clock_s()
        held = last.epoch if now_s < last.until_s else b""
        healthy, known, epoch = await self._census(
            self._gone_ms, _COUNT_HOLDS_MS, last.healthy, held, NOTICE_MS, *notices
        )
        self._counted = last.updated(now_s, epoch, healthy, self._gone_ms / 1000)
        return healthy, known

    async def observe(self, tiers: Sequence[str]) -> Observation:
        """Read the state of the pool atomically."""
        return decode_observation(await self._observe(_encode(with_background(tiers)), self._gone_ms))


def decode_observation(packed: bytes) -> Observation:
    """Decode the reply of `observe`. A worker with an unreadable heartbeat is not healthy; the others are not affected."""
    queues, workers, gateways, outbox, dlq, passed_ms, worked_ms, notices, epoch_us = _observed.decode(packed)
    reports = [(age_ms, stats) for age_ms, stats in ((age_ms, _gateway(raw)) for age_ms, raw in gateways) if stats]
    return Observation(
        now_ms=queues.now_ms,
        tiers=queues.interactive,
        background=queues.background,
        workers=[_view(row) for row in workers],
        gateways=[stats for _, stats in reports],
        ready_batches=queues.ready_batches,
        leased_batches=queues.leased_batches,
        outbox=outbox,
        dlq=dlq,
        gateway_ages_ms={stats.gateway_id: age_ms for age_ms, stats in reports},
        scheduler_age_ms=passed_ms if passed_ms >= 0 else None,
        pass_age_ms=worked_ms if worked_ms >= 0 else None,
        notices=notices,
        epoch_us=epoch_us,
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
        model_ms=heartbeat.model_ms,
        timeout_ms=heartbeat.timeout_ms,
        slots=heartbeat.slots,
        slots_source=heartbeat.slots_source,
        context_tokens=heartbeat.context_tokens,
        reason=heartbeat.reason,
    )


def _gateway(raw: msgspec.Raw) -> GatewayStats | None:
    return _unpacked(_stats, raw)


_T = TypeVar("_T")


def _unpacked(decoder: msgspec.msgpack.Decoder[_T], raw: msgspec.Raw) -> _T | None:
    """Lua packs nested msgpack as a string: remove its header, then decode the content."""
    try:
        return decoder.decode(inner(bytes(raw)))
    except (msgspec.MsgspecError, ValueError):
        return None
