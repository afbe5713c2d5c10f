"""The line to Redis: answers in the order of the calls, calls that nobody waits for, connections that go."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from eventually import eventually
from pool import Pool
from regressions.bad_line import BadLine, bad_line
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import blocking_client, blocking_read, command_client, pipelined
from scheduler.redis_client.pipeline import PipelinedClient
from tierlane.embedded.redis import EmbeddedRedis


@pytest.fixture
async def bad(redis_server: EmbeddedRedis, redis_url: str) -> AsyncIterator[BadLine]:
    """A way to the session's Redis, which the test may spoil."""
    del redis_url  # It is asked for so that Redis is empty.
    async with bad_line(redis_server.socket) as bad:
        yield bad


@pytest.fixture
async def line(bad: BadLine) -> AsyncIterator[PipelinedClient]:
    """The line of a client that goes that way."""
    client = command_client(bad.url)
    yield pipelined(client)
    await client.aclose()


async def echo(line: PipelinedClient, text: str, timeout_s: float = 5.0) -> str:
    answer: bytes = await line.call((b"ECHO", text), timeout_s)
    return answer.decode()


async def test_calls_at_once_share_one_connection_and_get_their_own_answers(
    line: PipelinedClient, bad: BadLine
) -> None:
    """Small ones, large ones and refused ones, in any mixture."""
    texts = [str(i) * (1 + 30_000 * (i % 7 == 0)) for i in range(200)]

    refused = asyncio.ensure_future(line.call((b"ECHO",), 5.0))
    assert await asyncio.gather(*(echo(line, text) for text in texts)) == texts
    with pytest.raises(ResponseError):
        await refused

    assert bad.accepted == 1


async def test_the_answer_to_a_call_that_was_given_up_reaches_nobody(line: PipelinedClient, bad: BadLine) -> None:
    """Cancelled at any moment, its place in the order is kept, and so is the connection."""
    await echo(line, "first")
    bad.delay_s = 0.002
    for i in range(20):
        mine = asyncio.create_task(echo(line, "mine"))
        await asyncio.wait([mine], timeout=i * 0.0002)
        mine.cancel()
        assert await echo(line, "yours") == "yours"
        await asyncio.gather(mine, return_exceptions=True)

    assert bad.accepted == 1


async def test_a_call_without_an_answer_ends_in_time_and_the_next_is_on_a_new_connection(
    line: PipelinedClient, bad: BadLine
) -> None:
    """Whoever else waits on the old one keeps its own time."""
    await echo(line, "first")
    bad.drop_replies = True
    patient = asyncio.create_task(echo(line, "patient", 0.4))
    began = time.monotonic()
    with pytest.raises(RedisTimeoutError):
        await echo(line, "hasty", 0.1)
    assert 0.1 <= time.monotonic() - began < 0.35
    bad.drop_replies = False

    assert await echo(line, "next") == "next"
    with pytest.raises(RedisTimeoutError):
        await patient
    assert bad.accepted == 2


async def test_a_connection_that_is_cut_fails_whoever_waits_and_is_replaced(
    line: PipelinedClient, bad: BadLine
) -> None:
    """At once, not at the end of their time; what was sent is not sent again."""
    await echo(line, "first")
    bad.drop_requests = True
    waiting = [asyncio.create_task(echo(line, f"lost{i}")) for i in range(3)]
    await eventually(lambda: any(b"lost2" in sent for sent in bad.requests), "they are sent")
    bad.drop_requests = False
    bad.cut()

    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [
        RedisConnectionError
    ] * 3
    assert await echo(line, "again") == "again"
    assert b"".join(bad.requests).count(b"lost0") == 1


async def test_a_blocking_read_that_is_given_up_takes_nothing_with_it(
    pool: Pool, client: Redis, redis_url: str
) -> None:
    """The server is told by the end of the connection, so that what comes later goes to who still waits."""
    blocking = blocking_client(redis_url)
    read = asyncio.create_task(blocking_read(blocking, b"BLPOP", pool.keys.batch_queue, 5.0, block_s=5.0))

    async def blocked(count: int) -> bool:
        return int((await client.info("clients"))["blocked_clients"]) == count

    await eventually(lambda: blocked(1), "it blocks")
    read.cancel()
    await asyncio.gather(read, return_exceptions=True)
    await eventually(lambda: blocked(0), "nobody blocks")
    await blocking.aclose()


async def test_nobody_there_is_told_as_such(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No server, no line: RedisUnavailable, and nothing left open."""
    client = blocking_client(f"unix://{tmp_path_factory.mktemp('none')}/socket")

    with pytest.raises(RedisUnavailable):
        await blocking_read(client, b"BLPOP", "batch_queue", 0.1, block_s=0.1)
    await client.aclose()


async def test_calls_that_wait_for_a_server_share_the_attempts_to_connect(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A hundred calls at once on a server that is away do not make a hundred attempts; loops that go on calling, a few in a second."""
    client = command_client(f"unix://{tmp_path_factory.mktemp('none')}/socket")
    attempts = 0

    def make() -> AbstractConnection:
        nonlocal attempts
        attempts += 1
        return client.connection_pool.make_connection()

    line = PipelinedClient(make, 0.25)
    failed = await asyncio.gather(*(echo(line, "x", 0.25) for _ in range(100)), return_exceptions=True)
    assert [type(error) for error in failed] == [RedisConnectionError] * 100
    assert attempts <= 2  # The first may have failed before the others were made.

    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        with pytest.raises((RedisConnectionError, TimeoutError)):
            await echo(line, "x", 0.25)
    assert attempts < 60  # Of many thousand calls that fail at once.
    await client.aclose()


async def test_the_first_call_after_a_server_is_back_connects(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The pause between attempts is well within the time of one call."""
    home = tmp_path_factory.mktemp("late")
    server = EmbeddedRedis(home, home / "socket", ephemeral=True)
    client = command_client(server.url)
    line = pipelined(client)
    for _ in range(10):
        with pytest.raises((RedisConnectionError, TimeoutError)):
            await echo(line, "x", 0.25)
    await server.start()
    try:
        assert await echo(line, "back", 5.0) == "back"
    finally:
        await client.aclose()
        await server.stop()
