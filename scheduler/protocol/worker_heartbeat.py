"""A worker's heartbeat, its reply, and heartbeats without waiting.

Heartbeats are most of the work of an idle worker: one write, without task, future or timer; the reply is processed when it
arrives. An unchanged heartbeat contains only the id.
"""

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.protocol.pool_view import WorkerReport
from scheduler.redis_client.connections import pipelined
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

COMPLETE_EVERY_S = 10.0
"""Interval of complete heartbeats, which renew the lifetime of the worker's row."""

_KEEP_MS = 310_000  # Five minutes after the last heartbeat, which may be ten seconds after the last complete one.
_UNKNOWN = -1

_encode = msgspec.msgpack.Encoder().encode


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


def worker_beat_arguments(  # noqa: PLR0917 - `heartbeat_arguments` is a tuple of them
    worker_id: str,
    status: str | None = None,
    utilization: str | None = None,
    in_flight: str | None = None,
    packed_heartbeat: bytes | None = None,
    keep_ms: int | None = None,
    slot_count: int | None = None,
    free_slots: int | None = None,
) -> None:
    """The arguments of `worker_beat`; the id alone for an unchanged heartbeat."""


def heartbeat_arguments(
    heartbeat: WorkerReport,
) -> tuple[str, str, str, str, bytes, int, int | None, int | None]:
    """The arguments of `worker_beat` for a complete heartbeat."""
    return (
        heartbeat.id,
        heartbeat.status,
        str(round(heartbeat.utilization, 4)),
        str(heartbeat.in_flight),
        _encode(heartbeat),
        _KEEP_MS,
        heartbeat.slots or None,
        heartbeat.free_slots if heartbeat.slots and heartbeat.free_slots >= 0 else None,
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
        self._script = Script("worker_beat", worker_beat_arguments, client, keys)
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
        if reply_sink.pending:
            return False
        now, command = self._clock(), self._unchanged
        if heartbeat is not self._sent or now - self._completed_at >= COMPLETE_EVERY_S:
            if self._sent is None or heartbeat.id != self._sent.id:
                self._unchanged = self._script.packed(heartbeat.id)
            self._sent, self._completed_at = heartbeat, now
            command = self._script.packed(*heartbeat_arguments(heartbeat))
        reply_sink.pending = self._pipelined.send_now(command, reply_sink)
        return reply_sink.pending

    def forget(self) -> None:
        """Send a complete heartbeat next time, because Redis may have lost the last one."""
        self._sent = None

    def give_up(self) -> None:
        """Stop waiting for the reply, and retire the connection."""
        self._reply.pending = False
        # The old one may still have its place in the order of the old connection.
        self._reply = _HeartbeatReply(self._on_failure, self._on_reply)
        self._pipelined.retire()
