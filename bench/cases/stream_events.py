"""CPU of an event of a passed-on chat by role, and how long a token takes from an engine to the client.

64 clients read chats of 80 tokens from an engine with continuous batching (`bench/token_engine.py`), each followed by the
next one. The text of a token is the time at which the engine wrote it.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases.outcome import Check, Outcome, at_most, figure, none_of
from cases.stack import SHADOW, Stack, started, used_us
from cases.streams import percentile

STREAMS = 64
TOKENS = 80
MOST_US = 38.0
MOST_FIRST_MS = 5.0
_TOKEN = re.compile(rb'"content":" (\d+)"')


class Client(asyncio.Protocol):
    """One connection that reads streams one after the other until `until`, in monotonic seconds."""

    def __init__(self, request: bytes, until: float) -> None:
        self._request = request
        self._until = until
        self._parts: list[tuple[float, bytes]] = []
        self.first_ms: list[float] = []
        self.all_ms: list[float] = []
        self.broken = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Record the data; after the end of a stream count it and send the next request."""
        self._parts.append((time.monotonic(), data))
        refused = not self._parts[0][1].startswith(b"HTTP/1.1 200")
        if not data.endswith(b"\r\n0\r\n\r\n") and not refused:
            return
        self._count()
        if time.monotonic() < self._until and not refused:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The last stream has ended."""
        if not self.over.done():
            self.over.set_result(None)

    def _count(self) -> None:
        parts, self._parts = self._parts, []
        delays = [(at - int(written) / 1e6) * 1000 for at, data in parts for written in _TOKEN.findall(data)]
        self.broken += len(delays) != TOKENS or b"[DONE]" not in parts[-1][1]
        self.first_ms += delays[:1]
        self.all_ms += delays


@contextmanager
def engine() -> Iterator[str]:
    """Run the engine; its URL."""
    script = Path(__file__).resolve().parents[1] / "token_engine.py"
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1" if process.stdout else ""
    finally:
        process.terminate()
        process.wait()


async def read_all(stack: Stack, seconds: float) -> list[Client]:
    """Read with all clients for a number of seconds."""
    loop, port = asyncio.get_running_loop(), int(stack.info.http_url.rsplit(":", 1)[1])
    message = [{"role": "user", "content": "count"}]
    body = json.dumps({"model": "openai", "messages": message, "stream": True, "max_tokens": TOKENS}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {stack.info.keys['paid']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    clients: list[Client] = []
    until = time.monotonic() + seconds
    for _ in range(STREAMS):
        _, client = await loop.create_connection(lambda: Client(head.encode() + body, until), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.over for client in clients))
    return clients


def run(*, quick: bool) -> Outcome:
    """Measure after a first round, in which the worker learns how many chats the engine takes at a time."""
    with engine() as url, started(workers=1, batch=STREAMS, gateways=1, backend=f"openai:{url}") as stack:
        stack.raise_limits(SHADOW)
        asyncio.run(read_all(stack, 3))
        before = stack.reading()
        clients = asyncio.run(read_all(stack, 8 if quick else 20))
        events = sum(len(client.all_ms) for client in clients)
        cpu = used_us(before, stack.reading(), events)
    found = {
        "events": events,
        "cpu_us": cpu,
        "first_ms": percentile(sorted(ms for client in clients for ms in client.first_ms), 0.5),
        "p50_ms": percentile(sorted(ms for client in clients for ms in client.all_ms), 0.5),
        "p99_ms": percentile(sorted(ms for client in clients for ms in client.all_ms), 0.99),
        "broken": sum(client.broken for client in clients),
    }
    return Outcome(judge(found), found, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Judge the CPU of an event over all processes and the delay of the first token."""
    cpu: Mapping[str, float] = found["cpu_us"]
    by_role = ", ".join(f"{role} {us:.1f} us" for role, us in cpu.items())
    return [
        figure("tokens read", f"{found['events']:,}"),
        figure("CPU of an event by role", by_role),
        at_most("CPU of an event, requests and idle work included", sum(cpu.values()), MOST_US, " us", 1),
        at_most("first token, from the engine to the client, p50", found["first_ms"], MOST_FIRST_MS, " ms", 1),
        figure("any token, p50 and p99", f"{found['p50_ms']} and {found['p99_ms']} ms"),
        none_of("streams that are not whole", found["broken"]),
    ]
