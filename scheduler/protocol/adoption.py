"""`adopt`: recovery of results that Redis may have lost."""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord, encode_records
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

MAX_PAIRS = 256
"""Per call, so that it does not block Redis."""

_encode = msgspec.msgpack.Encoder().encode


def _adopt(packed_results: bytes, records: bytes) -> None: ...


class Adoption:
    """The script `adopt` of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("adopt", _adopt, client, keys)

    async def adopt(self, pairs: Sequence[tuple[AcceptedRecord, EndedRecord | None]]) -> int:
        """Send the records of these requests again. Returns how many of them were still open in Redis.

        Those end with the given result, and later results of workers are stale; an accepted record alone ends nothing.
        All records go to the outbox: the auditor merges duplicates in any order, so a repeated call is harmless.
        Raises ValueError for more than MAX_PAIRS, and RedisUnavailable.
        """
        if len(pairs) > MAX_PAIRS:
            raise ValueError(f"{len(pairs)} pairs in one call; at most {MAX_PAIRS}")
        if not pairs:
            return 0
        results = _encode(
            [
                (end.id, end.state, end.error_code, end.delivered, end.tokens_used, end.cost_ms)
                for _, end in pairs
                if end
            ]
        )
        records = encode_records([record for pair in pairs for record in pair if record])
        return int(await self._script(results, records))
