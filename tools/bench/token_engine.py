"""An engine with continuous batching for `tools/bench/cases/stream_events.py`: one step at a time writes a token to each stream.

The text of a token is the time at which it was written, in monotonic microseconds of the machine. Prints its port.
"""
# ruff: noqa: INP001 - a script

import asyncio
import json
import re
import sys
import time

STEP_S = 0.02

_TOKENS = re.compile(rb'"max_tokens":(\d+)')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MODELS = json.dumps({"object": "list", "data": [{"id": "engine", "object": "model", "owned_by": "bench"}]}).encode()
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_ID = "chatcmpl-9f8e7d6c5b4a39281706f5e4d3c2b1a0"

streams: dict["Connection", tuple[int, int]] = {}
"""Open streams: how many tokens each of them still gets, and gets in all."""


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(choices: list[object], usage: object = None) -> bytes:
    """One event of a chat, as vLLM writes it."""
    fields = {"id": _ID, "object": "chat.completion.chunk", "created": 1, "model": "engine", "choices": choices}
    return chunk(
        b"data: " + json.dumps(fields | ({"usage": usage} if usage else {}), separators=(",", ":")).encode() + b"\n\n"
    )


def token(text: str, finish_reason: str | None = None) -> bytes:
    """The event of one token."""
    delta = {"content": text}
    return event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": None}])


class Connection(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for requests."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head, length = self._buffer[:end], _LENGTH.search(self._buffer[:end])
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < size:
                return
            body, self._buffer = self._buffer[end + 4 : size], self._buffer[size:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if b'"stream":true' in body:
            self.transport.write(_HEAD)
            length = _TOKENS.search(body)
            tokens = int(length[1]) if length else 1
            streams[self] = tokens, tokens
            return
        found = _MODELS if b"/models" in head else b"{}"
        status = b"200 OK" if head.startswith(b"GET") else b"400 Bad Request"
        fields = b"Content-Type: application/json\r\nContent-Length: %d" % len(found)
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, fields, found))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The client left."""
        streams.pop(self, None)


def step() -> None:
    """One step of all streams."""
    for connection, (left, tokens) in list(streams.items()):
        text = f" {time.monotonic_ns() // 1000}"
        if left > 1:
            streams[connection] = left - 1, tokens
            connection.transport.write(token(text))
            continue
        del streams[connection]
        usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
        last = token(text, "length") + event([], usage) + chunk(b"data: [DONE]\n\n") + chunk(b"")
        connection.transport.write(last)


async def main() -> None:
    """Serve until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    at = time.monotonic()
    while True:
        at = max(at + STEP_S, time.monotonic())
        await asyncio.sleep(at - time.monotonic())
        step()


if __name__ == "__main__":
    asyncio.run(main())
