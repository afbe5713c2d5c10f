"""Signals to a worker with slots to stop runs: those of clients that have left, and runs that it should return."""

from typing import Any

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import blocking_read
from scheduler.redis_client.keys import Keys

STOPS_MS = 10_000
"""How long a signal is kept for a worker that does not read it, as in `cancel`."""


class StopSignal(msgspec.Struct, array_like=True, frozen=True):
    """Requests to stop; and the number of runs to withdraw that have sent nothing, of the first of these queues that has some."""

    ids: list[str]
    withdraw: int = 0
    queues: list[str] = []


_signal = msgspec.msgpack.Decoder(StopSignal)


class StopSignals:
    """The blocking read of the requests that a worker should stop running in its slots: their clients have left, or have a
    response. A signal that is lost with its reader costs the rest of a run, which is charged as used.
    """

    def __init__(self, blocking: Redis, keys: Keys, worker_id: str, block_s: float = 5.0) -> None:
        self._client = blocking
        self._key = keys.stops(worker_id)
        self._block_s = block_s

    async def pop(self) -> StopSignal | None:
        """The oldest signal; None after `block_s`. Raises RedisUnavailable, at the latest one second after that."""
        found: Any = await blocking_read(self._client, b"BLPOP", self._key, self._block_s, block_s=self._block_s)
        return _signal.decode(found[1]) if found else None
