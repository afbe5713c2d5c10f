"""CPU of an event of a passed-on chat by role, and how long a token takes from an engine to the client.

64 clients read chats from an engine with continuous batching (`tools/bench/token_engine.py`), each followed by the next one. The
text of a token is the time at which the engine wrote it. The CPU of an event is the difference between chats of 80 and
of 8 tokens without the CPU of idle processes, so that it does not contain that of a request.
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
from typing import Any, NamedTuple

from cases.outcome import Check, Outcome, at_most, figure, none_of
from cases.stack import SHADOW, Stack, started, used_us
from cases.streams import percentile

STREAMS = 64
TOKENS = 80
FEW_TOKENS = 8
IDLE_S = 5.0
MOST_US = 38.0
MOST_FIRST_MS = 5.0
_TOKEN = re.compile(rb'"content":" (\d+)"')


class Client(asyncio.Protocol):
    """One connection that reads streams one after the other until `until`, in monotonic seconds."""

    def __init__(self, request: bytes, tokens: int, until: float) -> None:
        self._request = request
        self._tokens = tokens
        self._until = until
        self._parts: list[tuple[float, bytes]] = []
        self.first_ms: list[float] = []
        self.all_ms: list[float] = []
        self.read = 0
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
        if not data.endswith(b"0\r\n\r\n") and not refused:
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
        whole = b"".join(data for _, data in parts)
        delays = [(at - int(written) / 1e6) * 1000 for at, data in parts for written in _TOKEN.findall(data)]
        self.read += 1
        self.broken += len(_TOKEN.findall(whole)) != self._tokens or b"[DONE]" not in whole
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


async def read_all(stack: Stack, tokens: int, seconds: float) -> list[Client]:
    """Read streams of `tokens` with all clients for a number of seconds."""
    loop, port = asyncio.get_running_loop(), int(stack.info.http_url.rsplit(":", 1)[1])
    message = [{"role": "user", "content": "count"}]
    body = json.dumps({"model": "openai", "messages": message, "stream": True, "max_tokens": tokens}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {stack.info.keys['paid']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    clients: list[Client] = []
    until = time.monotonic() + seconds
    for _ in range(STREAMS):
        _, client = await loop.create_connection(lambda: Client(head.encode() + body, tokens, until), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.over for client in clients))
    return clients


class Used(NamedTuple):
    """The CPU of each role in a time, in us, and what it was used for."""

    cpu_us: Mapping[str, float]
    seconds: float
    requests: int = 0
    events: int = 0


def measured(stack: Stack, tokens: int, seconds: float) -> tuple[Used, list[Client]]:
    """Read streams of so many tokens; of 0 tokens: nothing."""
    before, at = stack.reading(), time.monotonic()
    clients = asyncio.run(read_all(stack, tokens, seconds)) if tokens else []
    if not tokens:
        time.sleep(seconds)
    events, requests = sum(len(each.all_ms) for each in clients), sum(each.read for each in clients)
    return Used(used_us(before, stack.reading(), 1), time.monotonic() - at, requests, events), clients


def per_event(idle: Used, few: Used, many: Used) -> dict[str, float]:
    """The CPU of an event by role: what remains without idle work and requests."""
    found = {}
    for role, idle_us in idle.cpu_us.items():
        few_us, many_us = (each.cpu_us.get(role, 0.0) - idle_us / idle.seconds * each.seconds for each in (few, many))
        events = many.events - few.events * many.requests / max(1, few.requests)
        found[role] = round((many_us - few_us * many.requests / max(1, few.requests)) / max(1.0, events), 2)
    return found


def run(*, quick: bool) -> Outcome:
    """Measure after a first round, in which the worker learns how many chats the engine takes at a time."""
    with engine() as url, started(workers=1, batch=STREAMS, gateways=1, backend=f"openai:{url}") as stack:
        stack.raise_limits(SHADOW)
        asyncio.run(read_all(stack, TOKENS, 3))
        idle, _ = measured(stack, 0, IDLE_S)
        few, _ = measured(stack, FEW_TOKENS, 4 if quick else 10)
        many, clients = measured(stack, TOKENS, 8 if quick else 20)
    found = {
        "events": many.events,
        "events_s": many.events / many.seconds,
        "all_us": {role: round(us / max(1, many.events), 2) for role, us in many.cpu_us.items()},
        "cpu_us": per_event(idle, few, many),
        "first_ms": percentile(sorted(ms for client in clients for ms in client.first_ms), 0.5),
        "p50_ms": percentile(sorted(ms for client in clients for ms in client.all_ms), 0.5),
        "p99_ms": percentile(sorted(ms for client in clients for ms in client.all_ms), 0.99),
        "broken": sum(client.broken for client in clients),
    }
    return Outcome(judge(found), found, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Judge the CPU of an event over all processes and the delay of the first token."""
    cpu: Mapping[str, float] = found["cpu_us"]
    return [
        figure("tokens read", f"{found['events']:,}, {found['events_s']:,.0f} a second"),
        figure("CPU of an event by role", ", ".join(f"{role} {us:.1f} us" for role, us in cpu.items())),
        at_most("CPU of an event", sum(cpu.values()), MOST_US, " us", 1),
        figure("the same with requests and idle work", f"{sum(found['all_us'].values()):.1f} us"),
        at_most("first token, from the engine to the client, p50", found["first_ms"], MOST_FIRST_MS, " ms", 1),
        figure("any token, p50 and p99", f"{found['p50_ms']} and {found['p99_ms']} ms"),
        none_of("streams that are not whole", found["broken"]),
    ]
