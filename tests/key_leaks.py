"""A Redis key without a TTL that is not in the list of permanent keys is a leak."""

import re

from redis.asyncio import Redis

from scheduler.redis_client.keys import Keys

TAG = re.compile(r"^\{cell:[a-z0-9_-]+\}:")

WITHOUT_TTL = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('TTL', key) == -1 then found[#found + 1] = key end
end
return found
"""
"""One round trip, because tests leave thousands of keys."""


async def leaked_keys(client: Redis) -> list[str]:
    """All leaked keys."""
    leaks = []
    for raw in await client.eval(WITHOUT_TTL, 0):
        key = TAG.sub("", raw.decode())
        pool = key[1 : key.index("}")] if key.startswith("{") else "default"
        if not Keys(pool).is_permanent(key):
            leaks.append(key)
    return sorted(leaks)
