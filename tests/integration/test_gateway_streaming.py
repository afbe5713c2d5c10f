"""The gateway's side of a stream: bytes, pings, foreign increments, replays, slow readers, deadlines and drains."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.direct_mode_fixtures import Direct, direct
from integration.gateway_fixtures import Stack, accepted, caller, model, openai_client, running_stack, stack
from metrics_figures import total
from scheduler.protocol.batches import Outcome
from scheduler.protocol.increments import Increment, IncrementChannel
from scheduler.redis_client.keys import Keys

__all__ = ["caller", "direct", "stack"]

BODY = b'{"model": "tiny", "prompt": "olleh", "stream": true}'


async def streamed(caller: openai.AsyncOpenAI, **options: Any) -> Any:
    return await caller.completions.create(**{"model": "tiny", "prompt": "olleh", "stream": True, **options})


async def pieces(stream: Any) -> list[str]:
    """Return the texts of the chunks, without the empty ones."""
    return [chunk.choices[0].text async for chunk in stream if chunk.choices and chunk.choices[0].text]


def begin_early(stack: Stack) -> None:
    """Send the headers of streams, and pings, after 50 ms without text."""
    assert stack.gateway._edge is not None
    stack.gateway._edge.ping_watch.timeout_s = 0.05


class Writer:
    """Publishes increments of the one pending request, as its worker does."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._channel = IncrementChannel(stack.redis, Keys())

    async def write(self, offset: int, text: str, nonce: str | None = None) -> None:
        await accepted(self._stack)
        (pending,) = self._stack.gateway.pending_requests.all()
        increment = Increment(pending.id, nonce or pending.submission.nonce, 1, offset, text)
        await self._channel.publish("g1", [increment])


def request(stack: Stack, more: str = "", version: str = "1.1", path: str = "completions", body: bytes = BODY) -> bytes:
    """Return the bytes of a request for a stream."""
    head = (
        f"POST /v1/{path} HTTP/{version}\r\nHost: x\r\nAuthorization: {stack.key()['Authorization']}\r\n{more}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def documents(events: bytes) -> list[Any]:
    """Return the JSON documents of the events, without [DONE]."""
    lines = [each.removeprefix(b"data: ") for each in events.split(b"\n\n") if each.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def unchunked(data: bytes) -> bytes:
    """Decode a chunked body. Raises ValueError where it is incomplete."""
    whole = b""
    while True:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return whole
        if rest[length : length + 2] != b"\r\n":
            raise ValueError(rest)
        whole, data = whole + rest[:length], rest[length + 2 :]


async def test_the_bytes_of_a_stream(stack: Stack) -> None:
    """A stream is chunked, not cacheable, ends with [DONE], and its connection serves the next request. HTTP/1.0 gets it
    without chunks and with the end of the connection.
    """
    raw = await stack.raw(request(stack) + request(stack, more="Connection: close\r\n"))
    old = await stack.raw(request(stack, more="Connection: keep-alive\r\n", version="1.0"))

    first, _, second = raw[12:].partition(b"HTTP/1.1 200 OK\r\n")
    for response in (first, second):
        head, _, body = response.partition(b"\r\n\r\n")
        for line in (b"Transfer-Encoding: chunked", b"Content-Type: text/event-stream", b"Cache-Control: no-cache"):
            assert line + b"\r\n" in head
        assert b"Content-Length" not in head
        events = unchunked(body)
        assert events.endswith(b"\n\ndata: [DONE]\n\n")
        assert [each["choices"][0]["text"] for each in documents(events)] == ["hello", ""]
    head, _, body = old.partition(b"\r\n\r\n")
    assert (b"chunked" in head, b"Connection: close" in head) == (False, True)
    assert documents(body)[0]["choices"][0]["text"] == "hello"
    assert body.endswith(b"data: [DONE]\n\n")


async def test_the_first_text_of_a_stream_is_counted(stack: Stack) -> None:
    """Its time, and the tokens of the request, by tier, model and endpoint."""
    await stack.raw(request(stack, more="Connection: close\r\n"))
    async with stack.http.get(f"{stack.url}/metrics") as response:
        page = await response.read()

    labels = {"tier": "free", "endpoint": "/v1/completions"}
    assert total(page, "tierlane_time_to_first_token_seconds_count", **labels) == 1
    assert 0 < total(page, "tierlane_time_to_first_token_seconds_sum", **labels) < 30
    assert total(page, "tierlane_input_tokens_total", **labels) > 0


async def test_a_queued_stream_sends_pings(stack: Stack) -> None:
    """Comments keep proxies from closing the connection while the request is queued; clients ignore them."""
    stack.worker.hold = True
    begin_early(stack)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(request(stack))

    async with asyncio.timeout(5):
        await reader.readuntil(b": ping\n\n")
        await reader.readuntil(b": ping\n\n")
        stack.worker.hold = False
        rest = await reader.readuntil(b"[DONE]")
    writer.close()

    assert b'"hello"' in rest


async def test_foreign_increments_are_dropped(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Increments with another nonce and malformed messages are counted and dropped; the stored output fills the gaps."""
    stack.worker.hold = True
    begin_early(stack)
    writer = Writer(stack)
    stream = await streamed(caller)

    await writer.write(0, "evil", nonce="0" * 16)
    for message in (b"+nonsense", b"", b"\xc1", b"junk" * 100, b"\x91\x93\x01\x02\x03", b"\x80"):
        await stack.redis.publish(Keys().responses("g1"), message)
    await writer.write(0, "he")
    await writer.write(3, "lo")
    stack.worker.hold = False

    assert await pieces(stream) == ["he", "llo"]
    assert stack.gateway.pending_requests.refused_replies == 1
    assert (stack.gateway.subscriber.malformed, stack.gateway.subscriber.reconnects) == (6, 0)


async def test_the_chunks_of_a_chat(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """No chunk precedes the text, whose first one has the role; the finish reason is in the last one."""
    stack.worker.answerer = lambda member: Outcome(member.id, "", 1.5, 8, "v1", "hello", 3, "length")
    stream = await caller.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "olleh"}], stream=True
    )
    chunks = [chunk async for chunk in stream]

    assert [(chunk.choices[0].delta.role, chunk.choices[0].delta.content) for chunk in chunks] == [
        ("assistant", "hello"),
        (None, None),
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    headers = stream.response.headers
    assert (headers["content-type"], headers["x-request-id"]) == ("text/event-stream", chunks[0].id)
    assert "x-ratelimit-limit-requests" in headers


async def test_a_stream_has_its_own_run(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Streams do not share runs, also where equal requests do: pieces are sent to one request only."""
    stack.catalog.set(models=(model(cache_ttl_s=60),))

    for _ in range(2):
        await pieces(await streamed(caller, temperature=0))

    assert len(stack.worker.seen) == 2


@pytest.mark.parametrize("first_streams", [True, False])
async def test_replays(stack: Stack, caller: openai.AsyncOpenAI, first_streams: bool) -> None:
    """With an idempotency key a stored output is replayed as one delta under its id, whether or not it was streamed."""
    headers = {"Idempotency-Key": "k"}
    if first_streams:
        stream = await streamed(caller, extra_headers=headers)
        request_id = (await anext(aiter(stream))).id
        await pieces(stream)
    else:
        request_id = (await caller.completions.create(model="tiny", prompt="olleh", extra_headers=headers)).id

    replay = await streamed(caller, extra_headers=headers)
    chunks = [chunk async for chunk in replay]

    assert [chunk.choices[0].text for chunk in chunks] == ["hello", ""]
    assert {chunk.id for chunk in chunks} == {request_id} == {replay.response.headers["x-request-id"]}
    assert replay.response.headers["idempotent-replayed"] == "true"
    assert len(stack.worker.seen) == 1


async def test_a_slow_reader_costs_little_memory(client: Redis, redis_url: str) -> None:
    """Pieces that a client does not read are not buffered one by one; when it reads on, it gets the whole output."""
    text, count = "x" * 65_536, 200
    async with running_stack(client, redis_url, total_ms=10_000) as stack:
        stack.worker.hold = True
        stack.worker.answerer = lambda member: Outcome(member.id, "", 1.5, 8, "v1", text * count)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", stack.gateway.port))
        reader, out = await asyncio.open_connection(sock=sock, limit=2**24)
        out.write(request(stack, more="Connection: close\r\n"))
        await accepted(stack)
        reader._transport.pause_reading()

        writer = Writer(stack)
        for n in range(count):
            await writer.write(n * len(text), text)
        assert stack.gateway._edge is not None
        (connection,) = [each for each in stack.gateway._edge.connections if each.writing_paused]
        assert connection.transport is not None
        buffered = connection.transport.get_write_buffer_size()
        reader._transport.resume_reading()
        stack.worker.hold = False
        async with asyncio.timeout(20):
            raw = await reader.read()
            while not reader.at_eof():
                raw += await reader.read()
        out.close()

    assert buffered < 4 * len(text)
    events = documents(unchunked(raw.partition(b"\r\n\r\n")[2]))
    assert sum(len(each["choices"][0]["text"]) for each in events) == count * len(text)


TEXT = [{"role": "user", "content": "olleh"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "olleh"}),
        ("chat/completions", {"messages": TEXT}),
        ("messages", {"messages": TEXT, "max_tokens": 5}),
        ("responses", {"input": "olleh", "store": False}),
    ],
)
async def test_an_error_before_the_text_has_its_status(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """As without a stream, with the headers of every response; the connection serves the next request."""
    stack.worker.answerer = lambda member: Outcome(member.id, "invalid_request", 1.0, 0, "v1", "No.")
    for stream in (True, True, False):
        sent = {"model": "tiny", "stream": stream} | body
        async with stack.http.post(f"{stack.url}/v1/{path}", json=sent, headers=stack.key()) as response:
            error = (await response.json())["error"]
            assert (response.status, response.content_type) == (400, "application/json")
        assert (error["message"], "x-ratelimit-limit-requests" in response.headers) == ("No.", True)
    assert len(stack.worker.seen) == 3


STREAMS: list[tuple[str, dict[str, Any], list[bytes]]] = [
    ("completions", {"prompt": "olleh"}, [b"[DONE]", b'"role"']),
    ("chat/completions", {"messages": TEXT}, [b"[DONE]"]),
    ("messages", {"messages": TEXT, "max_tokens": 5}, [b"message_stop", b"message_delta", b"[DONE]"]),
    ("responses", {"input": "olleh", "store": False}, [b"response.completed", b"response.incomplete", b"[DONE]"]),
]
"""Path, body, and what a stream must not have that did not end well."""


@pytest.mark.parametrize(("path", "body", "absent"), STREAMS)
@pytest.mark.parametrize("text", ["", "he"])
async def test_a_failed_stream_ends_incomplete(
    client: Redis, redis_url: str, path: str, body: dict[str, Any], absent: list[bytes], text: str
) -> None:
    """After the error event the connection is closed without the end of the body: no program takes the stream for whole."""
    raw = json.dumps({"model": "tiny", "stream": True} | body).encode()
    async with running_stack(client, redis_url, worker=False, total_ms=1000) as stack:
        begin_early(stack)
        answering = asyncio.create_task(stack.raw(request(stack, path=path, body=raw)))
        if text:
            await Writer(stack).write(0, text)
        head, _, rest = (await answering).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK")
    with pytest.raises(ValueError, match="invalid literal"):
        unchunked(rest)
    events = unchunked(rest + b"0\r\n\r\n")
    last = json.loads(events.rstrip().rpartition(b"\ndata: ")[2].removeprefix(b"data: "))
    assert "deadline_exceeded" in str(last["error"])
    assert [each for each in absent if each in events] == []
    assert (b'"he"' in events) == bool(text)
    for once in (
        b"event: message_start",
        b"event: response.created",
        b"event: response.output_item.added",
        b'"role":"assistant","content":"he"',
    ):
        assert events.count(once) <= 1


async def test_a_failed_stream_of_http_1_0_is_reset(client: Redis, redis_url: str) -> None:
    """There the end of the connection would be the end of the body, as for a proxy that uses this version."""
    async with running_stack(client, redis_url, worker=False, total_ms=1000) as stack:
        begin_early(stack)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(request(stack, version="1.0"))
        async with asyncio.timeout(5):
            await reader.readuntil(b"deadline_exceeded")
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()


@pytest.mark.parametrize(
    ("changes", "code"), [({"total_ms": 1000}, "deadline_exceeded"), ({"drain_timeout_s": 0.1}, "draining")]
)
async def test_a_deadline_or_drain_ends_a_stream(
    client: Redis, redis_url: str, changes: dict[str, Any], code: str
) -> None:
    """After the status 200 the error is an event, which the client raises with code and request id."""
    async with running_stack(client, redis_url, worker=False, **changes) as stack, openai_client(stack) as caller:
        begin_early(stack)
        stream = await streamed(caller)
        task = asyncio.create_task(pieces(stream))
        if code == "draining":
            await stack.gateway.drain()
        with pytest.raises(openai.APIError) as caught:
            await task

    assert caught.value.code == code
    assert caught.value.body["request_id"] == stream.response.headers["x-request-id"]


async def test_the_connection_of_a_stream_is_served_once_more_during_a_drain(client: Redis, redis_url: str) -> None:
    """Its headers promised that, and a load balancer may send the next request on it at once."""

    async def refused() -> bool:
        try:
            _, other = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        except ConnectionRefusedError:
            return True
        other.close()
        return False

    async with running_stack(client, redis_url, worker=False, notice_ms=1000) as stack:
        begin_early(stack)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(request(stack))
        assert b"Connection: close" not in await reader.readuntil(b"\r\n\r\n")
        drained = asyncio.create_task(stack.gateway.drain())
        await eventually(refused, "the port is closed")
        await stack.worker.turn()
        await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        await drained

    assert b"200 OK" in answer
    assert b"Connection: close" in answer


async def test_in_direct_mode_a_stream_is_one_delta(direct: Direct) -> None:
    """Without Redis there is no channel for increments; the format of the response is the same."""
    async with direct.stack("serve", active=True) as (stack, _), openai_client(stack) as caller:
        assert await pieces(await streamed(caller)) == ["hello"]
