"""The HTTP edge by raw sockets: slow clients, smuggling, duplicates, caps; every refusal is our constant JSON."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.config import GatewayConfig
from gateway.http.errors import ErrorResponses
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, RoutedRequest, Router
from gateway.http.server import EdgeServer, serve
from integration.gateway_fixtures import Stack, head_of, running_stack

BODY = b'{"input":"hello"}'
EXPECT = b"Expect: 100-continue"  # Its answer says that the handler waits for the body now.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway with short deadlines and a worker behind it."""
    async with running_stack(
        client,
        redis_url,
        header_timeout_s=0.3,
        body_timeout_s=0.4,
        write_timeout_s=0.3,
        idle_timeout_s=1.0,
        max_connections=8,
    ) as running:
        yield running


def post(stack: Stack, *lines: bytes, body: bytes = BODY, length: int | None = None) -> bytes:
    """A valid request with these header lines added."""
    size = len(body) if length is None else length
    head = [
        b"POST /v1/inference HTTP/1.1",
        b"Host: gateway",
        b"Authorization: " + stack.key()["Authorization"].encode(),
        b"Content-Length: " + str(size).encode(),
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def test_a_plain_raw_request_is_answered_and_kept_alive(stack: Stack) -> None:
    """Two requests on one connection, the second pipelined behind the first; without Content-Type too."""
    raw = await stack.raw(post(stack) + post(stack, b"Connection: close"))

    first, second = raw.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert b"Connection:" not in first
    assert b"Connection: close" in second
    assert json.loads(first.partition(b"\r\n\r\n")[2])["output"] == "olleh"


@pytest.mark.parametrize(
    "partial",
    [
        b"P",
        b"\r\n" * 100,
        b"POST /v1/inference HTTP/1.1\r\n",
        b"POST /v1/inference HTTP/1.1\r\nHost: gateway\r\nX: y",
    ],
)
async def test_headers_that_do_not_end_get_408(stack: Stack, partial: bytes) -> None:
    """Within the header deadline plus a sweep the connection is told and closed."""
    began = time.monotonic()
    status, headers, document = head_of(await stack.raw(partial))

    assert (status, document["error"]["code"]) == (408, "request_timeout")
    assert (headers["connection"], headers["x-request-id"]) == ("close", document["error"]["request_id"])
    assert 0.25 < time.monotonic() - began < 2.0


async def test_trickled_header_bytes_do_not_move_the_deadline(stack: Stack) -> None:
    """Slowloris: one byte now and then still ends at the deadline."""
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
        status, _, _ = head_of(await reader.read())
    finally:
        trickling.cancel()
        writer.close()
    assert (status, time.monotonic() - began < 2.0) == (408, True)


async def test_a_body_that_does_not_come_gets_408_and_is_never_admitted(stack: Stack) -> None:
    """The body deadline ends the request before admission."""
    status, headers, document = head_of(await stack.raw(post(stack, body=b'{"inp', length=17)))

    assert (status, document["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
    assert (headers["x-should-retry"], stack.gateway.admission.calls) == ("false", 0)


async def test_slow_clients_do_not_slow_others(stack: Stack) -> None:
    """While four connections hang in headers and body, a request is answered as ever."""
    hanging = [asyncio.create_task(stack.raw(part)) for part in (b"P", post(stack, body=b"{", length=9)) * 2]
    status, document, _ = await stack.infer()

    assert (status, document["metadata"]["latency_ms"] < 1000) == (200, True)
    assert {head_of(answer)[0] for answer in await asyncio.gather(*hanging)} == {408}


async def test_answers_of_a_leaving_gateway_end_their_connections(stack: Stack) -> None:
    """Served still, but sent elsewhere for the next request."""
    stack.gateway.drain_state.leaving = True
    status, headers, _ = head_of(await stack.raw(post(stack)))

    assert (status, headers["connection"]) == (200, "close")


async def test_an_idle_connection_is_closed_without_a_word(stack: Stack) -> None:
    """Nothing was asked, so nothing is answered."""
    assert await stack.raw(b"") == b""


CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
        b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\r\n folded\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nCanary \x00: secret\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ],
)
async def test_what_the_parser_refuses_is_our_constant_error(
    stack: Stack, raw: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """400, closed, a request id, and no byte of the input in answer or log."""
    answer = await stack.raw(raw)
    status, headers, document = head_of(answer)

    assert (status, document["error"]["code"]) == (400, "invalid_request")
    assert document["error"]["message"] == "The request is not valid HTTP."
    assert (headers["connection"], headers["x-request-id"]) == ("close", document["error"]["request_id"])
    assert answer.count(b"HTTP/1.1") == 1
    assert "Canary" not in capsys.readouterr().out


async def test_a_second_authorization_header_is_refused(stack: Stack) -> None:
    """Even the same key twice: two readers could see two customers."""
    line = b"Authorization: " + stack.key()["Authorization"].encode()
    status, _, document = head_of(await stack.raw(post(stack, line, b"Connection: close")))

    assert (status, document["error"]["code"], document["error"]["param"]) == (400, "invalid_request", "Authorization")


async def test_a_broken_chunk_is_a_bad_request(stack: Stack) -> None:
    """A chunked body is taken, one that lies about its chunks is not."""
    head = b"\r\n".join(
        [
            b"POST /v1/inference HTTP/1.1",
            b"Host: gateway",
            b"Authorization: " + stack.key()["Authorization"].encode(),
            b"Transfer-Encoding: chunked",
            b"Connection: close\r\n\r\n",
        ]
    )
    status, _, document = head_of(await stack.raw(head + b"11\r\n" + BODY + b"\r\n0\r\n\r\n"))
    assert (status, document["output"]) == (200, "olleh")
    status, _, document = head_of(await stack.raw(head + b"zz\r\n" + BODY))
    assert (status, document["error"]["code"]) == (400, "invalid_request")


async def test_a_chunk_that_breaks_later_is_told_at_once(stack: Stack) -> None:
    """The handler waits already when the parser finds the fault; it does not wait on for the deadline."""
    head = post(stack, EXPECT, body=b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(head)
    assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
    writer.write(b'5\r\n{"inp\r\nzz\r\n')
    status, headers, document = head_of(await reader.read())
    writer.close()

    assert (status, document["error"]["code"], headers["connection"]) == (400, "invalid_request", "close")


@pytest.mark.parametrize(
    ("line", "param"),
    [
        (b"Content-Encoding: identity\r\nContent-Encoding: gzip", "Content-Encoding"),
        (b"Transfer-Encoding: gzip, chunked", "Transfer-Encoding"),
    ],
)
async def test_encodings_do_not_hide_behind_others(stack: Stack, line: bytes, param: str) -> None:
    """Every encoding that is named counts, of the content and of the transfer."""
    raw = post(stack, line, b"Connection: close")
    if param == "Transfer-Encoding":
        raw = raw.replace(b"Content-Length: 17\r\n", b"").replace(BODY, b"11\r\n" + BODY + b"\r\n0\r\n\r\n")
    status, _, document = head_of(await stack.raw(raw))

    assert (status, document["error"]["code"]) == (415, "unsupported_encoding")
    assert document["error"]["param"] == param


async def test_a_key_revoked_while_its_body_comes_is_refused(stack: Stack) -> None:
    """A slow body does not hold a door open that was shut meanwhile."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(post(stack, EXPECT, body=b"", length=len(BODY)))
    assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
    stack.catalog.set(key={"revoked": True})
    writer.write(BODY)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()

    assert (head.startswith(b"HTTP/1.1 401 "), stack.gateway.admission.calls) == (True, 0)


async def test_a_large_body_is_refused_before_it_is_sent(stack: Stack) -> None:
    """A client that asks to continue is told 413 at once; a small one is told to go on."""
    status, headers, document = head_of(await stack.raw(post(stack, EXPECT, body=b"", length=1_000_000)))
    assert (status, document["error"]["code"], headers["connection"]) == (413, "request_too_large", "close")

    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(post(stack, EXPECT, b"Connection: close", body=b"", length=len(BODY)))
    assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
    writer.write(BODY)
    assert head_of(await reader.read())[0] == 200
    writer.close()


async def test_an_upgrade_is_refused(stack: Stack) -> None:
    """No WebSocket here, and nothing behind it is taken for a request."""
    lines = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: abc")
    raw = await stack.raw(post(stack, *lines, body=b"", length=0) + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")

    assert head_of(raw)[0] == 400
    assert raw.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket, h2c"])
async def test_an_offer_to_upgrade_is_ignored_and_ends_the_connection(stack: Stack, protocol: bytes) -> None:
    """Java's client and curl offer HTTP/2: served as HTTP/1.1, and what follows is not left waiting for an answer."""
    lines = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + protocol, b"HTTP2-Settings: AA")
    raw = await stack.raw(post(stack, *lines) + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")

    status, headers, _ = head_of(raw)
    assert (raw.count(b"HTTP/1.1"), status, headers["connection"]) == (1, 200, "close")


@pytest.mark.parametrize(
    ("line", "status", "code", "allow"),
    [
        (b"GET /nowhere HTTP/1.1", 404, "not_found", None),
        (b"GET /v1/inference/ HTTP/1.1", 404, "not_found", None),
        (b"GET /%2e%2e/etc/passwd HTTP/1.1", 404, "not_found", None),
        (b"GET /v1/inference HTTP/1.1", 405, "method_not_allowed", "POST"),
        (b"DELETE /livez HTTP/1.1", 405, "method_not_allowed", "GET, HEAD"),
        (b"PATCH /internal/requests/x HTTP/1.1", 405, "method_not_allowed", "GET"),
    ],
)
async def test_unknown_addresses_and_methods(
    stack: Stack, line: bytes, status: int, code: str, allow: str | None
) -> None:
    """404 and 405 are JSON with a request id; 405 says what is allowed."""
    answered, headers, document = head_of(await stack.raw(line + b"\r\nHost: a\r\nConnection: close\r\n\r\n"))

    assert (answered, document["error"]["code"], headers.get("allow")) == (status, code, allow)
    assert headers["x-request-id"] == document["error"]["request_id"]


async def test_head_has_no_body(stack: Stack) -> None:
    """HEAD /livez answers headers only."""
    raw = await stack.raw(b"HEAD /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert raw.endswith(b"\r\n\r\n")


async def test_http_1_0_is_closed_unless_it_asks_to_stay(stack: Stack) -> None:
    """A client of 1.0 gets its answer and the end of the connection."""
    raw = await stack.raw(b"GET /livez HTTP/1.0\r\n\r\n")

    assert head_of(raw)[1]["connection"] == "close"


async def test_more_connections_than_the_cap_are_turned_away(stack: Stack) -> None:
    """Over the cap: 503 and closed; when one leaves there is room again."""
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


async def ok(call: RoutedRequest) -> HttpResponse:
    return HttpResponse(200, b"{}", [("x-request-id", call.request_id)])


@pytest.mark.parametrize("turns", range(5))
async def test_what_was_just_read_when_the_gateway_leaves_is_answered(turns: int) -> None:
    """Between reading a request and running its handler the loop turns a few times; leaving at any of them is safe."""
    routes = Router()
    routes.add("GET", "/ok", ok)
    config = GatewayConfig(gateway_id="g1", redis_url="", service_token="", port=0, reuse_port=False)
    server = EdgeServer(routes, ErrorResponses(lambda: 0.0), DrainState(), config)
    runner, port = await serve(server, config)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n"
    writer.write(request)
    assert b"200 OK" in await reader.readuntil(b"{}")
    (connection,) = server.connections
    connection.data_received(request)
    for _ in range(turns):
        await asyncio.sleep(0)
    server.leave()
    async with asyncio.timeout(2.0):
        answer = await reader.read()
    writer.close()
    await runner.cleanup()

    assert answer.endswith(b"{}")
