"""A Redis key without a TTL that is not in the list of permanent keys is a leak."""

from redis.asyncio import Redis

from scheduler.redis_client.keys import Keys


async def leaked_keys(client: Redis) -> list[str]:
    """All leaked keys."""
    leaks = []
    async for raw in client.scan_iter(count=1000):
        key = raw.decode()
        pool = key[1 : key.index("}")] if key.startswith("{") else "default"
        if await client.ttl(key) == -1 and not Keys(pool).is_permanent(key):
            leaks.append(key)
    return sorted(leaks)
