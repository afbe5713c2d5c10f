"""The fast path: which requests take it, that its responses equal the handler's, and its behaviour in faults."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from alive import alive
from eventually import eventually
from gateway.app import Gateway
from gateway.inference import fast_path
from gateway.inference.call import InferenceCall
from integration.gateway_fixtures import Stack, head_of, running_stack
from ratelimit.request_limits import FUNCTION

BODY = b'{"input":"hello"}'
VARYING = {"date", "x-request-id", "server-timing", "connection", "content-length"}
Response = tuple[int, dict[str, str], dict[str, Any]]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway with a short idle timeout, and a worker."""
    async with running_stack(client, redis_url, idle_timeout_s=0.4) as running:
        yield running


class Client:
    """One connection, which reads one response at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, stack: Stack) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", stack.gateway.port))

    async def response(self) -> Response:
        """Status, headers and document of the next response."""
        async with asyncio.timeout(5.0):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return head_of(head + await self.reader.readexactly(int(length.split(b":")[1])))

    async def send(self, data: bytes) -> Response:
        self.writer.write(data)
        return await self.response()


def request(stack: Stack, *lines: bytes, body: bytes = BODY, key: bytes | None = None) -> bytes:
    """A request for the fast path, with these header lines added."""
    head = [
        b"POST /v1/inference HTTP/1.1",
        b"Host: gateway",
        b"Authorization: " + (stack.key()["Authorization"].encode() if key is None else key),
        b"Content-Length: " + str(len(body)).encode(),
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def handled(gateway: Gateway) -> int:
    """The number of requests that were handled in a task."""
    edge = gateway._edge
    assert edge is not None
    return int(edge.requests_count or 0)


async def held(stack: Stack) -> Client:
    """A client whose request is pending, because the worker is on hold."""
    stack.worker.hold = True
    client = await Client.of(stack)
    client.writer.write(request(stack))
    await eventually(
        lambda: any(pending.accepted for pending in stack.gateway.pending_requests.all()), "it is accepted"
    )
    return client


@pytest.mark.parametrize(
    "lines",
    [
        (b"Idempotency-Key: one",),
        (b"Connection: close",),
        (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA"),
    ],
)
async def test_other_requests_go_to_the_handler(stack: Stack, lines: tuple[bytes, ...]) -> None:
    """With a normal response."""
    client = await Client.of(stack)
    status, _, _ = await client.send(request(stack, *lines))
    client.writer.close()

    assert (status, handled(stack.gateway)) == (200, 1)


@pytest.mark.parametrize(
    ("lines", "changes"),
    [
        ((), {}),
        ((), {"body": b""}),
        ((), {"body": b"{"}),
        ((), {"body": b'{"input":"a","input":"b"}'}),
        ((), {"body": b'{"input":"a","colour":1}'}),
        ((), {"body": b'{"input":"a","model":"other"}'}),
        ((), {"body": b'{"input":"' + b"x" * 140_000 + b'"}'}),
        ((), {"body": b'{"input":"' + b"x" * 270_000 + b'"}'}),
        ((), {"key": b"Bearer tl_abcdefghijkl_abcdefghijklmnopqrstuvwxyzAB000000"}),
        ((), {"key": b"Basic YTpi"}),
        ((b"Content-Type: text/plain",), {}),
        ((b"Content-Encoding: gzip",), {}),
        ((b"Authorization: Bearer twice",), {}),
        ((b"Accept: application/problem+json",), {"body": b"{"}),
        ((b"Accept: application/problem+json",), {"key": b"Bearer nothing"}),
    ],
)
async def test_responses_equal_the_handlers(stack: Stack, lines: tuple[bytes, ...], changes: dict[str, bytes]) -> None:
    """Status, header names and error, for parsed headers and for headers from the cache."""

    def comparable(response: Response) -> tuple[int, set[str], list[Any]]:
        status, headers, document = response
        error = document.get("error", document)
        return (
            status,
            set(headers) - VARYING,
            [error.get(name) for name in ("code", "type", "param", "message", "status", "output")],
        )

    await eventually(lambda: stack.gateway.limits.request == FUNCTION, "the limits are those of the worker")
    handler = comparable(head_of(await stack.raw(request(stack, b"Connection: close", *lines, **changes))))
    data = request(stack, *lines, **changes)
    for sent in (data, request(stack), data, data):
        client = await Client.of(stack)  # Some responses close their connection.
        response = comparable(await client.send(sent))
        client.writer.close()
        assert sent is not data or response == handler


@pytest.mark.parametrize(
    ("path", "body", "in_tasks"),
    [
        (b"/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}]}', 0),
        (b"/v1/completions", b'{"prompt":"a"}', 0),
        (b"/v1/completions", b'{"prompt":["a","b"]}', 0),
        (b"/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"stream":true}', 3),
        (b"/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"\\u0073tream":true}', 3),
        (b"/v1/chat/completions", b'{"messages":[]}', 0),
    ],
)
async def test_other_formats(stack: Stack, path: bytes, body: bytes, in_tasks: int) -> None:
    """Chats and completions take it, also lists; streams do not. Three times, since headers are cached then."""
    data = request(stack, body=body).replace(b"/v1/inference", path)
    handler = await stack.raw(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    before, answers = handled(stack.gateway), list[bytes]()
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        for _ in range(1 if in_tasks else 2):
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), None)
            rest = reader.readexactly(int(length.split()[1])) if length else reader.readuntil(b"0\r\n\r\n")
            answers.append(head + await rest)
        writer.close()

    assert handled(stack.gateway) - before == in_tasks
    assert {answer[:12] for answer in answers} == {handler[:12]}
    assert {len(answer.split(b"data: ")) for answer in answers} == {len(handler.split(b"data: "))}


async def test_a_request_that_waits_for_a_call_of_admission_is_open(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain waits for it, although it is not pending yet; it starts after the time, whatever the call does."""
    monkeypatch.setattr(fast_path, "HOLD_S", 1.0)
    client = await Client.of(stack)
    await client.send(request(stack))
    stack.gateway.admission.in_call = True
    client.writer.write(request(stack))
    await eventually(lambda: stack.gateway.open_requests == 1, "it has arrived")

    assert stack.gateway.pending_requests.all() == []
    stack.gateway.admission.in_call = False
    assert (await client.response())[0] == 200
    client.writer.close()
    assert stack.gateway.open_requests == 0


async def test_a_disconnect_cancels_the_request(stack: Stack) -> None:
    """It is no longer pending, and no worker runs it."""
    client = await held(stack)
    (pending,) = stack.gateway.pending_requests.all()
    client.writer.transport.abort()

    async def cancelled() -> bool:
        _, document = await stack.internal(f"/internal/requests/{pending.id}")
        return document.get("status") == "failed" and document["error"] == "cancelled"

    await eventually(cancelled, "it is cancelled")
    assert (len(stack.gateway.pending_requests), pending.gone) == (0, True)


async def test_pipelined_requests_get_responses_in_order(stack: Stack) -> None:
    """On both paths, and in pieces."""
    client = await held(stack)
    second = request(stack, body=b'{"input":"second"}')
    client.writer.write(second[:40])
    await client.writer.drain()
    client.writer.write(second[40:] + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    await client.writer.drain()
    stack.worker.hold = False

    assert [(await client.response())[2].get("output") for _ in range(2)] == ["olleh", "dnoces"]
    assert (await client.response())[0] == 200
    client.writer.close()


async def test_the_idle_timeout_starts_after_the_response(stack: Stack) -> None:
    """Waiting for a response is not idle; then the connection is closed."""
    client = await held(stack)
    began = time.monotonic()
    await eventually(lambda: time.monotonic() - began > 0.9, "more than two idle timeouts have passed")
    stack.worker.hold = False

    assert (await client.response())[0] == 200
    async with asyncio.timeout(3.0):
        assert await client.reader.read() == b""
    client.writer.close()


async def test_a_drain_waits_for_the_response(stack: Stack) -> None:
    """The response announces that the connection ends."""
    client = await held(stack)
    drained = asyncio.create_task(stack.gateway.drain())
    await eventually(lambda: stack.gateway.drain_state.closed, "the drain has begun")
    stack.worker.hold = False
    status, headers, _ = await client.response()
    await drained

    assert (status, headers["connection"], await client.reader.read()) == (200, "close", b"")
    client.writer.close()


async def test_requests_leave_no_reference_cycles(stack: Stack) -> None:
    """Answered, rejected and abandoned requests are freed at once: the garbage collector runs rarely."""
    client = await Client.of(stack)
    await client.send(request(stack))
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await client.send(request(stack))
        assert not alive(InferenceCall)
        leaving = await held(stack)
        assert len(alive(InferenceCall)) == 1
        leaving.writer.transport.abort()
        await eventually(lambda: not stack.gateway.pending_requests, "its client has left")
        stack.gateway.limits.no_gpu = lambda _: True  # type: ignore[method-assign]
        rejected = await Client.of(stack)
        assert (await rejected.send(request(stack)))[0] == 503
        rejected.writer.close()
        await eventually(lambda: not alive(InferenceCall), "all are freed")
    finally:
        gc.enable()
        client.writer.close()


async def test_a_client_that_does_not_read_is_not_served_further(stack: Stack) -> None:
    """Its next requests stay in its own socket, not in the gateway's memory."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", stack.gateway.port))
    one = request(stack, body=json.dumps({"input": "x" * 60_000}).encode())
    flood = asyncio.create_task(asyncio.get_running_loop().sock_sendall(sock, one * 400))
    edge = stack.gateway._edge
    assert edge is not None
    try:
        await eventually(lambda: len(edge.write_watch) == 1, "its responses are not read")
        (connection,) = edge.connections
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() < 1_000_000
        assert not flood.done()
    finally:
        flood.cancel()
        sock.close()
