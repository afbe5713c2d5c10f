"""`share`: tell those who ride on the run of an equal request that it has ended, a few in each call.

The end of a run tells the first of them itself. Who ends it, a worker, goes on with the others; should it die or lose
Redis on the way, the caretaker does. Two at once do no harm: each rider is taken and ended in one script.
"""

from redis.asyncio import Redis

from scheduler.errors import RedisUnavailable
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script

MOST_CALLS = 64
"""What one may do in a row: four thousand riders. The rest is the caretaker's, which comes again soon."""


class Riders:
    """The share script on one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("share", client, keys)

    async def share(self) -> bool:
        """Tell a few; whether more are left. Raises RedisUnavailable."""
        return bool(await self._script())

    async def share_all(self) -> None:
        """Tell all, as far as Redis answers and MOST_CALLS allow."""
        try:
            for _ in range(MOST_CALLS):
                if not await self.share():
                    return
        except RedisUnavailable:
            return  # Nothing is lost: `sharing` names whose riders wait.
