"""How many requests stand, in one look: for jobs, which nobody waits for at a connection."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from scheduler.protocol.replies import Reply, readable
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.states import State

LOOK_SIZE = 512
REPLIES_SIZE = 32
"""A call: outputs may be large, and an answer too large for the call's time would never be had."""


class Stand(NamedTuple):
    """What Redis knows of one request; an empty `state` is that it knows nothing of it."""

    state: str
    error_code: str = ""
    reply: Reply | None = None

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in (State.COMPLETED, State.FAILED)


class Stands:
    """Looks on one pool. Raises RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def epoch(self) -> bytes:
        """What tells this Redis from one that came back empty; b"" where nobody has used it yet."""
        async with bounded():
            return cast("bytes | None", await self._client.get(self._keys.epoch)) or b""

    async def fetch(self, ids: Sequence[str]) -> list[Stand]:
        """Each request's, in order."""
        found: list[Stand] = []
        for start in range(0, len(ids), LOOK_SIZE):
            found += await self._look(ids[start : start + LOOK_SIZE])
        ended = [at for at, stand in enumerate(found) if stand.ended]
        for start in range(0, len(ended), REPLIES_SIZE):
            some = ended[start : start + REPLIES_SIZE]
            stored = await self._pipelined([(self._keys.request(ids[at]), "reply") for at in some])
            for at, (reply,) in zip(some, stored, strict=True):
                found[at] = found[at]._replace(reply=readable(reply))
        return found

    async def _look(self, ids: Sequence[str]) -> list[Stand]:
        rows = await self._pipelined([(self._keys.request(request_id), "state", "code") for request_id in ids])
        return [Stand((state or b"").decode(), (code or b"").decode()) for state, code in rows]

    async def _pipelined(self, asked: Sequence[tuple[str, ...]]) -> list[Any]:
        async with bounded():
            pipeline = self._client.pipeline(transaction=False)
            for key, *fields in asked:
                pipeline.hmget(key, fields)
            return await pipeline.execute()
