"""The header cache on connections: which requests use it, and that responses are those of a gateway that parses all."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.http.connection import HEAD, IDLE, MAX_CACHE_MISSES, EdgeConnection
from gateway.inference.fast_path import FastPath
from integration.gateway_fixtures import Stack, head_of, running_stack
from integration.test_gateway_inference_fast_path import Client, handled, request

SEEDS = 60
UNKNOWN_KEY = b"Bearer tl_abcdefghijkl_abcdefghijklmnopqrstuvwxyzAB000000"
CHUNKED = b"POST /v1/inference HTTP/1.1\r\nHost: a\r\nAuthorization: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway without a limit of failed authentications, and a worker."""
    async with running_stack(client, redis_url, auth_failures="off") as running:
        yield running


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The input of the parser."""
    inputs: list[bytes] = []
    parse = EdgeConnection._parse

    def record(self: EdgeConnection, data: bytes, *rest: Any) -> None:
        inputs.append(data)
        parse(self, data, *rest)

    monkeypatch.setattr(EdgeConnection, "_parse", record)
    return inputs


async def test_repeated_headers_are_not_parsed(
    stack: Stack, parses: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever connection, body and key. A request for the handler, or an outage, does not disable the cache."""
    one, other = await Client.of(stack), await Client.of(stack)
    responses = [
        await one.send(request(stack)),
        await one.send(request(stack, body=b'{"input":"another"}')),
        await other.send(request(stack)),
        await other.send(request(stack, key=UNKNOWN_KEY)),
        await other.send(request(stack, key=b"Basic YTpi")),
        await one.send(request(stack)),
    ]
    assert [(status, document.get("output")) for status, _, document in responses] == [
        (200, "olleh"), (200, "rehtona"), (200, "olleh"), (401, None), (401, None), (200, "olleh"),
    ]  # fmt: skip
    assert (len(parses), handled(stack.gateway)) == (1, 0)

    for data in (LIVEZ, request(stack), request(stack, b"Idempotency-Key: one"), request(stack)):
        assert (await one.send(data))[0] == 200
    assert (len(parses), handled(stack.gateway)) == (3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "open", False)
        for _ in range(MAX_CACHE_MISSES + 1):
            assert (await one.send(request(stack)))[0] == 200
    await one.send(request(stack))
    assert len(parses) == 3 + MAX_CACHE_MISSES + 1
    for client in (one, other):
        client.writer.close()


async def test_an_incomplete_head_is_not_taken_from_the_cache(stack: Stack, parses: list[bytes]) -> None:
    """Request smuggling: the head matches so far, and its length fits what has arrived. The rest is its body."""
    client = await Client.of(stack)
    inner = request(stack, body=b'{"input":"smuggled"}')
    outer = request(stack, b"X-Long: " + b"x" * 100, body=inner)
    await client.send(outer)
    piece = outer[: -len(inner) - 3]
    length = len(piece) - 3
    piece = piece.replace(b"Content-Length: %d" % len(inner), b"Content-Length: %d" % length)
    client.writer.write(piece)
    await eventually(lambda: len(parses) == 2, "the beginning has arrived")
    status, _, document = await client.send(b"\n\r\n" + inner + b" " * (length - len(inner)))

    assert (status, document["error"]["code"]) == (400, "invalid_request")
    assert stack.worker.seen == []
    client.writer.close()


@pytest.mark.parametrize("known", [False, True])
async def test_a_client_cannot_fill_the_cache(stack: Stack, known: bool) -> None:
    """Unauthenticated requests are not cached, and a connection may add a limited number of entries."""
    client = await Client.of(stack)
    key = None if known else b"Bearer nobody"
    for number in range(MAX_CACHE_MISSES + 5):
        status, _, _ = await client.send(request(stack, b"X-Number: %d" % number, key=key))
        assert status == (200 if known else 401)
    client.writer.close()

    edge = stack.gateway._edge
    assert edge is not None
    assert len(edge.header_cache) == (MAX_CACHE_MISSES if known else 0)


class Transport(asyncio.Transport):
    """Keeps what is written to it; the test passes received data to the connection."""

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
    """Random requests, mostly for the fast path. `run` keeps the idempotency keys of runs apart."""
    keys = [stack.key(tier)["Authorization"].encode() for tier in ("free", "paid", "enterprise")] + [UNKNOWN_KEY]
    for number in range(rng.randint(3, 8)):
        key, body = rng.choice(keys), b'{"input":"%s"}' % (b"abc%d" % number * rng.randint(1, 20))
        yield rng.choices(
            [
                request(stack, key=key, body=body),
                request(stack, key=key, body=b"{"),
                request(stack, key=key, body=request(stack, key=key, body=body)),  # A request within a body.
                request(stack, b"Idempotency-Key: %s-%d" % (run.encode(), number), key=key, body=body),
                LIVEZ,
                CHUNKED % key + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
                request(stack, b"Connection: close", key=key, body=body),
                b"\r\n" + request(stack, key=key, body=body),
                b"\x00\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nX-Begun: " + request(stack, key=key, body=body),  # And within a head.
            ],
            weights=[60, 6, 4, 6, 6, 3, 1, 3, 1, 4],
        )[0]


def pieces(rng: random.Random, data: list[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The same bytes in random pieces, and whether the client waits for responses before the next piece."""
    unsent = b""
    for message in data:
        unsent += message
        choice = rng.random()
        within = unsent.find(b"POST /v1/inference", 1)
        if within > 0 or (choice < 0.1 and len(unsent) > 1):
            at = within if within > 0 else rng.randrange(1, len(unsent))
            yield unsent[:at], rng.random() < 0.5
            unsent = unsent[at:]
        elif choice < 0.15:
            continue  # It is sent together with the next one.
        yield unsent, rng.random() < 0.8
        unsent = b""
    yield unsent, True


async def responses(stack: Stack, seed: int, *, cached: bool) -> tuple[list[tuple[int, Any]], bool]:
    """Status, and output or error, of each response, and whether the connection was closed."""
    rng, edge = random.Random(seed), stack.gateway._edge
    assert edge is not None
    connection = edge()
    assert isinstance(connection, EdgeConnection)
    transport = Transport(connection)
    connection.connection_made(transport)
    if not cached:
        connection._cache_attempts = 0

    def idle() -> bool:
        return transport.closed or connection in edge.body_watch or connection._state in (IDLE, HEAD)

    async def remains_idle() -> bool:
        before = idle()
        await asyncio.sleep(0)  # A request that has arrived meanwhile is begun in the next turn of the loop.
        return before and idle()

    for piece, wait in pieces(rng, list(messages(stack, rng, f"{seed}{cached}"))):
        await eventually(lambda: transport.closed or not transport.paused, "it reads")
        if not transport.closed and piece:
            connection.data_received(piece)
        if wait:
            await eventually(remains_idle, f"seed {seed} is idle")
    closed = transport.closed
    transport.close()
    await asyncio.sleep(0)
    return list(decoded(transport.written)), closed


def decoded(written: bytes) -> Iterator[tuple[int, Any]]:
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        status, _, document = head_of(head + b"\r\n\r\n" + rest[:length])
        yield status, document.get("output", document.get("error", {}).get("code") if "error" in document else None)
        written = rest[length:]


async def test_responses_do_not_depend_on_the_cache(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same responses in the same order, and the same end of the connection, for many random ways to send."""
    hits: list[int] = []
    take_cached = EdgeConnection._take_cached

    def count(self: EdgeConnection, *args: Any) -> bool:
        hits.append(take_cached(self, *args))
        return bool(hits[-1])

    monkeypatch.setattr(EdgeConnection, "_take_cached", count)
    for seed in range(SEEDS):
        assert await responses(stack, seed, cached=True) == await responses(stack, seed, cached=False), f"seed {seed}"

    assert sum(hits) > SEEDS
    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "no request is pending")
