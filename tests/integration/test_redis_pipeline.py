"""The pipelined Redis client: replies in the order of the calls, abandoned calls, lost connections."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from eventually import eventually
from pool import Pool
from regressions.bad_line import BadLine, bad_line
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import blocking_client, blocking_read, command_client, pipelined
from scheduler.redis_client.pipeline import PipelinedClient
from tierlane_local.embedded.redis import EmbeddedRedis


@pytest.fixture
async def proxy(redis_server: EmbeddedRedis, redis_url: str) -> AsyncIterator[BadLine]:
    """A proxy in front of the session's Redis."""
    del redis_url  # Requested so that Redis is empty.
    async with bad_line(redis_server.socket) as proxy:
        yield proxy


@pytest.fixture
async def calls(proxy: BadLine) -> AsyncIterator[PipelinedClient]:
    """A client behind the proxy."""
    client = command_client(proxy.url)
    yield pipelined(client)
    await client.aclose()


async def echo(calls: PipelinedClient, text: str, timeout_s: float = 5.0) -> str:
    reply: bytes = await calls.call((b"ECHO", text), timeout_s)
    return reply.decode()


async def test_concurrent_calls_share_one_connection(calls: PipelinedClient, proxy: BadLine) -> None:
    """Small, large and failing calls get their own replies."""
    texts = [str(i) * (1 + 30_000 * (i % 7 == 0)) for i in range(200)]

    failing = asyncio.ensure_future(calls.call((b"ECHO",), 5.0))
    assert await asyncio.gather(*(echo(calls, text) for text in texts)) == texts
    with pytest.raises(ResponseError):
        await failing

    assert proxy.accepted == 1


async def test_a_call_without_a_reply_ends_in_time(calls: PipelinedClient, proxy: BadLine) -> None:
    """The next call uses a new connection; other calls on the old one keep their own timeouts."""
    await echo(calls, "first")
    proxy.drop_replies = True
    patient = asyncio.create_task(echo(calls, "patient", 0.4))
    began = time.monotonic()
    with pytest.raises(RedisTimeoutError):
        await echo(calls, "hasty", 0.1)
    assert 0.1 <= time.monotonic() - began < 0.35
    proxy.drop_replies = False

    assert await echo(calls, "next") == "next"
    with pytest.raises(RedisTimeoutError):
        await patient
    assert proxy.accepted == 2


async def test_a_lost_connection_fails_its_calls_and_is_replaced(calls: PipelinedClient, proxy: BadLine) -> None:
    """At once, not after their timeouts; nothing is sent again."""
    await echo(calls, "first")
    proxy.drop_requests = True
    pending = [asyncio.create_task(echo(calls, f"lost{i}")) for i in range(3)]
    await eventually(lambda: any(b"lost2" in sent for sent in proxy.requests), "the calls are sent")
    proxy.drop_requests = False
    proxy.cut()

    errors = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(error) for error in errors] == [RedisConnectionError] * 3
    assert await echo(calls, "again") == "again"
    assert b"".join(proxy.requests).count(b"lost0") == 1


async def test_a_cancelled_blocking_read_pops_nothing(pool: Pool, client: Redis, redis_url: str) -> None:
    """Its connection is closed, so that the server does not pop an item for it."""
    blocking = blocking_client(redis_url)
    read = asyncio.create_task(blocking_read(blocking, b"BLPOP", pool.keys.batch_queue, 5.0, block_s=5.0))

    async def blocked(count: int) -> bool:
        return int((await client.info("clients"))["blocked_clients"]) == count

    await eventually(lambda: blocked(1), "the read blocks")
    read.cancel()
    await asyncio.gather(read, return_exceptions=True)
    await eventually(lambda: blocked(0), "no read blocks")
    await blocking.aclose()


async def test_calls_share_attempts_to_connect(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A hundred concurrent calls, and loops of calls, make few attempts while the server is unavailable. The first call after
    its start connects.
    """
    home = tmp_path_factory.mktemp("late")  # short, for a socket
    server = EmbeddedRedis(home, home / "socket", ephemeral=True)
    client = command_client(server.url)
    attempts = 0

    def make() -> AbstractConnection:
        nonlocal attempts
        attempts += 1
        return client.connection_pool.make_connection()

    calls = PipelinedClient(make, 0.25, lambda error: None)
    failed = await asyncio.gather(*(echo(calls, "x", 0.25) for _ in range(100)), return_exceptions=True)
    assert [type(error) for error in failed] == [RedisConnectionError] * 100
    assert attempts <= 2  # the first may have failed before the other calls were made

    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        with pytest.raises((RedisConnectionError, TimeoutError)):
            await echo(calls, "x", 0.25)
    assert attempts < 60  # of thousands of calls
    await server.start()
    try:
        assert await echo(calls, "back", 5.0) == "back"
    finally:
        calls.close()
        await client.aclose()
        await server.stop()


async def test_a_blocking_read_without_a_server(tmp_path: Path) -> None:
    """It raises RedisUnavailable."""
    client = blocking_client(f"unix://{tmp_path}/socket")

    with pytest.raises(RedisUnavailable):
        await blocking_read(client, b"BLPOP", "batch_queue", 0.1, block_s=0.1)
    await client.aclose()


async def test_a_read_only_server_loses_its_connection(calls: PipelinedClient, proxy: BadLine, client: Redis) -> None:
    """A master that became a replica replies READONLY: the caller gets the error, and the next call connects anew."""
    await client.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(ReadOnlyError):
            await calls.call((b"SET", "a", "b", b"PX", "1000"), 5.0)
    finally:
        await client.replicaof("NO", "ONE")

    assert await calls.call((b"SET", "a", "b", b"PX", "1000"), 5.0) == b"OK"
    assert proxy.accepted == 2
