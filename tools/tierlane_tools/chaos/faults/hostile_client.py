"""A client that violates HTTP beside the load, with a few connections of each kind.

It has a customer of its own, so its accepted requests are not part of the load. A connection that ends is opened again
after a pause, so the number of connections is bounded.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.target import HostileAccess, StackTargets

CONNECTIONS_OF_A_KIND = 4
PAUSE_S = 0.2
CONNECT_TIMEOUT_S = 2.0
STAYS_S = 60.0  # Longer than the fault, so that the gateway has to end the connection.
READ_BYTES = 1 << 16
PIPELINED = 200
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: gateway\r\n\r\n"


@dataclass(frozen=True)
class HostileKind:
    """The data that is sent on a connection, its longest duration, and whether responses are read."""

    name: str
    sends: Callable[[HostileAccess, Random], bytes]
    stays_s: float = STAYS_S
    reads: bool = True


def post(hostile_access: HostileAccess, path: str, body: dict[str, object], length: int | None = None) -> bytes:
    """A request with a body; `length`: a wrong Content-Length."""
    sent = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {hostile_access.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(sent) if length is None else length}\r\n\r\n"
    )
    return head.encode("ascii") + sent


def _half_head(hostile_access: HostileAccess, random: Random) -> bytes:
    whole = post(hostile_access, "/v1/inference", {"input": "half"})
    return whole[: random.randrange(1, whole.index(b"\r\n\r\n") + 3)]


def _half_body(hostile_access: HostileAccess, random: Random) -> bytes:
    return post(hostile_access, "/v1/inference", {"input": "half"}, length=random.randrange(100, 100_000))


def _invalid_host(hostile_access: HostileAccess, random: Random) -> bytes:
    del hostile_access
    host = random.choice(["xn--", "xn--a-\xe4", "[::1", "%", "a" * 300, "x:99999", "\x7f"])
    return f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1")


def _trailing_garbage(hostile_access: HostileAccess, random: Random) -> bytes:
    garbage = bytes(random.randrange(256) for _ in range(random.randrange(1, 200)))
    return post(hostile_access, "/v1/inference", {"input": "before garbage"}) + garbage


def _stream(hostile_access: HostileAccess, random: Random) -> bytes:
    del random
    return post(hostile_access, "/v1/completions", {"model": hostile_access.model, "prompt": "stream", "stream": True})


HOSTILE_KINDS = (
    HostileKind("half head", _half_head),
    HostileKind("half body", _half_body),
    HostileKind("invalid host", _invalid_host, stays_s=1.0),
    HostileKind("trailing garbage", _trailing_garbage, stays_s=1.0),
    HostileKind("abandoned stream", _stream, stays_s=0.05, reads=False),
    HostileKind("slow reader", lambda *_: LARGE * PIPELINED, reads=False),
)


@asynccontextmanager
async def hostile(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Connect to one gateway with all kinds; at the end every connection is reset."""
    hostile_access = targets.hostile_access(fault.index)
    random = Random(f"{fault.at_s}/hostile")
    tasks = [
        asyncio.create_task(_repeat(kind, hostile_access, Random(random.random())), name=kind.name)
        for kind in HOSTILE_KINDS
        for _ in range(CONNECTIONS_OF_A_KIND)
    ]
    try:
        yield f"{len(tasks)} connections"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(kind: HostileKind, hostile_access: HostileAccess, random: Random) -> None:
    while True:
        with suppress(OSError, TimeoutError):  # The gateway may be down, and closes connections.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(hostile_access.host, hostile_access.port)
            try:
                writer.write(kind.sends(hostile_access, random))
                with suppress(TimeoutError):
                    async with asyncio.timeout(kind.stays_s):
                        if not kind.reads:
                            await asyncio.sleep(kind.stays_s)
                        while await reader.read(READ_BYTES):
                            pass
            finally:
                writer.transport.abort()
        await asyncio.sleep(PAUSE_S)
