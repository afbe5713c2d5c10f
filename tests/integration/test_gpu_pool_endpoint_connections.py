"""Connections of `openai:URL` to a server that ends them in unusual ways: each request runs once, and gets its own answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from configs import endpoint_access
from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint, HandBack
from gpu_pool.backends.openai_endpoint.settings import read_address
from integration.endpoint_fixtures import Reader, answered, codes, items, outputs
from scheduler.payload import Task

COUNT = 6
APART_S = 0.02
"""After each piece of a response, so that each arrives by itself."""


@dataclass
class RawEngine:
    """A server that writes bytes. It reverses prompts; `respond` has what it writes for one, and closes the connection after a
    None. `unread`: it responds to a long prompt before it has read it. `ended`: responses of which everything was written.
    """

    respond: Callable[[bytes], list[bytes | None]]
    unread: bool = False
    runs: list[str] = field(default_factory=list)
    ended: int = 0
    open: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to all requests of a connection."""
        self.open += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.open -= 1

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, *_ = head.split(b" ", 2)
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if self.unread and length > 1000:
            self.runs.append("unread")
            writer.write(b"".join(filter(None, self.respond(b'{"prompt": "unread"}'))))
            await writer.drain()
            return False
        body = await reader.readexactly(length)
        prompt = json.loads(body).get("prompt") if method == b"POST" else None
        if prompt is None:
            found = path == b"/v1/models"
            document = json.dumps({"data": [{"id": "m"}]}).encode() if found else b"{}"
            status = b"200 OK" if found else b"400 Bad Request" if path == b"/v1/completions" else b"404 Not Found"
            writer.write(response(document, status))
            return True
        self.runs.append(prompt)
        pieces = self.respond(body)
        for piece in filter(None, pieces):
            writer.write(piece)
            await writer.drain()
            if None not in pieces:
                await asyncio.sleep(APART_S)
        self.ended += 1
        return None not in pieces


def response(document: bytes, status: bytes = b"200 OK", *, version: bytes = b"1.1", more: bytes = b"") -> bytes:
    """The bytes of a response."""
    head = b"HTTP/%b %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (version, status, len(document), more) + document


def answer(body: bytes) -> bytes:
    """The document that completes a prompt."""
    text = json.loads(body)["prompt"][::-1]
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": usage}).encode()


@asynccontextmanager
async def endpoint_of(engine: RawEngine) -> AsyncIterator[Endpoint]:
    """An endpoint in front of the server."""
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(read_address(f"openai:http://127.0.0.1:{engine.port}/v1"), endpoint_access())
    try:
        await endpoint.load(5.0)
        yield endpoint
    finally:
        await endpoint.close()
        server.close()
        await eventually(lambda: not engine.open, "all connections have ended")


FORGED = response(answer(b'{"prompt": "forged"}'))
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
WAYS: dict[str, Callable[[bytes], list[bytes | None]]] = {
    "http_1_0": lambda body: [response(answer(body), version=b"1.0"), None],
    "http_1_0_without_a_length": lambda body: [b"HTTP/1.0 200 OK\r\n\r\n" + answer(body), None],
    "close_is_announced": lambda body: [response(answer(body), more=b"Connection: close\r\n"), None],
    "last_of_its_connection": lambda body: [response(answer(body), more=b"Keep-Alive: timeout=1, max=1\r\n"), None],
    "silent_close": lambda body: [response(answer(body)), None],
    "interim_responses": lambda body: [INTERIM, response(answer(body))],
    "a_line_end_after_it": lambda body: [response(answer(body)) + b"\r\n"],
    "more_than_its_length_later": lambda body: [response(answer(body)), b"more"],
    "a_second_response": lambda body: [response(answer(body)) + FORGED],
    "a_second_response_later": lambda body: [response(answer(body)), FORGED],
    "chunks_with_a_trailer": lambda body: [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nX-A: b\r\n\r\n"
        % (len(answer(body)), answer(body))
    ],
}


@pytest.mark.parametrize("way", WAYS)
async def test_each_request_runs_once_and_gets_its_own_answer(way: str) -> None:
    """However the server ends its responses, and whatever it sends after them."""
    engine, found = RawEngine(WAYS[way]), list[ItemResult | HandBack]()
    texts = [f"text {number}" for number in range(COUNT)]
    async with endpoint_of(engine) as endpoint:
        for number, text in enumerate(texts, 1):
            found += await answered(endpoint, items(text))
            await eventually(lambda number=number: engine.ended == number, "the server has written everything")

    assert outputs(found) == [text[::-1] for text in texts]
    assert engine.runs == texts


def events(body: bytes) -> bytes:
    """The events that complete a prompt."""
    text = json.loads(body)["prompt"][::-1]
    choices = [{"index": 0, "text": char, "finish_reason": None} for char in text]
    choices.append({"index": 0, "text": "", "finish_reason": "stop"})
    written = b"".join(b"data: %b\n\n" % json.dumps({"choices": [each]}).encode() for each in choices)
    return written + b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
STREAMS: dict[str, Callable[[bytes], list[bytes | None]]] = {
    "http_1_0": lambda body: [STREAM.replace(b"1.1", b"1.0") + b"\r\n" + events(body), None],
    "until_the_connection_ends": lambda body: [STREAM + b"\r\n" + events(body), None],
    "with_a_length": lambda body: [STREAM + b"Content-Length: %d\r\n\r\n" % len(events(body)) + events(body)],
    "shorter_than_its_length": lambda body: [STREAM + b"Content-Length: 9999\r\n\r\n" + events(body), None],
    "without_a_last_chunk": lambda body: [CHUNKED + chunk(events(body)), None],
    "a_response_after_the_last_chunk": lambda body: [CHUNKED + chunk(events(body)) + b"0\r\n\r\n", FORGED],
    "interim_responses": lambda body: [INTERIM + CHUNKED, chunk(events(body)) + b"0\r\n\r\n"],
}


@pytest.mark.parametrize("way", STREAMS)
async def test_each_stream_runs_once_and_is_read_to_its_end(way: str) -> None:
    """What arrives together with the end of the connection is read, however the server ends it."""
    engine = RawEngine(STREAMS[way])
    texts = [f"text {number}" for number in range(COUNT)]
    readers = [Reader() for _ in texts]
    async with endpoint_of(engine) as endpoint:
        for number, (text, reader) in enumerate(zip(texts, readers, strict=True), 1):
            item = Item(text, {}, Task.COMPLETE, reader, time.monotonic() + 10)
            assert codes(await answered(endpoint, [item])) == [""]
            await eventually(lambda number=number: engine.ended == number, "the server has written everything")

    assert [reader.text for reader in readers] == [text[::-1] for text in texts]
    assert engine.runs == texts


BROKEN: dict[str, Callable[[bytes], list[bytes | None]]] = {
    "no_response": lambda body: [None],
    "half_a_head": lambda body: [response(answer(body))[:30], None],
    "half_a_body": lambda body: [response(answer(body))[:-5], None],
    "interim_response_only": lambda body: [INTERIM, None],
    "longer_than_its_length": lambda body: [response(answer(body)) + b"more"],
    "no_http": lambda body: [b"\x15\x03\x01\x00\x02\x02\x46", None],
    "another_status_line": lambda body: [b"ICY 200 OK\r\n\r\n", None],
}


@pytest.mark.parametrize("way", BROKEN)
async def test_request_without_a_whole_answer_is_not_sent_again(way: str) -> None:
    """It may have run: it is handed back, and counted as an attempt, on a new connection as on a used one."""
    engine = RawEngine(lambda body: [response(answer(body))])
    async with endpoint_of(engine) as endpoint:
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]
        engine.respond = BROKEN[way]
        found = [(await answered(endpoint, items(text)))[0] for text in ("cd", "ef")]

    assert [isinstance(each, HandBack) and each.counted for each in found] == [True, True]
    assert engine.runs == ["ab", "cd", "ef"]


@pytest.mark.parametrize(
    ("status", "code"), [(b"413 Content Too Large", "request_too_large"), (b"400 No", "invalid_request")]
)
async def test_a_response_before_the_request_was_read(status: bytes, code: str) -> None:
    """It is the answer, although the rest of the request is not read, and the connection is not used again."""
    engine = RawEngine(lambda body: [response(b"{}", status)], unread=True)
    long = Item("x" * (8 << 20), {}, until=time.monotonic() + 10)
    async with endpoint_of(engine) as endpoint:
        found = await answered(endpoint, [long])
        engine.respond = lambda body: [response(answer(body))]
        later = await answered(endpoint, items("ab"))

    assert codes(found) in ([code], ["-"])  # The reset of the connection may overtake the response.
    assert (outputs(later), engine.runs) == (["ba"], ["unread", "ab"])
