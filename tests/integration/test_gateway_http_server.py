"""The HTTP server by raw sockets: slow clients, request smuggling, body encodings, upgrades and the connection cap."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis

from configs import gateway_config
from eventually import eventually
from gateway.http.error_responses import ErrorResponses
from gateway.http.listening import ACCEPTS, ListeningPort, listen
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, RoutedRequest, Router
from gateway.http.server import EdgeServer, serve
from integration.gateway_fixtures import Stack, head_of, request_bytes, running_stack

BODY = b'{"input":"hello"}'
CHUNKS = b"11\r\n" + BODY + b"\r\n0\r\n\r\n"
EXPECT = b"Expect: 100-continue"  # Its interim response shows that the handler waits for the body.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
UNFINISHED_HEADERS = [
    b"P",
    b"\r\n" * 100,
    b"POST /v1/inference HTTP/1.1\r\n",
    b"POST /v1/inference HTTP/1.1\r\nHost: gateway\r\nX: y",
]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway with short timeouts and a worker."""
    timeouts = {"header_timeout_s": 0.3, "body_timeout_s": 0.4, "write_timeout_s": 0.3, "idle_timeout_s": 1.0}
    async with running_stack(client, redis_url, max_connections=8, **timeouts) as running:
        yield running


def chunked(stack: Stack, *lines: bytes, body: bytes = b"") -> bytes:
    """Return a request with Transfer-Encoding: chunked instead of Content-Length."""
    raw = request_bytes(stack, b"Transfer-Encoding: chunked", *lines, body=b"")
    return raw.replace(b"Content-Length: 0\r\n", b"") + body


async def test_keep_alive_and_pipelining(stack: Stack) -> None:
    """Pipelined requests are answered on one connection, the last one's `Connection: close` ends it."""
    raw = await stack.raw(request_bytes(stack) + request_bytes(stack, b"Connection: close"))

    first, second = raw.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert (b"Connection:" in first, b"Connection: close" in second) == (False, True)
    assert json.loads(first.partition(b"\r\n\r\n")[2])["output"] == "olleh"
    assert head_of(await stack.raw(b"GET /livez HTTP/1.0\r\n\r\n"))[1]["connection"] == "close"
    head = await stack.raw(LIVEZ.replace(b"GET", b"HEAD").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert (head.startswith(b"HTTP/1.1 200 OK\r\n"), head.endswith(b"\r\n\r\n")) == (True, True)


async def test_slow_clients_get_408(stack: Stack) -> None:
    """Unfinished headers and bodies get 408 at their deadline and are not admitted; other requests are not delayed."""
    began = time.monotonic()
    slow = [*UNFINISHED_HEADERS, request_bytes(stack, body=b'{"inp', length=17)]
    hanging = [asyncio.create_task(stack.raw(part)) for part in slow]
    silent = asyncio.create_task(stack.raw(b""))
    status, document, _ = await stack.infer()
    assert (status, document["metadata"]["latency_ms"] < 1000) == (200, True)
    for raw in await asyncio.gather(*hanging):
        status, headers, document = head_of(raw)
        assert (status, document["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
        assert headers["x-request-id"] == document["error"]["request_id"]
    assert 0.25 < time.monotonic() - began < 2.0
    assert stack.gateway.admission.calls == 1
    assert await silent == b""  # An idle connection is closed without a response.


async def test_trickled_bytes_do_not_extend_the_header_deadline(stack: Stack) -> None:
    """A client that sends one header byte now and then (slowloris) gets 408 at the deadline."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    began = time.monotonic()

    async def trickle() -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"POST /v1/inference HTTP/1.1\r\nX: ")
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    try:
        # Not to the end: a byte that crosses the response resets the connection, which ends `read` with an error.
        line = await reader.readuntil(b"\r\n")
    finally:
        trickling.cancel()
        writer.close()
    assert line.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 2.0


async def test_invalid_http_gets_a_constant_error(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Malformed and ambiguous requests get one 400 and the end of the connection; no input is echoed or logged."""
    post = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\n"
    for raw in (
        b"GET / HTTP/9.9\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        post + b"Content-Length: -1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\r\n folded\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nCanary \x00: secret\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ):
        response = await stack.raw(raw)
        status, headers, document = head_of(response)
        assert (status, document["error"]["code"]) == (400, "invalid_request"), raw[:80]
        assert document["error"]["message"] == "The request is not valid HTTP."
        assert (headers["connection"], headers["x-request-id"]) == ("close", document["error"]["request_id"])
        assert response.count(b"HTTP/1.1") == 1
    assert "Canary" not in capsys.readouterr().out


async def test_repeated_and_hidden_headers_are_rejected(stack: Stack) -> None:
    """A second Authorization header is a 400; an encoding in a second header or behind another one is a 415."""
    close = b"Connection: close"
    authorization = b"Authorization: " + stack.key()["Authorization"].encode()
    encodings = request_bytes(stack, b"Content-Encoding: identity\r\nContent-Encoding: br", close)
    transfer = chunked(stack, close, body=CHUNKS).replace(b"Encoding: chunked", b"Encoding: gzip, chunked")
    for raw, expected in (
        (request_bytes(stack, authorization, close), (400, "invalid_request", "Authorization")),
        (encodings, (415, "unsupported_encoding", "Content-Encoding")),
        (transfer, (415, "unsupported_encoding", "Transfer-Encoding")),
    ):
        status, _, document = head_of(await stack.raw(raw))
        assert (status, document["error"]["code"], document["error"]["param"]) == expected


async def test_chunked_bodies(stack: Stack) -> None:
    """A chunked body is read. A broken chunk gets 400, and not the 408 of the body's deadline: in the first read, later, or before its handler runs."""
    status, _, document = head_of(await stack.raw(chunked(stack, b"Connection: close", body=CHUNKS)))
    assert (status, document["output"]) == (200, "olleh")
    responses = [await stack.raw(chunked(stack, body=b"zz\r\n" + BODY))]
    edge = stack.gateway._edge
    assert edge is not None
    for handler_waits in (True, False):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        if handler_waits:
            writer.write(chunked(stack, EXPECT))
            assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
            writer.write(b'5\r\n{"inp\r\nzz\r\n')
        else:
            (connection,) = await eventually(lambda: edge.connections, "it is connected")
            await eventually(lambda each=connection: each.idle, "it waits for a request")
            for piece in (chunked(stack), b'5\r\n{"inp\r\n', b"zz\r\n"):
                connection.data_received(piece)
        responses.append(await reader.read())
        writer.close()
        await eventually(lambda: not edge.connections, "the connection is gone")
    for raw in responses:
        status, headers, document = head_of(raw)
        assert (status, document["error"]["code"], headers["connection"]) == (400, "invalid_request", "close")


async def test_bodies_are_checked_before_and_after_they_arrive(stack: Stack) -> None:
    """`Expect: 100-continue` with a large length gets 413 before the body; a key revoked meanwhile gets 401 after it."""
    longer_than_any_limit = 1_000_000_000
    raw = await stack.raw(request_bytes(stack, EXPECT, body=b"", length=longer_than_any_limit))
    status, headers, document = head_of(raw)
    assert (status, document["error"]["code"], headers["connection"]) == (413, "request_too_large", "close")

    for revoked, expected in ((False, b"200"), (True, b"401")):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(request_bytes(stack, EXPECT, body=b"", length=len(BODY)))
        assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
        stack.catalog.set(key={"revoked": revoked})
        writer.write(BODY)
        assert (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1] == expected
        writer.close()
    assert stack.gateway.admission.calls == 1


async def test_upgrades(stack: Stack) -> None:
    """A WebSocket upgrade is rejected, an offer of HTTP/2 is ignored; both end the connection, and no byte after them is
    read as a request.
    """
    websocket = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: abc")
    for lines, body, status in (
        (websocket, b"", 400),
        ((b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA"), BODY, 200),
        ((b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: websocket, h2c", b"HTTP2-Settings: AA"), BODY, 200),
    ):
        raw = await stack.raw(request_bytes(stack, *lines, body=body) + LIVEZ)
        assert (raw.count(b"HTTP/1.1"), head_of(raw)[0], head_of(raw)[1]["connection"]) == (1, status, "close")


async def test_unknown_paths_and_methods(stack: Stack) -> None:
    """404 and 405 are error documents with a request id; a 405 has Allow."""
    for line, expected in (
        (b"GET /nowhere", (404, "not_found", None)),
        (b"GET /v1/inference/x", (404, "not_found", None)),
        (b"GET /%2e%2e/etc/passwd", (404, "not_found", None)),
        (b"GET /v1/inference", (405, "method_not_allowed", "POST")),
        (b"DELETE /livez", (405, "method_not_allowed", "GET, HEAD")),
    ):
        raw = await stack.raw(line + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        status, headers, document = head_of(raw)
        assert (status, document["error"]["code"], headers.get("allow")) == expected
        assert status == 404 or document["error"]["message"].endswith(f", only {expected[2]}.")
        assert headers["x-request-id"] == document["error"]["request_id"]


async def test_the_connection_cap(stack: Stack) -> None:
    """A connection over the cap gets 503 and is closed; when others have closed, there is room again."""
    held = [await asyncio.open_connection("127.0.0.1", stack.gateway.port) for _ in range(8)]
    try:
        status, _, document = head_of(await stack.raw(b""))
        assert (status, document["error"]["code"]) == (503, "no_capacity")
    finally:
        for _, writer in held:
            writer.close()

    async def room() -> bool:
        return b"200 OK" in await stack.raw(b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    await eventually(room, "there is room again")


class Line:
    """A connection that stays open for several requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def get(self, stack: Stack, tier_name: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        """The response to `GET /v1/models` with the key of the tier's customer."""
        key = stack.key(tier_name)["Authorization"]
        self.writer.write(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: {key}\r\n\r\n".encode())
        return await self.response()

    async def infer(self, stack: Stack, *lines: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
        """The response to an inference of the tier free, which takes the fast path."""
        self.writer.write(request_bytes(stack, *lines))
        return await self.response()

    async def response(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and document of the next response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head_of(head + await self.reader.readexactly(int(length.partition(b":")[2])))


async def test_connections_of_one_customer(client: Redis, redis_url: str) -> None:
    """More than its part get 429 and are closed, on the fast path and beside it; others are served, and room is counted."""
    async with running_stack(client, redis_url, max_connections=8, customer_connections=2) as stack:
        lines = [Line(*await asyncio.open_connection("127.0.0.1", stack.gateway.port)) for _ in range(6)]
        try:
            first, second, third, fourth, fifth, other = lines
            for line in (first, second):  # Each has two requests, and counts once.
                assert [(await line.infer(stack))[0], (await line.get(stack, "free"))[0]] == [200, 200]
            for refused in (await third.infer(stack), await fourth.get(stack, "free")):
                status, headers, document = refused
                assert (status, document["error"]["code"]) == (429, "too_many_connections")
                assert (headers["connection"], 1 <= int(headers["retry-after"]) <= 2) == ("close", True)
            assert [await line.reader.read() for line in (third, fourth)] == [b"", b""]
            assert (await other.get(stack, "paid"))[0] == 200
            assert (await first.get(stack, "paid"))[0] == 200  # A proxy's connection: it has left the tier free.
            assert (await fifth.get(stack, "free"))[0] == 200
        finally:
            for line in lines:
                line.writer.close()

        async def room() -> bool:
            return (await stack.infer())[0] == 200

        await eventually(room, "closed connections count no more")


async def ok(call: RoutedRequest) -> HttpResponse:
    return HttpResponse(200, b"{}", [("x-request-id", call.request_id)])


def new_server() -> EdgeServer:
    """A server with one route."""
    routes = Router()
    routes.add("GET", "/ok", ok)
    return EdgeServer(routes, ErrorResponses(lambda: 0.0), DrainState(), gateway_config())


@pytest.mark.parametrize("turns", range(5))
async def test_a_request_read_just_before_the_drain_is_answered(turns: int) -> None:
    """The event loop turns a few times between reading a request and running its handler; a drain may begin at any."""
    server = new_server()
    port = await serve(server, gateway_config())
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    request = b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n"
    writer.write(request)
    assert b"200 OK" in await reader.readuntil(b"{}")
    (connection,) = server.connections
    connection.data_received(request)
    for _ in range(turns):
        await asyncio.sleep(0)
    server.leave()
    async with asyncio.timeout(2.0):
        response = await reader.read()
    writer.close()
    port.abort()
    await server.shutdown(0.5)

    assert response.endswith(b"{}")


def test_many_connections_are_accepted_in_few_turns_of_the_loop() -> None:
    """Each turn of a busy loop accepts several connections; after shutdown the port is closed."""
    count = 200

    async def turns_until_accepted() -> int:
        server = new_server()
        port = await listen(server, "127.0.0.1", 0, 1024)
        clients = [socket.create_connection(("127.0.0.1", port.number)) for _ in range(count)]
        turns = 0
        while len(server.connections) < count and turns < 10 * count:
            await asyncio.sleep(0)
            turns += 1
        for client in clients:
            client.close()
        port.abort()
        await server.shutdown(0.5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number))
        return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_until_accepted()) <= 2 * count / ACCEPTS


async def test_connections_that_were_not_accepted_are_served() -> None:
    """The kernel completes connections by itself, and would reset them with the port: a load balancer must not repeat the
    requests that it sent on them.
    """
    server = new_server()
    listening = socket.create_server(("127.0.0.1", 0))
    port = ListeningPort(server, [listening])
    clients = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(20)]
    for _, writer in clients:
        writer.write(b"GET /ok HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    await port.close()

    async with asyncio.timeout(5):
        answers = [await reader.read() for reader, _ in clients]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port.number)
    for _, writer in clients:
        writer.close()
    await server.shutdown(0.5)
    assert [each.endswith(b"{}") for each in answers] == [True] * 20
