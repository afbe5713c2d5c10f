"""Heartbeats of workers and gateways, the count of healthy GPUs, and observations of a pool."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.protocol.batches import GATEWAY_GONE_MS
from scheduler.protocol.limits import KEEP_MS as KEEP_REFUSALS_MS
from scheduler.protocol.limits import MAX_PER_GATEWAY, MAX_PER_HEARTBEAT, RejectionRecord
from scheduler.protocol.observation import decode_observation
from scheduler.protocol.pool_view import GatewayStats, Observation, WorkerReport, with_background
from scheduler.protocol.worker_heartbeat import (
    AsyncHeartbeat,
    WorkerBeatReply,
    heartbeat_arguments,
    worker_beat_arguments,
)
from scheduler.redis_client.connections import bounded, pipelined
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

_encode = msgspec.msgpack.Encoder().encode

_COUNT_HOLDS_MS = 3000

NOTICE_MS = 5000
"""How long a notice of a scheduler is kept; it is sent with each of its ten passes per second."""

MOVES_KEEP_MS = 2000
"""How long `moves` is kept; it is written four times a second."""

COUNT_VALID_S = 10.0
"""How long the last count is used after Redis lost its data."""


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


def _gateway_beat(
    *,
    gateway_id: str,
    packed_stats: bytes,
    gone_ms: int,
    max_rejections: int,
    keep_ms: int,
    rejections: Sequence[bytes],
) -> None: ...
def _census(
    *, gone_ms: int, valid_ms: int, last_count: int, last_epoch: bytes, notice_ms: int, notices: Sequence[str]
) -> None: ...
def _observe(packed_tiers: bytes, gone_ms: int) -> None: ...


class Presence:
    """Heartbeats and observations of one pool. All methods raise RedisUnavailable.

    `gone_ms`: a worker without a heartbeat for this time is not healthy.
    """

    def __init__(
        self, client: Redis, keys: Keys, *, gone_ms: int, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._keys = keys
        self.gone_ms = gone_ms
        self._clock_s = clock_s
        self._counted = _NEVER_COUNTED
        self._worker_beat = Script("worker_beat", worker_beat_arguments, client, keys)
        self._gateway_beat = Script("gateway_beat", _gateway_beat, client, keys)
        self._census = Script("census", _census, client, keys)
        self._observe = Script("observe", _observe, client, keys)

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
            gateway_id=stats.gateway_id,
            packed_stats=_encode(stats),
            gone_ms=GATEWAY_GONE_MS,
            max_rejections=MAX_PER_GATEWAY,
            keep_ms=KEEP_REFUSALS_MS,
            rejections=packed,
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
            gone_ms=self.gone_ms,
            valid_ms=_COUNT_HOLDS_MS,
            last_count=last.healthy,
            last_epoch=held,
            notice_ms=NOTICE_MS,
            notices=notices,
        )
        self._counted = last.updated(now_s, epoch, healthy, self.gone_ms / 1000)
        return healthy, known

    async def observe(self, tiers: Sequence[str]) -> Observation:
        """Read the state of the pool atomically."""
        return decode_observation(await self._observe(_encode(with_background(tiers)), self.gone_ms))
