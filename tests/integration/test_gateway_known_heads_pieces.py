"""Whatever comes in whatever pieces: a connection that knows heads answers as one that has everything parsed."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.http.connection import EdgeConnection
from integration.gateway_fixtures import Stack, head_of, running_stack
from integration.test_gateway_fast_lane import request

SEEDS = 60
STRANGER = b"Bearer tl_abcdefghijkl_abcdefghijklmnopqrstuvwxyzAB000000"
CHUNKED = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nAuthorization: %s\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway and a worker behind it; nobody is told to wait for a wrong key."""
    async with running_stack(client, redis_url, auth_failures="off") as running:
        yield running


class Line(asyncio.Transport):
    """A client's line: what is written to it is kept, and pieces arrive as they are given."""

    def __init__(self, connection: EdgeConnection) -> None:
        super().__init__()
        self._connection = connection
        self.written = b""
        self.closed = self.paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


def messages(stack: Stack, rng: random.Random, run: str) -> Iterator[bytes]:
    """What a client may send: mostly what rides, and all that disturbs it. `run` tells idempotency keys apart."""
    keys = [stack.key(tier)["Authorization"].encode() for tier in ("free", "paid", "enterprise")] + [STRANGER]
    for number in range(rng.randint(3, 8)):
        key, body = rng.choice(keys), b'{"input":"%s"}' % (b"abc%d" % number * rng.randint(1, 20))
        yield rng.choices(
            [
                request(stack, key=key, body=body),
                request(stack, key=key, body=b"{"),
                request(stack, key=key, body=request(stack, key=key, body=body)),  # A request within a body.
                request(stack, b"Idempotency-Key: %s-%d" % (run.encode(), number), key=key, body=body),
                b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
                CHUNKED % key + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
                request(stack, b"Connection: close", key=key, body=body),
                b"\r\n" + request(stack, key=key, body=body),
                b"\x00\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nX-Begun: " + request(stack, key=key, body=body),  # And within a head.
            ],
            weights=[60, 6, 4, 6, 6, 3, 1, 3, 1, 4],
        )[0]


def pieces(rng: random.Random, sent: list[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The same bytes as they may arrive, and whether the client waits for what comes back before the next."""
    waiting = b""
    for message in sent:
        waiting += message
        fate = rng.random()
        within = waiting.find(b"POST /v1/inference", 1)
        if within > 0 or (fate < 0.1 and len(waiting) > 1):
            at = within if within > 0 else rng.randrange(1, len(waiting))
            yield waiting[:at], rng.random() < 0.5
            waiting = waiting[at:]
        elif fate < 0.15:
            continue  # It comes together with the next one.
        yield waiting, rng.random() < 0.8
        waiting = b""
    yield waiting, True


async def answers(stack: Stack, seed: int, *, known: bool) -> tuple[list[tuple[int, Any]], bool]:
    """Status, and output or error, of each answer, and whether the connection was closed."""
    rng, edge = random.Random(seed), stack.gateway._edge
    assert edge is not None
    connection = edge()
    assert isinstance(connection, EdgeConnection)
    line = Line(connection)
    connection.connection_made(line)
    if not known:
        connection._cache_attempts = 0

    def quiet() -> bool:
        return line.closed or connection in edge.body_watch or (connection._is_idle() and not connection._buffered)

    for piece, wait in pieces(rng, list(messages(stack, rng, f"{seed}{known}"))):
        await eventually(lambda: line.closed or not line.paused, "it reads")
        if not line.closed and piece:
            connection.data_received(piece)
        if wait:
            await asyncio.sleep(0)
            await eventually(quiet, f"seed {seed} is quiet")
    closed = line.closed
    line.close()
    await asyncio.sleep(0)
    return list(told(line.written)), closed


def told(written: bytes) -> Iterator[tuple[int, Any]]:
    """The answers in what was written, one after another."""
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        status, _, document = head_of(head + b"\r\n\r\n" + rest[:length])
        yield status, document.get("output", document.get("error", {}).get("code") if "error" in document else None)
        written = rest[length:]


async def test_no_piece_of_anything_is_answered_otherwise(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers in the same order, and the same end, for each of many ways to send."""
    rides: list[int] = []
    unparsed = EdgeConnection._take_cached

    def count(self: EdgeConnection, *args: Any) -> bool:
        rode = unparsed(self, *args)
        rides.append(rode)
        return rode

    monkeypatch.setattr(EdgeConnection, "_take_cached", count)
    for seed in range(SEEDS):
        assert await answers(stack, seed, known=True) == await answers(stack, seed, known=False), f"seed {seed}"

    assert sum(rides) > SEEDS
    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "nobody waits")
