"""Redis clients: every timeout is named, nothing is retried, and each kind of use has a client of its own.

redis-py's defaults would break the deadline (10 retries, 5 s socket timeout: one GET on a stopped Redis blocked 59 s)
and exactly-once (a re-sent LPUSH runs twice). So commands give up after 0.25 s with the outcome unknown, and what is
not idempotent is never sent twice.

The timeouts are ours, around each call, not redis-py's `socket_timeout`: that one sends through `asyncio.wait_for`,
which on Python 3.11 starts a task for every command and can swallow a cancel (CPython gh-86296), after which a role
would not stop.

Beside redis-py's commands each client has a `PipelinedClient`, for scripts and blocking reads: what is called many times a second.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from scheduler.errors import RedisUnavailable, StartError
from scheduler.redis_client.keys import PROTOCOL
from scheduler.redis_client.pipeline import Argument, PipelinedClient
from scheduler.redis_client.sentinel import SCHEMES, PrimaryPool, SharedSSLConnection, parse, prepare

COMMAND_TIMEOUT_S = 0.25
MINIMUM_VERSION = (7, 0)
FAULTS = (RedisError, OSError, TimeoutError)
"""Every way in which Redis can be away."""

CLUSTER_MODE = "Redis runs in cluster mode"
NO_CLUSTER = (
    "Tierlane's scripts need all keys on one server, so use a single primary, behind Sentinel for failover "
    "(redis+sentinel://), or one without cluster-enabled."
)

_POOL_SIZE = 16


class PipelinedRedis(Redis):
    """A client of redis-py, and a line that makes its connections as this client's pool does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.line = PipelinedClient(self.connection_pool.make_connection, COMMAND_TIMEOUT_S)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: FBT001 - redis-py's signature
        """Close the line, too."""
        self.line.close()
        await super().aclose(close_connection_pool)


def line_of(client: Redis) -> PipelinedClient:
    """The line of a client that was made here."""
    if not isinstance(client, PipelinedRedis):
        raise TypeError("Scripts and blocking reads need a client of scheduler.redis_client.connections.")
    return client.line


async def blocking_read(client: Redis, *command: Argument, block_s: float) -> Any:
    """A read that Redis answers after `block_s` at the latest; a second later it counts as away. RedisUnavailable."""
    async with translated():
        return await line_of(client).blocking_call(command, block_s + 1.0)


def _client(url: str, size: int, timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    options: dict[str, Any] = {
        "max_connections": size,
        "timeout": timeout_s,
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "driver_info": None,  # Else it sends CLIENT SETINFO, which Redis 7.0 does not know and our ACL does not allow.
    }
    if url.startswith(SCHEMES):
        client = PipelinedRedis.from_pool(PrimaryPool(parse(url), **options))
    else:
        pool = BlockingConnectionPool.from_url(url, **options)
        if pool.connection_class is SSLConnection:
            pool.connection_class = SharedSSLConnection
        client = PipelinedRedis.from_pool(pool)
    line_of(client).timeout_s = timeout_s
    prepare(client.connection_pool.make_connection())  # type: ignore[no-untyped-call]
    return client


def command_client(url: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    """For scripts, each over within `timeout_s`, and for commands, each inside `bounded()`."""
    return _client(url, _POOL_SIZE, timeout_s)


def blocking_client(url: str) -> Redis:
    """For one blocking read at a time, inside `bounded(block + 1 s)`."""
    return _client(url, 1)


def subscriber_client(url: str) -> Redis:
    """For one subscription; its reader sets deadlines of its own, since silence is normal on a channel."""
    return _client(url, 1)


@asynccontextmanager
async def bounded(timeout_s: float = COMMAND_TIMEOUT_S) -> AsyncIterator[None]:
    """A call on Redis ends within `timeout_s`. Raises RedisUnavailable."""
    async with translated(), asyncio.timeout(timeout_s):
        yield


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Every way in which Redis can be away becomes RedisUnavailable; the caller sets deadlines of its own."""
    try:
        yield
    except FAULTS as error:
        raise unavailable(error) from error


def unavailable(error: BaseException) -> RedisUnavailable:
    """One of FAULTS in the words that every caller knows."""
    return RedisUnavailable(f"Redis did not answer: {type(error).__name__}: {error}")


async def check_protocol(client: Redis) -> None:
    """Refuse a Redis whose data is of another protocol. Raises StartError, or RedisUnavailable where nobody answers.

    Scripts refuse as well, should it change later.
    """
    async with bounded():
        try:
            stored = cast("bytes | None", await client.get("protocol"))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            raise StartError(
                "Redis has a key `protocol` that is not of Tierlane: give Tierlane a database of its own, or delete the key."
            ) from error
    if stored is not None and stored.split(b".")[0] != PROTOCOL.split(".")[0].encode():
        found = stored[:16].decode("ascii", "replace")
        raise StartError(
            f"Redis holds data of protocol {found}, and this version of Tierlane speaks {PROTOCOL}: let the roles of the "
            "version that wrote it end what waits, stop them, and delete the key `protocol`."
        )


async def check_server(client: Redis) -> None:
    """Refuse a server that could lose the queue, or on which no script runs. Raises StartError, or RedisUnavailable where nobody answers."""
    async with bounded():
        info = await client.info()
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise StartError(f"Redis {info['redis_version']} is too old: Tierlane needs Redis 7.0 or Valkey 7.2.")
    if int(info.get("cluster_enabled", 0)):
        raise StartError(f"{CLUSTER_MODE}: {NO_CLUSTER}")
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise StartError(f"Redis has maxmemory-policy {policy}, which can evict queued work: set it to noeviction.")
    await check_protocol(client)
