"""An endpoint that sees images, and a load of chats with images, in a process of their own: `python image_load.py`.

It writes the port of the endpoint to stdout, reads `Orders` as a line of JSON, and writes one `Outcome` a request as JSON.
In the process of the test they would delay the clients whose latency is measured.
"""

import asyncio
import base64
import io
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from endpoint_stand_in import MODEL, StandIn, serving

IMAGE_BYTES = 2_000_000
MODEL_S = 0.3
"""The time of a chat with an image at the endpoint, so that a killed process has some."""

PATIENCE_S = 30.0
_NUMBER = re.compile(rb"image (\d+)\.")


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


class ImageEndpoint(StandIn):
    """Answers a chat with an image by its number and size, without decoding it."""

    async def _post(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        found = _NUMBER.search(raw[:4096])
        if found is None:
            return await super()._post(request)
        await asyncio.sleep(MODEL_S)
        message = {"role": "assistant", "content": expected(int(found[1]), len(raw) > IMAGE_BYTES * 4 // 3)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 700, "completion_tokens": 5, "total_tokens": 705}
        return web.json_response({"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage})


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


def halves() -> tuple[bytes, bytes]:
    """The body of a chat with an image, before and after its number."""
    url = "data:image/png;base64," + base64.b64encode(os.urandom(IMAGE_BYTES)).decode()
    parts = [{"type": "text", "text": "image @."}, {"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}]}).encode()
    before, after = body.split(b"@", 1)
    return before, after


async def send(orders: Orders, number: int, body: bytes) -> Outcome:
    """Send one chat on a connection of its own."""
    ports: list[int] = []
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=own_port(ports))
    headers = {"Authorization": f"Bearer {orders.key}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    opened_s, status, code = time.monotonic(), 0, ""
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        try:
            async with session.post(f"{orders.url}/v1/chat/completions", data=io.BytesIO(body)) as response:
                document = await response.json(content_type=None)
                status = response.status
                if status != 200:
                    code = document["error"]["code"]
                elif document["choices"][0]["message"]["content"] != expected(number):
                    code = "crossed"
        except (aiohttp.ClientError, TimeoutError) as error:
            status, code = 0, type(error).__name__
    return Outcome(ports[-1] if ports else 0, opened_s, time.monotonic() - opened_s, status, code)


async def load(orders: Orders) -> list[Outcome]:
    """All requests at equal intervals."""
    (before, after), sent = halves(), []
    for number in range(int(orders.rate * orders.seconds)):
        await asyncio.sleep(max(0.0, orders.begin_s + number / orders.rate - time.monotonic()))
        body = b"%s%d%s" % (before, number, after)
        sent.append(asyncio.create_task(send(orders, number, body)))
    return list(await asyncio.gather(*sent))


async def attached(process: asyncio.subprocess.Process, orders: Orders) -> list[Outcome]:
    """For the test: give the orders to the process, and return the outcomes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
    return [Outcome(*each) for each in json.loads(await process.stdout.readline())]


def main() -> None:
    """Serve until stdin closes."""
    with serving(ImageEndpoint()) as endpoint:
        print(endpoint.port, flush=True)
        if line := sys.stdin.readline():
            print(json.dumps(asyncio.run(load(Orders(**json.loads(line))))), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
