"""An endpoint that sees images, and a load of chats with images, in a process of their own: `python image_load.py`.

It writes the port of the endpoint to stdout, reads `Orders` as a line of JSON, and writes one `Outcome` a request as JSON.
Both are as cheap as they can be, since they share the processors with the stack that is measured: the load sends the image
from a file, and the endpoint reads it into one buffer and counts its bytes.
"""

import asyncio
import base64
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, NamedTuple, cast

from endpoint_stand_in import MODEL

IMAGE_BYTES = 2_000_000
MODEL_S = 0.3
"""The time of a chat with an image at the endpoint, so that a killed process has some."""

PATIENCE_S = 30.0
_NUMBER = re.compile(rb"image (\d+)\.")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)
_KEPT = 256
"""Bytes at both ends of a body that are searched for the number of its image."""


@dataclass
class Orders:
    """The gateway and its key; when the load begins (monotonic seconds), how long it lasts, and its rate (requests/s)."""

    url: str
    key: str
    begin_s: float
    seconds: float
    rate: float


class Outcome(NamedTuple):
    """One request: the client's port, when it connected, its duration, and its status and code.

    Status 0: the connection was cut. Code `crossed`: the response was that of another request.
    """

    port: int
    opened_s: float
    seconds: float
    status: int
    code: str


class ImageConnection(asyncio.BufferedProtocol):
    """A connection to the endpoint, which answers a chat with an image by its number and size."""

    _buffer = memoryview(bytearray(1 << 20))  # Of all connections: each part is used before the next is read.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._begin, self._end, self._size, self._left = b"", b"", -1, 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        part = self._buffer[:nbytes]
        if self._size < 0:
            self._begin += bytes(part)
            head, end, body = self._begin.partition(b"\r\n\r\n")
            if not end:
                return
            found = _LENGTH.search(head + end)
            self._size = self._left = int(found[1]) if found else 0
            self._begin, part = head[:8] + end + body[:4096], memoryview(body)
        self._left -= len(part)
        self._end = (self._end + bytes(part[-_KEPT:]))[-_KEPT:]
        if not self._left:
            self._answer()

    def _answer(self) -> None:
        numbers = {int(each) for kept in (self._begin, self._end) for each in _NUMBER.findall(kept)}
        whole, probe = self._size > IMAGE_BYTES * 4 // 3, not numbers
        document: dict[str, Any] = {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "somebody"}],
        }
        if probe and self._begin.startswith(b"POST"):
            document = {"error": {"message": "The input is missing."}}
        elif not probe:
            content = expected(numbers.pop(), whole and not numbers)
            choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 700, "completion_tokens": 5, "total_tokens": 705}
            document = {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}
        body = json.dumps(document).encode()
        status = b"400 Bad Request" if "error" in document else b"200 OK"
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._begin, self._end, self._size = b"", b"", -1
        asyncio.get_running_loop().call_later(0.0 if probe else MODEL_S, self._transport.write, head + body)


def expected(number: int, whole: bool = True) -> str:
    """The content of the response to the request of this number."""
    return f"image {number} {'whole' if whole else 'cut'}"


def own_port(ports: list[int]) -> Callable[[Any], socket.socket]:
    """A maker of sockets for aiohttp that notes the port of each, which stays known once it is closed."""

    def make(address: Any) -> socket.socket:
        made = socket.socket(address[0], address[1], address[2])
        made.setblocking(False)
        made.bind(("127.0.0.1", 0))
        ports.append(made.getsockname()[1])
        return made

    return make


class Images:
    """Requests with the same image, each with its number before and after it."""

    def __init__(self, orders: Orders) -> None:
        host, _, port = orders.url.removeprefix("http://").partition(":")
        self._address, self._key = (host, int(port)), orders.key
        url = "data:image/png;base64," + base64.b64encode(os.urandom(IMAGE_BYTES)).decode()
        text = {"type": "text", "text": "image @."}
        parts = [text, {"type": "image_url", "image_url": {"url": url}}, text]
        body = json.dumps({"messages": [{"role": "user", "content": parts}], "model": MODEL}).encode()
        self._before, image, self._after = body.split(b"@")
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until the process ends
        self._size = self._file.write(image)

    async def send(self, number: int) -> Outcome:
        """Send one chat on a connection of its own."""
        opened_s, port, response = time.monotonic(), 0, b""
        with socket.socket() as connection, suppress(OSError, TimeoutError):
            connection.setblocking(False)
            connection.bind((self._address[0], 0))
            port = connection.getsockname()[1]
            async with asyncio.timeout(PATIENCE_S):
                response = await self._exchange(connection, b"%d" % number)
        status, code = 0, ""
        if response.startswith(b"HTTP/1.1 "):
            status, document = int(response[9:12]), json.loads(response.partition(b"\r\n\r\n")[2])
            if status != 200:
                code = document["error"]["code"]
            elif document["choices"][0]["message"]["content"] != expected(number):
                code = "crossed"
        return Outcome(port, opened_s, time.monotonic() - opened_s, status, code)

    async def _exchange(self, connection: socket.socket, number: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        size = len(self._before) + len(self._after) + 2 * len(number) + self._size
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
        )
        await loop.sock_connect(connection, self._address)
        with suppress(OSError):  # A response that came before the end of the request is read all the same.
            await loop.sock_sendall(connection, head.encode() + self._before + number)
            await loop.sock_sendfile(connection, self._file, 0, self._size, fallback=False)
            await loop.sock_sendall(connection, number + self._after)
        response = b""
        while part := await loop.sock_recv(connection, 1 << 16):
            response += part
        return response


async def load(orders: Orders) -> list[Outcome]:
    """All requests at equal intervals."""
    images, sent = Images(orders), []
    for number in range(int(orders.rate * orders.seconds)):
        await asyncio.sleep(max(0.0, orders.begin_s + number / orders.rate - time.monotonic()))
        sent.append(asyncio.create_task(images.send(number)))
    return list(await asyncio.gather(*sent))


async def attached(process: asyncio.subprocess.Process, orders: Orders) -> list[Outcome]:
    """For the test: give the orders to the process, and return the outcomes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
    return [Outcome(*each) for each in json.loads(await process.stdout.readline())]


async def serve() -> None:
    """Answer until the process ends."""
    server = await asyncio.get_running_loop().create_server(ImageConnection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until stdin closes."""
    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    while line := sys.stdin.readline():
        print(json.dumps(asyncio.run(load(Orders(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
