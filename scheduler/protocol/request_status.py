"""The states of requests, read for jobs, which have no open connection."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from scheduler.protocol.replies import Reply, readable
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.states import State

STATES_SIZE = 512
REPLIES_SIZE = 32
"""Replies per call: outputs may be large, and the call has a timeout."""


class RequestStatus(NamedTuple):
    """The state of one request; `state` is "" if Redis does not store it."""

    state: str
    error_code: str = ""
    reply: Reply | None = None

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in (State.COMPLETED, State.FAILED)


class RequestStatuses:
    """Reads states of requests of one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def epoch(self) -> bytes:
        """The epoch of this Redis, which changes when it loses its data; b"" before its first use."""
        async with bounded(self._client):
            return cast("bytes | None", await self._client.get(self._keys.epoch)) or b""

    async def fetch(self, ids: Sequence[str]) -> list[RequestStatus]:
        """The state of each request, in order."""
        found: list[RequestStatus] = []
        for start in range(0, len(ids), STATES_SIZE):
            some = ids[start : start + STATES_SIZE]
            rows = await self._pipelined([(self._keys.request(request_id), "state", "code") for request_id in some])
            found += [RequestStatus((state or b"").decode(), (code or b"").decode()) for state, code in rows]
        ended = [at for at, status in enumerate(found) if status.ended]
        for start in range(0, len(ended), REPLIES_SIZE):
            piece = ended[start : start + REPLIES_SIZE]
            stored = await self._pipelined([(self._keys.request(ids[at]), "reply") for at in piece])
            for at, (reply,) in zip(piece, stored, strict=True):
                found[at] = found[at]._replace(reply=readable(reply))
        return found

    async def _pipelined(self, reads: Sequence[tuple[str, ...]]) -> list[Any]:
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=False)
            for key, *fields in reads:
                pipeline.hmget(key, fields)
            return await pipeline.execute()
