"""`adopt`: a gateway is the second witness of what it took and told, should Redis have lost it or never known it."""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from scheduler.protocol.audit_outbox import Accepted, Ended, encode_records
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

MAX_PAIRS = 256
"""A call, so that it never holds the server."""

_encode = msgspec.msgpack.Encoder().encode


class Adoption:
    """The adopt script on one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("adopt", client, keys)

    async def adopt(self, pairs: Sequence[tuple[Accepted, Ended | None]]) -> int:
        """Tell again how these requests began and ended; returns how many of them were still open in Redis.

        Those end as told, and no worker's late result changes that; a beginning without an end ends nothing. The
        records go to the outbox whatever Redis knows: the auditor folds what it has already, in whatever order it
        comes, so telling twice does no harm.
        Raises ValueError for more than MAX_PAIRS, and RedisUnavailable.
        """
        if len(pairs) > MAX_PAIRS:
            raise ValueError(f"{len(pairs)} pairs in one call; at most {MAX_PAIRS}")
        if not pairs:
            return 0
        told = _encode([(end.id, end.state, end.error_code, end.delivered) for _, end in pairs if end])
        records = encode_records([record for pair in pairs for record in pair if record])
        return int(await self._script(told, records))
