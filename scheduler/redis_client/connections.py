"""Redis clients: explicit timeouts, no retries, and a separate client for each kind of use.

The defaults of redis-py would violate deadlines (10 retries, 5 s socket timeout: one GET on a stopped Redis blocked for 59 s)
and exactly-once semantics (a repeated LPUSH runs twice). So commands time out after 0.25 s and the round trip (`Distance`), with
an unknown outcome, and commands that are not idempotent are never repeated.

The timeouts are applied around each call, not by redis-py's `socket_timeout`: that one uses `asyncio.wait_for`, which on
Python 3.11 starts a task for every command and can lose a cancellation (CPython gh-86296), so that a role would not stop.

Each client also has a `PipelinedClient` for frequent calls: scripts and blocking reads.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import structlog
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from scheduler.errors import RedisUnavailable, StartError
from scheduler.redis_client import cluster
from scheduler.redis_client.distance import MOST_ROUND_TRIP_S
from scheduler.redis_client.keys import CLUSTER_SCHEMES, PROTOCOL, Keys, tag_of
from scheduler.redis_client.pipeline import Argument, PipelinedClient
from scheduler.redis_client.sentinel import SCHEMES, ClientPool, SentinelPool, SharedSSLConnection, parse, prepare
from scheduler.redis_client.setup_faults import login_fault, tls_faults

log = structlog.get_logger("process")

COMMAND_TIMEOUT_S = 0.25
"""The time limit of a command, without the distance."""
MINIMUM_VERSION = (7, 0)
FAULTS = (RedisError, OSError, TimeoutError)
"""Exceptions that mean that Redis is unavailable."""

CLUSTER_MODE = "Redis runs in cluster mode"
CLUSTER_ADVICE = (
    "name it with redis+cluster:// or rediss+cluster:// in TIERLANE_REDIS_URL, so that all keys get one hash tag."
)

_POOL_SIZE = 16
_TLS_TRIPS = 2
_PINGS = 3


class PipelinedRedis(Redis):
    """A client of redis-py with a `PipelinedClient` whose connections are made by the client's pool.

    `tag`: the beginning of all names in its cell.
    """

    tag = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        pool = cast("ClientPool", self.connection_pool)
        self.pipelined = PipelinedClient(pool.make_connection, COMMAND_TIMEOUT_S, pool.moved, pool.distance)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: FBT001 - redis-py's signature
        """Close the pipelined client too. Later calls fail, and leave no connection open."""
        self.pipelined.end()
        pool = self.connection_pool
        if isinstance(pool, ClientPool):
            pool.ended = True
        await super().aclose(close_connection_pool)


def pipelined(client: Redis) -> PipelinedClient:
    """The pipelined client of a client of this module."""
    if not isinstance(client, PipelinedRedis):
        raise TypeError("Scripts and blocking reads need a client of scheduler.redis_client.connections.")
    return client.pipelined


async def blocking_read(client: Redis, *command: Argument, block_s: float) -> Any:
    """A read that blocks for at most `block_s`. Raises RedisUnavailable, at the latest one second after that."""
    async with translated():
        return await pipelined(client).blocking_call(command, block_s + 1.0)


def _client(url: str, size: int, timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    options: dict[str, Any] = {
        "max_connections": size,
        "timeout": timeout_s,
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s + (_TLS_TRIPS * MOST_ROUND_TRIP_S if url.startswith("rediss") else 0.0),
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "driver_info": None,  # Without it redis-py sends CLIENT SETINFO, which Redis 7.0 and our ACL reject.
        # One round trip, which most servers reject.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    server, tag = url.partition("#")[0], tag_of(url)
    if server.startswith(SCHEMES):
        client = PipelinedRedis.from_pool(SentinelPool(parse(server), **options))
    elif server.startswith(CLUSTER_SCHEMES):
        client = PipelinedRedis.from_pool(cluster.SlotPool(cluster.parse(server), tag, **options))
    else:
        pool = ClientPool.from_url(server, **options)
        if pool.connection_class is SSLConnection:
            pool.connection_class = SharedSSLConnection
        client = PipelinedRedis.from_pool(pool)
    cast("PipelinedRedis", client).tag = tag
    pipelined(client).timeout_s = timeout_s
    prepare(client.connection_pool.make_connection())  # type: ignore[no-untyped-call]
    return client


def command_client(url: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    """A client for scripts, each with timeout `timeout_s`, and for commands inside `bounded()`."""
    return _client(url, _POOL_SIZE, timeout_s)


def blocking_client(url: str) -> Redis:
    """A client for one blocking read at a time."""
    return _client(url, 1)


def subscriber_client(url: str) -> Redis:
    """A client for one subscription. Its reader sets its own timeouts, because a channel may be idle."""
    return _client(url, 1)


@asynccontextmanager
async def bounded(limit: Redis | float = COMMAND_TIMEOUT_S) -> AsyncIterator[None]:
    """Limit a call to a time in seconds, or to that of the commands of a client. Raises RedisUnavailable."""
    async with translated(), asyncio.timeout(limit if isinstance(limit, float | int) else limit_of(limit)):
        yield


def limit_of(client: Redis) -> float:
    """The time limit of a few commands in a row that may need a connection, in seconds."""
    calls = pipelined(client)
    return calls.timeout_s + calls.distance.connect_s


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Convert FAULTS into RedisUnavailable; without a timeout."""
    try:
        yield
    except FAULTS as error:
        raise unavailable(error) from error


def unavailable(error: BaseException) -> RedisUnavailable:
    """The RedisUnavailable for one of FAULTS."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")  # Timeouts have no text.
    return RedisUnavailable(login_fault(error) or f"Redis did not respond: {text}")


async def diagnosed(client: Redis, error: RedisUnavailable) -> RedisUnavailable:
    """The same error, or one that says which server uses TLS, or does not, although the URL says otherwise."""
    if isinstance(error.__cause__, AuthenticationError):
        return error
    sentence = await tls_faults(cast("ClientPool", client.connection_pool).servers())
    return RedisUnavailable(sentence) if sentence else error


async def measure(client: Redis) -> float:
    """The round trip in seconds, which the client uses from then on. Raises RedisUnavailable."""
    loop, least_s = asyncio.get_running_loop(), float("inf")
    async with translated():
        for _ in range(_PINGS):
            began = loop.time()
            await pipelined(client).call(("PING",))
            least_s = min(least_s, loop.time() - began)
    pipelined(client).distance.measured(least_s)
    return least_s


def tag_at(client: Redis) -> str:
    """The beginning of all names in the cell of this client: a hash tag, or nothing."""
    return client.tag if isinstance(client, PipelinedRedis) else ""


async def close_client(client: Redis) -> None:
    """Close a client that may have lost its server: a connection that cannot be closed in time is only logged."""
    try:
        await client.aclose()
    except FAULTS as error:
        log.info("a connection to Redis was not closed in time", error=type(error).__name__)


async def server_url(url: str) -> str:
    """The URL with the scheme of a cluster if the server runs in cluster mode.

    It is unchanged if the server does not respond. Raises StartError for a server that cannot be used as a cluster.
    """
    if url.startswith((*SCHEMES, *CLUSTER_SCHEMES)):
        return url
    client = command_client(url)
    try:
        async with bounded(client):
            info = await client.info("cluster")
    except RedisUnavailable:
        return url
    finally:
        await close_client(client)
    return cluster.as_cluster(url) if int(info.get("cluster_enabled", 0)) else url


async def check_protocol(client: Redis) -> None:
    """Reject a Redis with data of another protocol version. Raises StartError, or RedisUnavailable if it does not respond.

    Scripts check the version as well, in case it changes later.
    """
    async with bounded(client):
        try:
            stored = cast("bytes | None", await client.get(Keys(tag=tag_at(client)).protocol))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            raise StartError(
                "Redis has a key `protocol` that Tierlane did not write: use a database of its own, or delete the key."
            ) from error
    if stored is not None and stored.split(b".")[0] != PROTOCOL.split(".")[0].encode():
        found = stored[:16].decode("ascii", "replace")
        raise StartError(
            f"Redis contains data of protocol {found}, but this version of Tierlane uses {PROTOCOL}: let the roles of the "
            "previous version finish all requests, stop them, and delete the key `protocol`."
        )


async def check_server(client: Redis) -> float:
    """Reject a server that could lose requests or cannot run the scripts. Returns the round trip in seconds.

    Raises StartError, or RedisUnavailable, which names a fault of the configuration if there is one.
    """
    try:
        round_trip_s = await measure(client)
        async with bounded(client):
            info = await client.info()
    except RedisUnavailable as error:
        raise await diagnosed(client, error) from error
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise StartError(f"Redis {info['redis_version']} is too old: Tierlane needs Redis 7.0 or Valkey 7.2.")
    if int(info.get("cluster_enabled", 0)) and not isinstance(client.connection_pool, cluster.SlotPool):
        raise StartError(f"{CLUSTER_MODE}: {CLUSTER_ADVICE}")
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise StartError(f"Redis has maxmemory-policy {policy}, which can evict queued requests: set it to noeviction.")
    await check_protocol(client)
    return round_trip_s
