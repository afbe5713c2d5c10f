"""The script `share`, which ends the followers of requests.

A follower waits for the run of an equal request. When that run ends, `finish` ends the first of its followers; the worker
ends the others with `share`, a few per call, or the reaper does if the worker is lost. Concurrent calls are harmless,
because each follower is removed and ended in one script.
"""

from redis.asyncio import Redis

from scheduler.errors import RedisUnavailable
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

MOST_CALLS = 64
"""Calls in a row, for four thousand followers. The reaper ends the rest soon."""


def _share() -> None: ...


class Followers:
    """The script `share` of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("share", _share, client, keys)

    async def share(self) -> bool:
        """End a few followers. Returns whether more are left. Raises RedisUnavailable."""
        return bool(await self._script())

    async def share_all(self) -> None:
        """End all followers, unless Redis is unavailable or MOST_CALLS is reached."""
        try:
            for _ in range(MOST_CALLS):
                if not await self.share():
                    return
        except RedisUnavailable:
            return  # The key `sharing` names the runs whose followers have not ended.
