"""The fast lane: who rides, that a ride says what the handler says, and what happens when a ride is disturbed."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.app import Gateway
from gateway.inference.pipeline import InferenceCall
from integration.gateway_fixtures import Stack, head_of, running_stack

BODY = b'{"input":"hello"}'
VARYING = {"date", "x-request-id", "server-timing", "connection", "content-length"}


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway with a short idle timeout and a worker behind it."""
    async with running_stack(client, redis_url, idle_timeout_s=0.4) as running:
        yield running


class Client:
    """One connection that reads one answer at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, stack: Stack) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", stack.gateway.port))

    async def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and document of the next answer."""
        async with asyncio.timeout(5.0):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return head_of(head + await self.reader.readexactly(int(length.split(b":")[1])))


def request(stack: Stack, *lines: bytes, body: bytes = BODY, key: bytes | None = None) -> bytes:
    """A request that may ride, with these header lines added."""
    head = [
        b"POST /v1/inference HTTP/1.1",
        b"Host: gateway",
        b"Authorization: " + (stack.key()["Authorization"].encode() if key is None else key),
        b"Content-Length: " + str(len(body)).encode(),
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def handled(gateway: Gateway) -> int:
    """How many requests went through aiohttp's task for their connection."""
    edge = gateway._edge
    assert edge is not None
    return int(edge.requests_count or 0)


async def test_a_plain_request_rides_and_the_next_one_too(stack: Stack) -> None:
    """No task of aiohttp's is woken for neither of them, and the connection stays open."""
    client = await Client.of(stack)
    for _ in range(2):
        client.writer.write(request(stack))
        status, headers, document = await client.answer()
        assert (status, document["output"], headers.get("connection")) == (200, "olleh", None)
        assert headers["x-request-id"] == document["request_id"]
    client.writer.close()

    assert (handled(stack.gateway), len(stack.gateway.pending_requests)) == (0, 0)


@pytest.mark.parametrize(
    "lines",
    [
        (b"Idempotency-Key: one",),
        (b"Connection: close",),
        (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA"),
    ],
)
async def test_what_is_out_of_the_ordinary_goes_to_the_handler(stack: Stack, lines: tuple[bytes, ...]) -> None:
    """It is answered all the same."""
    client = await Client.of(stack)
    client.writer.write(request(stack, *lines))
    status, _, _ = await client.answer()
    client.writer.close()

    assert (status, handled(stack.gateway)) == (200, 1)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"body": b""},
    {"body": b"{"},
    {"body": b'{"input":""}'},
    {"body": b'{"input":"a","input":"b"}'},
    {"body": b'{"input":"a","colour":1}'},
    {"body": b'{"input":"a","model":"other"}'},
    {"body": b'{"input":"' + b"x" * 140_000 + b'"}'},
    {"body": b'{"input":"' + b"x" * 270_000 + b'"}'},
    {"key": b"Bearer tl_abcdefghijkl_abcdefghijklmnopqrstuvwxyzAB000000"},
    {"key": b"Basic YTpi"},
    {"lines": (b"Content-Type: text/plain",)},
    {"lines": (b"Content-Encoding: gzip",)},
    {"lines": (b"Authorization: Bearer twice",)},
    {"lines": (b"Accept: application/problem+json",), "body": b"{"},
    {"lines": (b"Accept: application/problem+json",), "key": b"Bearer nothing"},
]


@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_ride_says_what_the_handler_says(stack: Stack, variant: dict[str, Any]) -> None:
    """Status, header names and the error are the same, whichever way the request went."""
    lines = variant.get("lines", ())
    raw = {name: value for name, value in variant.items() if name != "lines"}
    client = await Client.of(stack)
    client.writer.write(request(stack, *lines, **raw))
    ridden = await client.answer()
    client.writer.close()
    answered = head_of(await stack.raw(request(stack, b"Connection: close", *lines, **raw)))

    assert ridden[0] == answered[0]
    assert set(ridden[1]) - VARYING == set(answered[1]) - VARYING
    assert _told(ridden[2]) == _told(answered[2])


def _told(document: dict[str, Any]) -> Any:
    """What of a document does not differ from one request to the next."""
    error = document.get("error", document)
    return [error.get(name) for name in ("code", "type", "param", "message", "status", "output")]


async def test_a_client_that_leaves_is_forgotten_and_its_request_cancelled(stack: Stack) -> None:
    """Nothing waits for it any more, and the worker is not given it."""
    stack.worker.hold = True
    client = await Client.of(stack)
    client.writer.write(request(stack))
    await eventually(
        lambda: any(pending.accepted for pending in stack.gateway.pending_requests.all()), "it is accepted"
    )
    (pending,) = stack.gateway.pending_requests.all()
    client.writer.transport.abort()

    async def cancelled() -> bool:
        _, document = await stack.internal(f"/internal/requests/{pending.id}")
        return document.get("status") == "failed" and document["error"] == "cancelled"

    await eventually(cancelled, "it is cancelled")
    assert (len(stack.gateway.pending_requests), pending.gone) == (0, True)


async def test_what_comes_during_a_ride_is_answered_after_it(stack: Stack) -> None:
    """In order, whether it may ride itself or not, and though it comes in pieces."""
    stack.worker.hold = True
    client = await Client.of(stack)
    client.writer.write(request(stack))
    await eventually(lambda: len(stack.gateway.pending_requests) == 1, "the first waits")
    second = request(stack, body=b'{"input":"second"}')
    client.writer.write(second[:40])
    await client.writer.drain()
    client.writer.write(second[40:] + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    await client.writer.drain()
    stack.worker.hold = False

    assert [(await client.answer())[2].get("output") for _ in range(2)] == ["olleh", "dnoces"]
    assert (await client.answer())[0] == 200
    client.writer.close()


async def test_a_ride_outlives_the_idle_timeout_and_then_the_connection_is_closed(stack: Stack) -> None:
    """Waiting for an answer is not idling; having it is."""
    stack.worker.hold = True
    client = await Client.of(stack)
    client.writer.write(request(stack))
    began = time.monotonic()
    await eventually(lambda: time.monotonic() - began > 0.9, "more than two idle timeouts have passed")
    stack.worker.hold = False

    assert (await client.answer())[0] == 200
    async with asyncio.timeout(3.0):
        assert await client.reader.read() == b""
    client.writer.close()


async def test_a_leaving_gateway_answers_its_rides_and_closes(stack: Stack) -> None:
    """Who rides when it drains gets the answer, told that the connection ends."""
    stack.worker.hold = True
    client = await Client.of(stack)
    client.writer.write(request(stack))
    await eventually(lambda: len(stack.gateway.pending_requests) == 1, "it waits")
    drained = asyncio.create_task(stack.gateway.drain())
    await eventually(lambda: stack.gateway.drain_state.closed, "the doors are closed")
    stack.worker.hold = False
    status, headers, _ = await client.answer()
    await drained

    assert (status, headers["connection"], await client.reader.read()) == (200, "close", b"")
    client.writer.close()


async def test_a_ride_that_is_not_answered_in_time_is_told_so(client: Redis, redis_url: str) -> None:
    """The deadline sweep ends rides like everybody else."""
    async with running_stack(client, redis_url, total_ms=300) as running:
        running.worker.hold = True
        asking = await Client.of(running)
        asking.writer.write(request(running))
        status, _, document = await asking.answer()
        asking.writer.close()

    assert (status, document["error"]["code"]) == (504, "deadline_exceeded")


def calls_alive() -> list[InferenceCall]:
    """The calls that are in memory now."""
    return [found for found in gc.get_objects() if issubclass(type(found), InferenceCall)]


async def test_rides_leave_no_rings_behind(stack: Stack) -> None:
    """What a request leaves is freed at once: the collector looks rarely, since it would find nothing."""
    client = await Client.of(stack)
    client.writer.write(request(stack))
    await client.answer()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            client.writer.write(request(stack))
            await client.answer()
        assert not calls_alive()
    finally:
        gc.enable()
        client.writer.close()


async def test_rejected_and_abandoned_requests_leave_no_rings_behind(stack: Stack) -> None:
    """The pending request and the call reference each other until it is done, rejected, or its client has left."""
    leaving = await Client.of(stack)
    stack.worker.hold = True
    gc.collect()
    gc.disable()
    try:
        leaving.writer.write(request(stack))
        await eventually(lambda: len(stack.gateway.pending_requests) == 1, "it is pending")
        assert len(calls_alive()) == 1
        leaving.writer.transport.abort()
        await eventually(lambda: not stack.gateway.pending_requests, "its client has left")
        stack.gateway.limits.no_gpu = lambda _: True  # type: ignore[method-assign]
        rejected = await Client.of(stack)
        rejected.writer.write(request(stack))
        assert (await rejected.answer())[0] == 503
        rejected.writer.close()
        await eventually(lambda: not calls_alive(), "all are freed")
    finally:
        gc.enable()


async def test_a_client_that_does_not_read_is_not_answered_without_end(stack: Stack) -> None:
    """With its answers unread the next requests wait in its own socket, and not in our memory."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", stack.gateway.port))
    one = request(stack, body=json.dumps({"input": "x" * 60_000}).encode())
    flood = asyncio.create_task(asyncio.get_running_loop().sock_sendall(sock, one * 400))
    edge = stack.gateway._edge
    assert edge is not None
    try:
        await eventually(lambda: len(edge.write_watch) == 1, "its answers pile up")
        (connection,) = edge.connections
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() < 1_000_000
        assert not flood.done()
    finally:
        flood.cancel()
        sock.close()
