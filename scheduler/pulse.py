"""A worker's beat that nobody waits for: one write, no task, no future, no timer. Its answer is looked at when it comes.

Idle workers do little else, four times a second each, with caches that others have filled meanwhile: every turn of the
loop counts. So an idle one says only that it is as it was.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.cordons import Standing
from scheduler.protocol.pool_view import WorkerBeat
from scheduler.redis_client.connections import line_of
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Argument
from scheduler.redis_client.scripts import Script

WHOLE_EVERY_S = 10.0
"""After so long all is said again: a worker's row gets a new TTL with that only."""

_KEEP_MS = 310_000  # Five minutes from the last beat, which may be ten seconds younger than the last whole one.
_UNKNOWN = -1

_encode = msgspec.msgpack.Encoder().encode


def beat_words(beat: WorkerBeat) -> tuple[Argument, ...]:
    """What the script `worker_beat` is told of a worker."""
    return beat.id, beat.status, round(beat.utilization, 4), beat.in_flight, _encode(beat), _KEEP_MS


class _Heard:
    """The answer to one pulse, in a future's place on the line."""

    __slots__ = ("_stands", "_wrong", "pending")

    def __init__(self, wrong: Callable[[], None], stands: Callable[[Standing], None]) -> None:
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


class Pulse:
    """The pulses of one worker. `wrong` is called when one came to nothing: a beat that is awaited must follow.

    `clock` is monotonic seconds. `stands` is told what the answer says of the worker.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        wrong: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        stands: Callable[[Standing], None] = lambda _: None,
    ) -> None:
        self._line = line_of(client)
        self._script = Script("worker_beat", client, keys)
        self._wrong = wrong
        self._clock = clock
        self._stands = stands
        self._heard = _Heard(wrong, stands)
        self._said: WorkerBeat | None = None
        self._as_before = b""
        self._whole_at = 0.0

    @property
    def pending(self) -> bool:
        """Whether the answer to the last one is not here yet."""
        return self._heard.pending

    def send(self, beat: WorkerBeat) -> bool:
        """Send one; the same object again says that nothing has changed. False without a connection, or while one is
        pending.
        """
        heard = self._heard
        if heard.pending or not self._line.tell(self._command(beat), heard):
            return False
        heard.pending = True
        return True

    def forget(self) -> None:
        """Say all the next time: what Redis knows is not certain."""
        self._said = None

    def give_up(self) -> None:
        """Wait no more for the answer: the connection is taken for dead."""
        self._heard.pending = False
        self._heard = _Heard(
            self._wrong, self._stands
        )  # The old one may still have its place in the order of the old connection.
        self._line.retire()

    def _command(self, beat: WorkerBeat) -> bytes:
        now = self._clock()
        if beat is self._said and now - self._whole_at < WHOLE_EVERY_S:
            return self._as_before
        if self._said is None or beat.id != self._said.id:
            self._as_before = self._script.packed(beat.id)
        self._said, self._whole_at = beat, now
        return self._script.packed(*beat_words(beat))
