"""What a gateway makes of a stream, whatever its worker says: bytes, refusals, silence, strangers, slow readers, its own end."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.direct_mode_fixtures import Outage, direct_already, outage
from integration.gateway_fixtures import Stack, model, openai_client, running_stack, tier
from scheduler.payload import decode_payload
from scheduler.protocol.batches import Outcome
from scheduler.protocol.replies import Increment, IncrementChannel
from scheduler.redis_client.keys import Keys

__all__ = ["outage"]

BODY = b'{"model": "tiny", "prompt": "olleh", "stream": true}'


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url, total_ms=10_000) as running:
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, without retries of its own."""
    async with openai_client(stack) as made:
        yield made


async def streamed(caller: openai.AsyncOpenAI, prompt: str = "olleh", **options: Any) -> Any:
    """A stream of completions."""
    return await caller.completions.create(model="tiny", prompt=prompt, stream=True, **options)


async def pieces(stream: Any) -> list[str]:
    """Its texts, the empty ones left out."""
    return [chunk.choices[0].text async for chunk in stream if chunk.choices and chunk.choices[0].text]


class Writer:
    """Publishes increments of the one request that waits, as its worker would."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._channel = IncrementChannel(stack.redis, Keys())

    async def waiting(self) -> Any:
        """The one request, once Redis has it."""

        def accepted() -> Any:
            return next((each for each in self._stack.gateway.pending_requests.all() if each.accepted), None)

        return await eventually(accepted, "the request is admitted")

    async def write(self, offset: int, text: str, nonce: str | None = None, attempt: int = 1) -> None:
        """One increment; with `nonce` of somebody else."""
        pending = await self.waiting()
        increment = Increment(pending.id, nonce or pending.submission.nonce, attempt, offset, text)
        await self._channel.publish("g1", [increment])


def request(version: str = "1.1", key: str = "", *, body: bytes = BODY, more: str = "") -> bytes:
    """The bytes of a request."""
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nAuthorization: {key}\r\n{more}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def documents(events: bytes) -> list[Any]:
    """The JSON of the events of a stream, without the last word."""
    lines = [each.removeprefix(b"data: ") for each in events.split(b"\n\n") if each.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def unchunked(data: bytes) -> bytes:
    """A chunked body put together. Raises ValueError where it is not whole."""
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
    """Chunked, not to be cached or collected, on a connection that serves on; the last word is [DONE]."""
    key = stack.key()["Authorization"]

    raw = await stack.raw(request(key=key) + request(key=key, more="Connection: close\r\n"))

    first, _, second = raw[12:].partition(b"HTTP/1.1 200 OK\r\n")
    for answer in (first, second):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked\r\n" in head
        assert b"Content-Type: text/event-stream\r\n" in head
        assert b"Cache-Control: no-cache\r\n" in head
        assert b"Content-Length" not in head
        events = unchunked(body)
        assert events.endswith(b"\n\ndata: [DONE]\n\n")
        assert [each["choices"][0]["text"] for each in documents(events)] == ["hello", ""]


async def test_http_1_0_gets_it_without_chunks(stack: Stack) -> None:
    """There the end of the connection is the end of the stream."""
    raw = await stack.raw(request("1.0", stack.key()["Authorization"], more="Connection: keep-alive\r\n"))

    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"Connection: close" in head
    assert documents(body)[0]["choices"][0]["text"] == "hello"
    assert body.endswith(b"data: [DONE]\n\n")


async def test_refusals_are_answers_like_any_other(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """With their status, as long as nothing was begun."""
    with pytest.raises(openai.NotFoundError):
        await caller.completions.create(model="none", prompt="a", stream=True)
    stack.catalog.set(tiers=(tier("free", 3, 0.1, burst=1.0, requests_per_second=0.01),))
    with pytest.raises(openai.RateLimitError) as caught:
        await asyncio.gather(streamed(caller), streamed(caller))

    assert caught.value.code == "rate_limit_exceeded"
    assert "retry-after" in caught.value.response.headers
    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "nobody waits")


async def test_a_queued_stream_is_not_silent(stack: Stack) -> None:
    """Comments keep proxies and clients from hanging up; the clients' parsers pass over them."""
    stack.worker.hold = True
    assert stack.gateway._edge is not None
    stack.gateway._edge.ping_watch.timeout_s = 0.05
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(request(key=stack.key()["Authorization"]))

    async with asyncio.timeout(5):
        await reader.readuntil(b": ping\n\n")
        await reader.readuntil(b": ping\n\n")
        stack.worker.hold = False
        rest = await reader.readuntil(b"[DONE]")
    writer.close()
    await writer.wait_closed()

    assert b'"hello"' in rest


async def test_only_the_requests_own_increments_are_heard(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Another nonce is another request, or somebody who guesses; what cannot be read is dropped."""
    stack.worker.hold = True
    writer = Writer(stack)
    stream = await streamed(caller)

    await writer.write(0, "evil", nonce="0" * 16)
    await stack.redis.publish(Keys().responses("g1"), b"+nonsense")
    await writer.write(0, "he")
    await writer.write(3, "lo")
    stack.worker.hold = False

    assert await pieces(stream) == ["he", "llo"]
    assert stack.gateway.pending_requests.refused_replies == 1
    assert stack.gateway.subscriber.malformed == 1


async def test_the_worker_is_told_where_pieces_go(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """The gateway's name and the nonce, for streams alone."""
    seen: list[tuple[str, str]] = []
    answer = stack.worker.answerer

    def noting(member: Any) -> Any:
        seen.append((member.id, decode_payload(member.body).stream))
        return answer(member)

    stack.worker.answerer = noting
    await pieces(await streamed(caller))
    await caller.completions.create(model="tiny", prompt="a")

    (_, address), (_, none) = seen
    assert address.startswith("g1 ")
    assert len(address) == len("g1 ") + 16
    assert none == ""


@pytest.mark.parametrize("first_streams", [True, False])
async def test_a_key_replays_as_a_stream(stack: Stack, caller: openai.AsyncOpenAI, first_streams: bool) -> None:
    """The stored answer as one delta, under the id of the request that has it, whichever form that had."""
    headers = {"Idempotency-Key": "k"}
    if first_streams:
        stream = await streamed(caller, extra_headers=headers)
        made = (await anext(aiter(stream))).id
        await pieces(stream)
    else:
        made = (await caller.completions.create(model="tiny", prompt="olleh", extra_headers=headers)).id

    again = await streamed(caller, extra_headers=headers)
    chunks = [chunk async for chunk in again]

    assert [chunk.choices[0].text for chunk in chunks] == ["hello", ""]
    assert {chunk.id for chunk in chunks} == {made} == {again.response.headers["x-request-id"]}
    assert again.response.headers["idempotent-replayed"] == "true"
    assert len(stack.worker.seen) == 1


async def test_a_reader_that_does_not_read_costs_little(stack: Stack) -> None:
    """What it does not take is not kept for it piece by piece; when it reads on, it gets all of it."""
    stack.worker.hold = True
    text = "x" * 65_536
    count = 200
    stack.worker.answerer = lambda member: _outcome(member.id, text * count)
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", stack.gateway.port))
    reader, out = await asyncio.open_connection(sock=line, limit=2**24)
    out.write(request(key=stack.key()["Authorization"], more="Connection: close\r\n"))
    writer = Writer(stack)
    await writer.waiting()
    reader._transport.pause_reading()  # type: ignore[attr-defined]

    for n in range(count):
        await writer.write(n * len(text), text)
    assert stack.gateway._edge is not None
    (connection,) = [each for each in stack.gateway._edge.connections if each.writing_paused]
    assert connection.transport is not None
    kept = connection.transport.get_write_buffer_size()
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    stack.worker.hold = False
    async with asyncio.timeout(20):
        raw = await reader.read()
        while not reader.at_eof():
            raw += await reader.read()
    out.close()

    assert kept < 4 * len(text)
    events = documents(unchunked(raw.partition(b"\r\n\r\n")[2]))
    assert sum(len(each["choices"][0]["text"]) for each in events) == count * len(text)


def _outcome(request_id: str, output: str) -> Any:
    return Outcome(request_id, "", 1.5, 8, "v1", output)


async def test_a_deadline_ends_a_stream(client: Redis, redis_url: str) -> None:
    """The client's exception names it: 200 was said long before."""
    async with running_stack(client, redis_url, worker=False, total_ms=300) as stack, openai_client(stack) as caller:
        stream = await streamed(caller)
        with pytest.raises(openai.APIError) as caught:
            await pieces(stream)

    assert caught.value.code == "deadline_exceeded"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["request_id"] == stream.response.headers["x-request-id"]


async def test_a_gateway_that_leaves_ends_its_streams(client: Redis, redis_url: str) -> None:
    """Those that take longer than it may wait are told; nothing hangs."""
    changes = {"worker": False, "drain_timeout_s": 0.1}
    async with running_stack(client, redis_url, **changes) as stack, openai_client(stack) as caller:
        stream = await streamed(caller)
        reading = asyncio.create_task(pieces(stream))
        await stack.gateway.drain()
        with pytest.raises(openai.APIError) as caught:
            await reading

    assert caught.value.code == "draining"


async def test_past_redis_a_stream_is_one_delta(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """There is no channel for increments; the form stays."""
    async with direct_already(client, redis_url, tmp_path, outage) as (stack, _), openai_client(stack) as caller:
        found = await pieces(await streamed(caller))

    assert len(found) == 1


async def test_who_leaves_the_queue_is_cancelled(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """No worker sees it."""
    stack.worker.hold = True
    stream = await streamed(caller)

    await stream.close()

    async def cancelled() -> bool:
        found = await stack.gateway.results.fetch([stream.response.headers["x-request-id"]])
        return found[0] is not None and found[0].error_code == "cancelled"

    await eventually(cancelled, "the request is cancelled")
    assert stack.gateway._edge is not None
    assert len(stack.gateway._edge.ping_watch) == 0
    assert stack.worker.seen == []


async def test_a_stream_has_a_run_of_its_own(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Where answers are shared as well: pieces come from a run, and only the one that asked is told them."""
    stack.catalog.set(models=(model(cache_ttl_s=60),))

    for _ in range(2):
        await pieces(await streamed(caller, temperature=0))

    assert len(stack.worker.seen) == 2
