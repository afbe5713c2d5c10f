"""The life of a connection: each has a deadline in every state, and each complete request gets its answer."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from redis.asyncio import Redis

from eventually import eventually
from gateway.http.server import EdgeServer
from integration.gateway_fixtures import Stack, head_of, running_stack
from integration.test_gateway_edge import post

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
HALF_A_HEAD = b"POST /v1/inference HTTP/1.1\r\nHost: gat"
UNDECODABLE = [
    b"GET http://xn--/livez HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET https://a.xn--a-ecp.ru.xn--/ HTTP/1.0\r\n\r\n",
    b"CONNECT xn--:80 HTTP/1.1\r\nHost: a\r\n\r\n",
]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway with short deadlines, a long idle timeout, and a worker behind it."""
    async with running_stack(
        client, redis_url, header_timeout_s=0.3, body_timeout_s=5.0, write_timeout_s=0.4, idle_timeout_s=30.0
    ) as running:
        yield running


def edge_of(stack: Stack) -> EdgeServer:
    """The HTTP server of the gateway."""
    edge = stack.gateway._edge
    assert edge is not None
    return edge


def answers(raw: bytes) -> list[int]:
    """The statuses of all answers in what was received."""
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


async def half_closed(stack: Stack, *pieces: bytes, wait_s: float = 5.0) -> bytes:
    """Send, end the sending side, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
    try:
        async with asyncio.timeout(wait_s):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("raw", UNDECODABLE)
async def test_aiohttp_leaves_a_connection_open_for_good_where_the_host_cannot_be_decoded(raw: bytes) -> None:
    """Aiohttp alone: the task of the connection ends by an exception, and nobody closes the connection.

    When this fails aiohttp has mended it, and the check of the target in gateway/http/connection.py can go.
    """

    async def handler(_: web.BaseRequest) -> web.Response:
        return web.Response()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    server = web.Server(handler, keepalive_timeout=0.1, access_log=None)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(raw)

    def ended() -> bool:
        connections: list[RequestHandler] = server.connections
        return bool(connections) and all(each._task_handler and each._task_handler.done() for each in connections)

    await eventually(ended, "the task of the connection has ended")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await reader.read()
    (connection,) = server.connections
    assert connection._task_handler is not None
    assert isinstance(connection._task_handler.exception(), ValueError)
    writer.close()
    await eventually(lambda: not server.connections, "the connection is gone")
    await runner.cleanup()


@pytest.mark.parametrize("raw", UNDECODABLE)
async def test_a_target_whose_host_cannot_be_decoded_is_rejected(stack: Stack, raw: bytes) -> None:
    """400 that names the target, and the connection ends; a request before it on the connection has its answer."""
    status, headers, document = head_of(await stack.raw(raw))

    assert (status, document["error"]["code"], headers["connection"]) == (400, "invalid_request", "close")
    assert "target" in document["error"]["message"]
    assert answers(await stack.raw(LIVEZ + raw)) == [200, 400]


async def test_a_connection_whose_task_ends_by_a_fault_is_closed_and_logged(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ends the task of a connection ends the connection too, and leaves a line in the log."""
    what_it_says = "Can" + "ary"

    def broken(*_: Any) -> web.BaseRequest:
        raise RuntimeError(what_it_says)

    monkeypatch.setattr(edge_of(stack), "request_factory", broken)

    assert await stack.raw(LIVEZ) == b""
    await eventually(lambda: edge_of(stack).open_connections == 0, "no connection is left")
    logged = capsys.readouterr().out
    assert "RuntimeError" in logged
    assert "Canary" not in logged


async def test_an_answer_that_nobody_reads_does_not_keep_a_closed_connection(stack: Stack) -> None:
    """A client that fills its line with answers and then starts a head: closed by the header deadline, then dropped."""
    line = socket.create_connection(("127.0.0.1", stack.gateway.port))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    line.setblocking(False)
    (connection,) = await eventually(lambda: edge_of(stack).connections, "it is connected")
    transport = connection.transport
    assert transport is not None
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    transport.set_write_buffer_limits(high=1 << 24)  # It is never full, so no answer is overdue.
    asking = b"GET /docs HTTP/1.1\r\nHost: a\r\n\r\n"

    def asked() -> bool:
        with contextlib.suppress(BlockingIOError):
            line.send(asking)
        return transport.get_write_buffer_size() > 0

    await eventually(asked, "an answer waits to be read")
    line.send(b"G")
    await eventually(lambda: edge_of(stack).open_connections == 0, "the connection is dropped", timeout_s=4.0)
    line.close()


@pytest.mark.parametrize("first", ["ride", "handler", "chunked"])
@pytest.mark.parametrize("apart", [False, True])
async def test_half_a_head_behind_a_whole_request_has_the_deadline_of_any_head(
    stack: Stack, first: str, *, apart: bool
) -> None:
    """The request is answered; the half head gets 408 in time, whether it came with it or while it was answered."""
    whole = {
        "ride": post(stack),
        "handler": LIVEZ,
        "chunked": post(stack, b"Transfer-Encoding: chunked", body=b"").replace(b"Content-Length: 0\r\n", b"")
        + b'11\r\n{"input":"hello"}\r\n0\r\n\r\n',
    }[first]
    if not apart:
        assert answers(await stack.raw(whole + HALF_A_HEAD, wait_s=3.0)) == [200, 408]
        return
    stack.worker.hold = True
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(whole)
    if first != "handler":
        await eventually(lambda: len(stack.gateway.pending_requests) == 1, "it waits")
    writer.write(HALF_A_HEAD)
    stack.worker.hold = False
    async with asyncio.timeout(3.0):
        assert answers(await reader.read()) == [200, 408]
    writer.close()


async def test_a_connection_that_stays_between_two_requests_is_not_hurried(stack: Stack) -> None:
    """Whatever was sent in whatever pieces: an idle connection without a begun head keeps the idle timeout."""
    chunked = post(stack, b"Transfer-Encoding: chunked", body=b"").replace(b"Content-Length: 0\r\n", b"")
    chunked += b'11\r\n{"input":"hello"}\r\n0\r\n\r\n'
    for sent in ([LIVEZ * 100], [chunked], [chunked[:-9], chunked[-9:]], [post(stack) * 3], [LIVEZ + chunked]):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        for piece in sent:
            writer.write(piece)
            await writer.drain()
        edge = edge_of(stack)
        (connection,) = await eventually(lambda edge=edge: edge.connections, "it is connected")
        await eventually(lambda each=connection: each._request_count > 0 and each._is_idle(), "it is idle again")
        assert len(edge.headers_watch) == 0, sent[0][:40]
        writer.write(LIVEZ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        async with asyncio.timeout(3.0):
            assert set(answers(await reader.read())) == {200}
        writer.close()
        await eventually(lambda edge=edge: edge.open_connections == 0, "it is gone")


@pytest.mark.parametrize("lines", [(), (b"Idempotency-Key: half",), (b"Connection: close",)])
async def test_a_request_whose_client_ends_its_sending_side_is_answered(stack: Stack, lines: tuple[bytes, ...]) -> None:
    """A half-closed connection gets the answers to all complete requests, then ends."""
    status, headers, document = head_of(await half_closed(stack, post(stack, *lines)))

    assert (status, headers["connection"], document["output"]) == (200, "close", "olleh")
    assert edge_of(stack).open_connections == 0


async def test_all_complete_requests_of_a_half_closed_connection_are_answered(stack: Stack) -> None:
    """Pipelined ones in their order; what is incomplete behind them is a bad request or nothing, and nothing is held."""
    assert answers(await half_closed(stack, LIVEZ * 3)) == [200, 200, 200]
    assert answers(await half_closed(stack, post(stack) * 3)) == [200, 200, 200]
    assert answers(await half_closed(stack, post(stack), HALF_A_HEAD)) == [200]
    assert answers(await half_closed(stack, post(stack) + post(stack, body=b"{", length=9))) in ([200, 400], [200])
    assert await half_closed(stack, HALF_A_HEAD) == b""
    assert await half_closed(stack, post(stack, body=b"{", length=9)) == b""
    await eventually(lambda: edge_of(stack).open_connections == 0, "no connection is left")


async def test_a_half_closed_client_gets_a_late_answer_too(stack: Stack) -> None:
    """It is sent interim answers meanwhile, by which one that has left is found out; clients of HTTP/1.1 skip them."""
    stack.worker.hold = True
    waiting = asyncio.create_task(half_closed(stack, post(stack)))
    await eventually(lambda: len(stack.gateway.pending_requests) == 1, "it waits")
    await eventually(lambda: len(edge_of(stack).left_watch) == 1, "its end is seen")
    await eventually(lambda: len(edge_of(stack).left_watch) == 0, "it was looked after")
    stack.worker.hold = False
    *interim, last = (await waiting).split(b"HTTP/1.1 ")[1:]

    assert {each[:3] for each in interim} == {b"100"}
    assert json.loads(last.partition(b"\r\n\r\n")[2])["output"] == "olleh"


@pytest.mark.parametrize("lines", [(), (b"Idempotency-Key: gone",)])
async def test_a_client_that_closes_its_connection_is_found_out(stack: Stack, lines: tuple[bytes, ...]) -> None:
    """On the line that looks like one that only stopped sending; its request ends all the same."""
    stack.worker.hold = True
    _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(post(stack, *lines))
    await eventually(lambda: len(stack.gateway.pending_requests) == 1, "it waits")
    writer.close()

    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "nobody waits", timeout_s=2.0)
    assert edge_of(stack).open_connections == 0


@pytest.mark.parametrize("garbage", [b"garbage\r\n\r\n", b"\x00\x01\x02", b"GET / HTTP/9.9\r\n\r\n"])
async def test_a_valid_request_with_garbage_behind_it_has_its_answer(stack: Stack, garbage: bytes) -> None:
    """The garbage gets 400, once, and the end of the connection."""
    for valid in (LIVEZ, post(stack), post(stack, b"Idempotency-Key: k"), LIVEZ + post(stack)):
        raw = await stack.raw(valid + garbage)
        assert answers(raw) == [200] * (1 + (valid.count(b"HTTP/1.1") > 1)) + [400]
        assert json.loads(raw.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


async def test_a_broken_chunk_that_comes_before_its_handler_has_begun_is_told_at_once(stack: Stack) -> None:
    """However late the loop gets round to the handler: the body that broke has an end, not a deadline."""
    (rule,) = [post(stack, b"Transfer-Encoding: chunked", body=b"").replace(b"Content-Length: 0\r\n", b"")]
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    (connection,) = await eventually(lambda: edge_of(stack).connections, "it is connected")
    await eventually(connection._is_idle, "it waits for a request")
    for piece in (rule, b'5\r\n{"inp\r\n', b"zz\r\n"):  # As from a socket that is read before the handler runs.
        connection.data_received(piece)
    async with asyncio.timeout(2.0):
        status, _, document = head_of(await reader.read())
    writer.close()

    assert (status, document["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    "line",
    [
        b"GET /livez HTTP/2.0",
        b"GET /livez HTTP/0.9",
        b"GET /livez RTSP/1.0",
        b"GET /livez RTSP/1.1",
        b"OPTIONS * RTSP/1.0",
        b"GET /livez",
    ],
)
async def test_other_protocols_and_versions_are_rejected(stack: Stack, line: bytes) -> None:
    """400 that says which are spoken, also in pieces and behind a valid request."""
    raw = line + b"\r\nHost: a\r\n\r\n"
    status, headers, document = head_of(await stack.raw(raw))
    assert (status, headers["connection"]) == (400, "close")
    assert "HTTP/1.1" in document["error"]["message"]
    assert answers((await stack.raw(LIVEZ + raw)).replace(b"HTTP/1.0 and HTTP/1.1", b"")) == [200, 400]
    for cut in range(1, len(line) + 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        (connection,) = await eventually(lambda: edge_of(stack).connections, "it is connected")
        await eventually(connection._is_idle, "it waits for a request")
        connection.data_received(raw[:cut])
        connection.data_received(raw[cut:])
        async with asyncio.timeout(3.0):
            assert head_of(await reader.read())[0] == 400, raw[:cut]
        writer.close()
        await eventually(lambda: edge_of(stack).open_connections == 0, "it is gone")


@pytest.mark.parametrize("protocol", [b"HTTP/2.0", b"RTSP/1.1"])
async def test_other_protocols_do_not_ride(stack: Stack, protocol: bytes) -> None:
    """Not on the way without aiohttp's task, nor past the parser when such a head came before."""
    other = post(stack).replace(b"HTTP/1.1", protocol, 1)
    for _ in range(2):
        assert head_of(await stack.raw(other))[0] == 400
    assert len(edge_of(stack).header_cache) == 0
    assert answers(await stack.raw(post(stack, b"Connection: close"))) == [200]


async def test_a_body_may_speak_of_other_protocols(stack: Stack) -> None:
    """Only the request line says which protocol it is."""
    body = json.dumps({"input": "POST /v1/inference RTSP/1.0\r\nGET / RTSP/1.0"}, indent=1).encode()
    for lines in ((), (b"Idempotency-Key: k",)):
        assert answers(await stack.raw(post(stack, b"Connection: close", *lines, body=body))) == [200]


async def test_bodies_behind_a_request_that_is_being_answered_are_not_taken_in(stack: Stack) -> None:
    """A client that pipelines large bodies is not read further than a little ahead, and all are answered in the end."""
    stack.worker.hold = True
    large = post(stack, b"Idempotency-Key: %d", body=b'{"input":"' + b"x" * 100_000 + b'"}')
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(post(stack, b"Idempotency-Key: first") + b"".join(large % number for number in range(40)))
    await eventually(lambda: len(stack.gateway.pending_requests) == 1, "the first waits")
    (connection,) = edge_of(stack).connections
    await eventually(lambda: connection._buffer_paused, "it is not read on")
    assert sum(body.total_bytes for _, body in connection._messages) < 600_000
    stack.worker.hold = False
    writer.write(LIVEZ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    async with asyncio.timeout(20.0):
        assert answers(await reader.read()) == [200] * 42
    writer.close()
