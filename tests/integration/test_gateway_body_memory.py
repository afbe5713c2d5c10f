"""The memory of request bodies: incomplete ones are freed at once, and the bytes in flight are limited."""

import asyncio
import gc
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiohttp import StreamReader
from redis.asyncio import Redis

from alive import alive
from eventually import eventually
from gateway.http.connection import EdgeConnection
from gateway.http.parsed_request import ParsedRequest
from gateway.http.request_reader import RequestReader
from integration.gateway_fixtures import Stack, head_of, request_bytes, running_stack

SIZE = 200_000
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway that reads 1 MB of bodies at a time from a key, 1.5 MB from a customer and 2 MB in all."""
    async with running_stack(
        client,
        redis_url,
        body_timeout_s=1.5,
        key_body_memory_bytes=1_000_000,
        customer_body_memory_bytes=1_500_000,
        body_memory_bytes=2_000_000,
    ) as running:
        yield running


async def send(stack: Stack, data: bytes) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def status_of(connection: Connection) -> int:
    """Read the status of the next response; a rejection has Retry-After."""
    async with asyncio.timeout(5.0):
        head = await connection[0].readuntil(b"\r\n\r\n")
        if head == CONTINUE:
            return 100
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        status, headers, _ = head_of(head + await connection[0].readexactly(length))
    assert status not in (429, 503) or int(headers["retry-after"]) >= 1
    return status


async def assert_freed(stack: Stack, connections: list[Connection]) -> None:
    """Close the connections and wait until their bodies take no room."""
    for _, writer in connections:
        writer.close()
    await eventually(lambda: stack.gateway.entry.bodies.in_all == 0, "all room is free")


def announced(stack: Stack, tier: str) -> bytes:
    """Return the headers of a request of this tier's customer, whose body is to come."""
    key = stack.key("free")["Authorization"].encode()
    raw = request_bytes(stack, b"Expect: 100-continue", body=b"", length=SIZE)
    return raw.replace(key, stack.key(tier)["Authorization"].encode())


def chunked(stack: Stack, size: int, data: bytes) -> bytes:
    """Return the headers of a request without a length, and the begin of a chunk."""
    raw = request_bytes(stack, b"Transfer-Encoding: chunked", body=b"").replace(b"Content-Length: 0\r\n", b"")
    return raw + b"%x\r\n%s" % (size, data)


def live_objects() -> Counter[str]:
    """Count the objects of connections and requests that are not freed, without a garbage collection."""
    kinds = (StreamReader, ParsedRequest, RequestReader, EdgeConnection)
    return Counter(type(found).__name__ for found in alive(*kinds))


async def abandon(stack: Stack, way: str) -> None:
    """Send most of a body and end the request in this way."""
    data = {
        "broken chunk": chunked(stack, SIZE, b"x" * SIZE + b"\r\n"),
        "too large": chunked(stack, 300_000, b"x" * 270_000),
        "garbage": b"nonsense\r\n\r\n",
    }.get(way, request_bytes(stack, body=b"x" * (SIZE - 1), length=SIZE))
    connection = await send(stack, data)
    edge = stack.gateway._edge
    assert edge is not None
    if way not in ("timeout", "too large", "garbage"):
        await eventually(lambda: len(edge.body_watch) == 1, "the gateway waits for the body")
    if way == "broken chunk":
        connection[1].write(b"zz\r\n")
    elif way == "drain":
        edge.leave()
    elif way == "reset":
        sock = connection[1].get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    status = {"timeout": 408, "too large": 413, "garbage": 400, "broken chunk": 400, "drain": 503}.get(way)
    assert status is None or await status_of(connection) == status
    connection[1].close()
    await eventually(lambda: edge.open_connections == 0, "the connection is gone")


@pytest.mark.parametrize("way", ["timeout", "closed", "reset", "broken chunk", "too large", "drain", "garbage"])
async def test_incomplete_bodies_are_freed_at_once(stack: Stack, way: str) -> None:
    """No reference cycle of an exception and its frames keeps an incomplete body until the next garbage collection."""
    await abandon(stack, way)
    gc.collect()
    before = live_objects()
    gc.disable()
    try:
        for _ in range(3):
            await abandon(stack, way)
        await eventually(lambda: live_objects() == before, "nothing is left", timeout_s=3.0)
    finally:
        gc.enable()
    assert stack.gateway.entry.bodies.in_all == 0


async def test_the_limits_of_a_key_and_of_all(stack: Stack) -> None:
    """Over the limit of its key a body gets 429 before it is read, over the limit of all 503. Others are served."""
    connections = [await send(stack, announced(stack, "free")) for _ in range(6)]
    assert [await status_of(each) for each in connections] == [100] * 5 + [429]
    assert (await stack.infer())[0] == 200  # Its body came with its headers and takes no room.
    connections[0][1].write(b'{"input":"' + b"x" * (SIZE - 12) + b'"}')
    assert await status_of(connections[0]) in (200, 413)
    for tier, expected in [("free", 100), *[("paid", 100)] * 5, ("enterprise", 503)]:
        connections.append(await send(stack, announced(stack, tier)))
        assert await status_of(connections[-1]) == expected
    await assert_freed(stack, connections)


async def test_chunked_bodies_are_counted_as_they_arrive(stack: Stack) -> None:
    """A body of unknown length takes room per chunk and is rejected at the chunk that exceeds the limit."""
    connections = [await send(stack, chunked(stack, SIZE, b"x" * SIZE + b"\r\n")) for _ in range(5)]
    await eventually(lambda: stack.gateway.entry.bodies.in_all == 5 * SIZE, "all are counted")
    connections.append(await send(stack, chunked(stack, 5, b"xxxxx\r\n")))

    assert await status_of(connections[-1]) == 429
    await assert_freed(stack, connections)
