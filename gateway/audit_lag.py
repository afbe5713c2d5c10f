"""How far the audit is behind: the age of the oldest entry that is not in PostgreSQL yet.

Entries that an auditor has read, and keeps for the ends of what has only begun in them, are not behind (scheduler/outbox.py).
"""

from redis.asyncio import Redis

from scheduler.protocol.audit_outbox import Ended, decode_entry
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.request_id import created_ms


class AuditLag:
    """Looks at the tail of the outbox and of each auditor's own list; asked only when health is."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def oldest_ms(self) -> int | None:
        """When the oldest waiting entry was written, ms since the epoch; None when nothing waits.

        Raises RedisUnavailable.
        """
        async with bounded():
            members: set[bytes] = await self._client.smembers(self._keys.auditors)  # type: ignore[assignment]
            auditors = [member.decode() for member in members]
            held = (
                await self._client.mget([self._keys.auditor_held(auditor) for auditor in auditors]) if auditors else []
            )
            pipeline = self._client.pipeline(transaction=False)
            for auditor, count in zip(auditors, held, strict=True):
                pipeline.lindex(self._keys.auditor_outbox(auditor), -1 - int(count or 0))
            pipeline.lindex(self._keys.outbox, -1)
            oldest: list[bytes | None] = await pipeline.execute()
        times = [time for entry in oldest if entry and (time := written_ms(entry)) is not None]
        return min(times, default=None)


def written_ms(entry: bytes) -> int | None:
    """When an outbox entry was written, by its first record; None for one that cannot be read."""
    for record in decode_entry(entry)[0]:
        if isinstance(record, Ended):
            return record.ended_at_ms
        try:
            return created_ms(record.id)
        except ValueError:
            continue
    return None
