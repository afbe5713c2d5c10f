"""The states of requests, read for jobs, which have no open connection."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from scheduler.protocol.replies import Reply, Results
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
        self._results = Results(client, keys)

    async def epoch(self) -> bytes:
        """The epoch of this Redis, which changes when it loses its data; b"" before its first use."""
        async with bounded(self._client):
            return cast("bytes | None", await self._client.get(self._keys.epoch)) or b""

    async def fetch(self, ids: Sequence[str]) -> list[RequestStatus]:
        """The state of each request, in order."""
        found: list[RequestStatus] = []
        for start in range(0, len(ids), STATES_SIZE):
            async with bounded(self._client):
                pipeline = self._client.pipeline(transaction=False)
                for request_id in ids[start : start + STATES_SIZE]:
                    pipeline.hmget(self._keys.request(request_id), ("state", "code"))
                rows: list[Any] = await pipeline.execute()
            found += [RequestStatus((state or b"").decode(), (code or b"").decode()) for state, code in rows]
        ended = [at for at, status in enumerate(found) if status.ended]
        for start in range(0, len(ended), REPLIES_SIZE):
            some = ended[start : start + REPLIES_SIZE]
            for at, reply in zip(some, await self._results.fetch([ids[at] for at in some]), strict=True):
                found[at] = found[at]._replace(reply=reply)
        return found
