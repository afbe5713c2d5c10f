"""What bodies cost in memory: those that are not completed leave nothing behind, and only so many bytes come at a time."""

import asyncio
import gc
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiohttp import StreamReader, web
from redis.asyncio import Redis

from eventually import eventually
from gateway.http.connection import EdgeConnection
from integration.gateway_fixtures import Stack, head_of, running_stack
from integration.test_gateway_edge import CONTINUE, EXPECT, post

SIZE = 200_000
ANNOUNCED = b"HTTP/1.1 100"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway that takes 1 MB of bodies at a time from a key, 1.5 MB from a customer and 2 MB in all."""
    async with running_stack(
        client,
        redis_url,
        body_timeout_s=1.5,
        key_body_memory_bytes=1_000_000,
        customer_body_memory_bytes=1_500_000,
        body_memory_bytes=2_000_000,
    ) as running:
        yield running


class Sender:
    """One request whose body does not come whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, stack: Stack, head: bytes, sent: bytes = b"") -> "Sender":
        """A connection on which this was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(head + sent)
        await writer.drain()
        return cls(reader, writer)

    async def status(self) -> tuple[int, str]:
        """Status and code of the next answer."""
        async with asyncio.timeout(5.0):
            head = await self.reader.readuntil(b"\r\n\r\n")
            if head == CONTINUE:
                return 100, ""
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            status, headers, document = head_of(head + await self.reader.readexactly(length))
        assert status not in (429, 503) or int(headers["retry-after"]) >= 1
        return status, document["error"]["code"] if "error" in document else ""


def announced(stack: Stack, tier: str, *, size: int = SIZE) -> bytes:
    """The head of a request of this tier's customer whose body is to come."""
    mine = stack.key("free")["Authorization"].encode()
    return post(stack, EXPECT, body=b"", length=size).replace(mine, stack.key(tier)["Authorization"].encode())


def chunked(stack: Stack) -> bytes:
    """The head of a request whose length is not said."""
    return post(stack, b"Transfer-Encoding: chunked", body=b"").replace(b"Content-Length: 0\r\n", b"")


def of_connections() -> Counter[str]:
    """What belongs to connections and requests and has not been freed, without a look of the garbage collector."""
    kinds = (StreamReader, web.BaseRequest, EdgeConnection)
    return Counter(type(found).__name__ for found in gc.get_objects() if type(found) in kinds)


async def abandon(stack: Stack, way: str) -> None:
    """Send most of a body, and then what the way is named."""
    head, begun = post(stack, body=b"", length=SIZE), b"x" * (SIZE - 1)
    if way == "broken":
        head, begun = chunked(stack), b"%x\r\n%s\r\n" % (SIZE, b"x" * SIZE)
    if way == "too large":
        head, begun = chunked(stack), b"%x\r\n%s" % (300_000, b"x" * 270_000)
    if way == "garbage":
        head, begun = b"nonsense", b"\r\n\r\n"
    sender = await Sender.of(stack, head, begun)
    edge = stack.gateway._edge
    assert edge is not None
    if way in ("timeout", "too large", "garbage"):
        assert (await sender.status())[0] == {"timeout": 408, "too large": 413, "garbage": 400}[way]
    else:
        await eventually(lambda: len(edge.body_watch) == 1, "it is waited for")
        if way == "broken":
            sender.writer.write(b"zz\r\n")
            assert (await sender.status())[0] == 400
        elif way == "draining":
            edge.leave()
            assert (await sender.status())[0] == 503
        elif way == "reset":
            line = sender.writer.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sender.writer.close()
    await eventually(lambda: edge.open_connections == 0, "it is gone")


@pytest.mark.parametrize("way", ["timeout", "closed", "reset", "broken", "too large", "draining", "garbage"])
async def test_bodies_that_are_not_completed_are_freed_at_once(stack: Stack, way: str) -> None:
    """However they end: no ring of an error and its frames keeps them until the collector looks."""
    await abandon(stack, way)
    gc.collect()
    before = of_connections()
    gc.disable()
    try:
        for _ in range(3):
            await abandon(stack, way)
        await eventually(lambda: of_connections() == before, "nothing is left", timeout_s=3.0)
    finally:
        gc.enable()
    assert stack.gateway.inference.bodies.in_all == 0


async def test_a_key_sends_only_so_much_at_a_time(stack: Stack) -> None:
    """429 before the body is read, while other customers are served; what has ended makes room."""
    senders = [await Sender.of(stack, announced(stack, "free")) for _ in range(5)]
    assert [await each.status() for each in senders] == [(100, "")] * 5
    over = await Sender.of(stack, announced(stack, "free"))
    assert await over.status() == (429, "rate_limit_exceeded")
    other = await Sender.of(stack, announced(stack, "paid"))
    assert await other.status() == (100, "")
    assert (await stack.infer())[0] == 200  # It came whole: it needs no room.
    senders[0].writer.write(b'{"input":"' + b"x" * (SIZE - 12) + b'"}')
    assert (await senders[0].status())[0] in (200, 413)
    again = await Sender.of(stack, announced(stack, "free"))
    assert await again.status() == (100, "")
    for each in (*senders, over, other, again):
        each.writer.close()
    await eventually(lambda: stack.gateway.inference.bodies.in_all == 0, "all is given back")


async def test_all_together_send_only_so_much_at_a_time(stack: Stack) -> None:
    """503 where it is not the customer's own doing."""
    senders = [await Sender.of(stack, announced(stack, tier)) for tier in ("free", "paid") * 5]
    assert [await each.status() for each in senders] == [(100, "")] * 10
    over = await Sender.of(stack, announced(stack, "enterprise"))

    assert await over.status() == (503, "no_capacity")
    for each in (*senders, over):
        each.writer.close()


async def test_a_body_of_unknown_length_is_counted_as_it_comes(stack: Stack) -> None:
    """Chunks take their bytes when they are there, and are rejected in the middle where there is no room."""
    edge = stack.gateway._edge
    assert edge is not None
    begun = [await Sender.of(stack, chunked(stack), b"%x\r\n%s\r\n" % (SIZE, b"x" * SIZE)) for _ in range(5)]
    await eventually(lambda: stack.gateway.inference.bodies.in_all == 5 * SIZE, "all are counted")
    over = await Sender.of(stack, chunked(stack), b"5\r\nxxxxx\r\n")

    assert await over.status() == (429, "rate_limit_exceeded")
    for each in (*begun, over):
        each.writer.close()
    await eventually(lambda: stack.gateway.inference.bodies.in_all == 0, "all is given back")
