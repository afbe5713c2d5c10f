"""The life of a connection: it has a deadline in each state, and each complete request on it gets its response."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.http.body.reading import CONTINUE
from gateway.http.connection import IDLE, PROBES_S
from gateway.http.server import EdgeServer
from integration.gateway_fixtures import Stack, head_of, request_bytes, running_stack

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
LIVEZ_CLOSE = LIVEZ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
HALF_HEADERS = b"POST /v1/inference HTTP/1.1\r\nHost: gat"
KEY = b"Idempotency-Key: k"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway with a short header timeout, a long idle timeout, and a worker."""
    timeouts = {"header_timeout_s": 0.3, "body_timeout_s": 5.0, "write_timeout_s": 0.4, "idle_timeout_s": 30.0}
    async with running_stack(client, redis_url, **timeouts) as running:
        yield running


@pytest.fixture
def server(stack: Stack) -> EdgeServer:
    """The gateway's HTTP server."""
    assert stack.gateway._edge is not None
    return stack.gateway._edge


def chunked(stack: Stack) -> bytes:
    """Return a complete request with a chunked body."""
    raw = request_bytes(stack, b"Transfer-Encoding: chunked", body=b"").replace(b"Content-Length: 0\r\n", b"")
    return raw + b'11\r\n{"input":"hello"}\r\n0\r\n\r\n'


def statuses(raw: bytes) -> list[int]:
    """Return the statuses of all responses received."""
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


async def pending(stack: Stack, count: int = 1) -> None:
    await eventually(lambda: len(stack.gateway.pending_requests) == count, f"{count} requests are pending")


async def half_closed(stack: Stack, *pieces: bytes) -> bytes:
    """Send, close the sending side, and read until the server closes; without interim responses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
    try:
        async with asyncio.timeout(5.0):
            return (await reader.read()).replace(CONTINUE, b"")
    finally:
        writer.close()


async def test_an_undecodable_host_is_rejected(stack: Stack) -> None:
    """Regression: aiohttp 3.14.5 ended the connection's task by an exception and left the connection open for good."""
    for raw in (
        b"GET http://xn--/livez HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET https://a.xn--a-ecp.ru.xn--/ HTTP/1.0\r\n\r\n",
        b"CONNECT xn--:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    ):
        status, headers, document = head_of(await stack.raw(raw))
        assert (status, document["error"]["code"], headers["connection"]) == (400, "invalid_request", "close")
        assert "target" in document["error"]["message"]
        assert statuses(await stack.raw(LIVEZ + raw)) == [200, 400]


async def test_a_fault_in_the_connections_task_closes_it(
    stack: Stack, server: EdgeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception in the task of a connection closes the connection and is logged by its type, not its message."""
    message = "Can" + "ary"

    def broken(*_: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(server, "handle", broken)

    assert await stack.raw(LIVEZ) == b""
    await eventually(lambda: server.open_connections == 0, "no connection is left")
    output = capsys.readouterr().out
    assert ("RuntimeError" in output, message in output) == (True, False)


async def test_an_unread_response_does_not_keep_a_connection(stack: Stack, server: EdgeServer) -> None:
    """A client that reads nothing and then sends half of a request's headers is dropped at the header deadline."""
    sock = socket.create_connection(("127.0.0.1", stack.gateway.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    (connection,) = await eventually(lambda: server.connections, "it is connected")
    transport = connection.transport
    assert transport is not None
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    transport.set_write_buffer_limits(high=1 << 24)  # It is never full, so no response is overdue.

    def unread() -> bool:
        with contextlib.suppress(BlockingIOError):
            sock.send(b"GET /docs HTTP/1.1\r\nHost: a\r\n\r\n")
        return transport.get_write_buffer_size() > 0

    await eventually(unread, "a response waits to be read")
    sock.send(b"G")
    await eventually(lambda: server.open_connections == 0, "the connection is dropped", timeout_s=4.0)
    sock.close()


async def test_half_headers_behind_a_request_have_the_header_deadline(stack: Stack) -> None:
    """The request is answered and the unfinished one gets 408, whether it came with the first or while that ran."""
    for first in (request_bytes(stack), LIVEZ, chunked(stack)):
        assert statuses(await stack.raw(first + HALF_HEADERS, wait_s=3.0)) == [200, 408]
    for first in (request_bytes(stack), chunked(stack)):
        stack.worker.hold = True
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(first)
        await pending(stack)
        writer.write(HALF_HEADERS)
        stack.worker.hold = False
        async with asyncio.timeout(3.0):
            assert statuses(await reader.read()) == [200, 408]
        writer.close()


async def test_an_idle_connection_has_no_header_deadline(stack: Stack, server: EdgeServer) -> None:
    """After complete requests, in any pieces, no header deadline runs on the connection, and it has no task."""
    whole = chunked(stack)
    for pieces in ([LIVEZ * 100], [whole[:-9], whole[-9:]], [request_bytes(stack) * 3], [LIVEZ + whole]):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        (connection,) = await eventually(lambda: server.connections, "it is connected")
        await eventually(
            lambda each=connection: each._state == IDLE and (each._reader or each._repeated), "it is idle again"
        )
        assert (len(server.headers_watch), connection.task) == (0, None), pieces[0][:40]
        writer.close()
        await eventually(lambda: server.open_connections == 0, "it is gone")


async def test_half_closed_connections(stack: Stack, server: EdgeServer) -> None:
    """All complete requests of a client that closed its sending side are answered; incomplete ones are dropped."""
    incomplete = request_bytes(stack, body=b"{", length=9)
    for lines in ((), (KEY,), (b"Connection: close",)):
        status, headers, document = head_of(await half_closed(stack, request_bytes(stack, *lines)))
        assert (status, headers["connection"], document["output"]) == (200, "close", "olleh")
    assert statuses(await half_closed(stack, LIVEZ * 3)) == [200, 200, 200]
    assert statuses(await half_closed(stack, request_bytes(stack) * 3)) == [200, 200, 200]
    assert statuses(await half_closed(stack, request_bytes(stack), HALF_HEADERS)) == [200]
    assert statuses(await half_closed(stack, request_bytes(stack) + incomplete)) in ([200, 400], [200])
    assert [await half_closed(stack, part) for part in (HALF_HEADERS, incomplete)] == [b"", b""]
    await eventually(lambda: server.open_connections == 0, "no connection is left")


async def test_a_half_closed_client_gets_a_late_response(stack: Stack) -> None:
    """Interim responses, which find out whether the client has closed its socket, come before the response."""
    stack.worker.hold = True
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(request_bytes(stack))
    writer.write_eof()
    async with asyncio.timeout(5.0):
        for _ in PROBES_S:
            assert statuses(await reader.readuntil(b"\r\n\r\n")) == [100]
        stack.worker.hold = False
        raw = await reader.read()
    writer.close()

    assert statuses(raw) == [200]
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["output"] == "olleh"


@pytest.mark.parametrize("lines", [(), (KEY,)])
async def test_a_closed_client_is_noticed(stack: Stack, server: EdgeServer, lines: tuple[bytes, ...]) -> None:
    """A closed socket looks like a half-closed one at first; its request is cancelled within two seconds."""
    stack.worker.hold = True
    _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(request_bytes(stack, *lines))
    await pending(stack)
    writer.close()

    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "no request is pending", timeout_s=2.0)
    assert server.open_connections == 0


async def test_garbage_behind_a_valid_request(stack: Stack) -> None:
    """The valid requests are answered; the garbage gets one 400 and the end of the connection."""
    post = request_bytes(stack)
    for garbage in (b"garbage\r\n\r\n", b"\x00\x01\x02", b"GET / HTTP/9.9\r\n\r\n"):
        for valid, count in ((LIVEZ, 1), (post, 1), (request_bytes(stack, KEY), 1), (LIVEZ + post, 2)):
            raw = await stack.raw(valid + garbage)
            assert statuses(raw) == [200] * count + [400]
            assert json.loads(raw.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


async def test_other_protocols_are_rejected(stack: Stack, server: EdgeServer) -> None:
    """Request lines of RTSP and of other HTTP versions get 400, also cut anywhere and behind another request, and do not
    enter the header cache. In a body such a line is data.
    """
    for line in (b"GET /livez HTTP/2.0", b"GET /livez HTTP/0.9", b"GET /livez", b"OPTIONS * RTSP/1.0"):
        raw = line + b"\r\nHost: a\r\n\r\n"
        for cut in range(len(line) + 2):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
            (connection,) = await eventually(lambda: server.connections, "it is connected")
            await eventually(lambda each=connection: each.idle, "it waits for a request")
            connection.data_received(raw[:cut] or LIVEZ)
            connection.data_received(raw[cut:])
            async with asyncio.timeout(3.0):
                *before, last = (await reader.read()).replace(b"HTTP/1.0 and HTTP/1.1", b"").split(b"HTTP/1.1 ")[1:]
            assert (last[:3], [each[:3] for each in before]) == (b"400", [] if cut else [b"200"]), raw[:cut]
            writer.close()
            await eventually(lambda: server.open_connections == 0, "it is gone")
    for protocol in (b"HTTP/2.0", b"RTSP/1.1") * 2:
        assert head_of(await stack.raw(request_bytes(stack).replace(b"HTTP/1.1", protocol, 1)))[0] == 400
    assert len(server.header_cache) == 0
    body = json.dumps({"input": "POST /v1/inference RTSP/1.0\r\nGET / RTSP/1.0"}, indent=1).encode()
    for lines in ((), (KEY,)):
        assert statuses(await stack.raw(request_bytes(stack, b"Connection: close", *lines, body=body))) == [200]


async def test_pipelined_bodies_are_not_read_ahead(stack: Stack, server: EdgeServer) -> None:
    """While a request runs, only a bounded part of the large bodies behind it is read; all are answered in the end."""
    stack.worker.hold = True
    large = request_bytes(stack, b"Idempotency-Key: %d", body=b'{"input":"' + b"x" * 100_000 + b'"}')
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(request_bytes(stack, KEY) + b"".join(large % number for number in range(40)))
    await pending(stack)
    (connection,) = server.connections
    await eventually(lambda: connection._reader and connection._reader._transport_paused, "reading is paused")
    assert connection._reader.held_bytes < 600_000
    stack.worker.hold = False
    writer.write(LIVEZ_CLOSE)
    async with asyncio.timeout(20.0):
        assert statuses(await reader.read()) == [200] * 42
    writer.close()
