"""Redis clients: every timeout is named, nothing is retried, and each kind of use has a client of its own.

redis-py's defaults would break the deadline (10 retries, 5 s socket timeout: one GET on a stopped Redis blocked 59 s)
and exactly-once (a re-sent LPUSH runs twice). So commands give up after 0.25 s with the outcome unknown, and what is
not idempotent is never sent twice.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from scheduler.errors import RedisUnavailable, StartError

COMMAND_TIMEOUT_S = 0.25
MINIMUM_VERSION = (7, 0)
_POOL_SIZE = 16


def _client(url: str, socket_timeout_s: float, size: int) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=size,
        timeout=COMMAND_TIMEOUT_S,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=COMMAND_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )
    return Redis.from_pool(pool)


def command_client(url: str) -> Redis:
    """For commands and scripts: each call ends within 0.25 s."""
    return _client(url, COMMAND_TIMEOUT_S, _POOL_SIZE)


def blocking_client(url: str, block_s: float) -> Redis:
    """For one blocking read of at most `block_s`: the socket outlives it by a second."""
    return _client(url, block_s + 1.0, 1)


def subscriber_client(url: str) -> Redis:
    """For one subscription; its reader sets deadlines of its own, since silence is normal on a channel."""
    return _client(url, 3600.0, 1)


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Every way in which Redis can be away becomes RedisUnavailable."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise RedisUnavailable(f"Redis did not answer: {type(error).__name__}: {error}") from error


async def check_server(client: Redis) -> None:
    """Refuse a server that could lose the queue. Raises StartError, or RedisUnavailable where nobody answers."""
    async with translated():
        info = await client.info()
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise StartError(f"Redis {info['redis_version']} is too old: Tierlane needs Redis 7.0 or Valkey 7.2.")
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise StartError(f"Redis has maxmemory-policy {policy}, which can evict queued work: set it to noeviction.")
