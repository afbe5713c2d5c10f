"""A client that breaks every rule of HTTP, beside the load of good ones: each sort of it on a few connections at once.

It holds a key of a customer of its own, so that what it gets accepted is nobody's request of the load. Every connection is
opened again when it ends, after a pause, so that numbers are bounded whatever the gateway does.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from tierlane.chaos.faults.catalogue import Planned
from tierlane.chaos.faults.target import StackTargets, Stranger

CONNECTIONS_OF_A_SORT = 4
PAUSE_S = 0.2
CONNECT_TIMEOUT_S = 2.0
STAYS_S = 60.0  # Longer than the fault: until the gateway ends it.
READ_BYTES = 1 << 16
PIPELINED = 200
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: gateway\r\n\r\n"


@dataclass(frozen=True)
class Sort:
    """What is sent at once on a connection, how long that is kept at most, and whether anything is read from it."""

    name: str
    sends: Callable[[Stranger, Random], bytes]
    stays_s: float = STAYS_S
    reads: bool = True


def post(stranger: Stranger, path: str, body: dict[str, object], length: int | None = None) -> bytes:
    """A request with a body; `length` where the head shall tell another one than the body has."""
    sent = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {stranger.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(sent) if length is None else length}\r\n\r\n"
    )
    return head.encode("ascii") + sent


def _half_head(stranger: Stranger, random: Random) -> bytes:
    whole = post(stranger, "/v1/inference", {"input": "half"})
    return whole[: random.randrange(1, whole.index(b"\r\n\r\n") + 3)]


def _half_body(stranger: Stranger, random: Random) -> bytes:
    return post(stranger, "/v1/inference", {"input": "half"}, length=random.randrange(100, 100_000))


def _strange_host(stranger: Stranger, random: Random) -> bytes:
    del stranger
    host = random.choice(["xn--", "xn--a-\xe4", "[::1", "%", "a" * 300, "x:99999", "\x7f"])
    return f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1")


def _garbage_behind(stranger: Stranger, random: Random) -> bytes:
    garbage = bytes(random.randrange(256) for _ in range(random.randrange(1, 200)))
    return post(stranger, "/v1/inference", {"input": "before garbage"}) + garbage


def _stream(stranger: Stranger, random: Random) -> bytes:
    del random
    return post(stranger, "/v1/completions", {"model": stranger.model, "prompt": "stream", "stream": True})


SORTS = (
    Sort("half head", _half_head),
    Sort("half body", _half_body),
    Sort("strange host", _strange_host, stays_s=1.0),
    Sort("garbage behind", _garbage_behind, stays_s=1.0),
    Sort("abandoned stream", _stream, stays_s=0.05, reads=False),
    Sort("slow reader", lambda *_: LARGE * PIPELINED, reads=False),
)


@asynccontextmanager
async def hostile(ground: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """All sorts at one gateway; at the end every connection is reset."""
    stranger = ground.stranger(fault.index)
    random = Random(f"{fault.at_s}/hostile")
    tasks = [
        asyncio.create_task(_again_and_again(sort, stranger, Random(random.random())), name=sort.name)
        for sort in SORTS
        for _ in range(CONNECTIONS_OF_A_SORT)
    ]
    try:
        yield f"{len(tasks)} connections"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again_and_again(sort: Sort, stranger: Stranger, random: Random) -> None:
    while True:
        with suppress(OSError, TimeoutError):  # The gateway may be down, and ends what it does not like.
            await _once(sort, stranger, random)
        await asyncio.sleep(PAUSE_S)


async def _once(sort: Sort, stranger: Stranger, random: Random) -> None:
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(stranger.host, stranger.port)
    try:
        writer.write(sort.sends(stranger, random))
        with suppress(TimeoutError):
            async with asyncio.timeout(sort.stays_s):
                if not sort.reads:
                    await asyncio.sleep(sort.stays_s)
                while await reader.read(READ_BYTES):
                    pass
    finally:
        writer.transport.abort()
