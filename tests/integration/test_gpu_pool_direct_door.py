"""The door of a worker's direct endpoint: who is let in, and that nothing that comes in ends more than its connection."""

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.worker import direct_server
from gpu_pool.worker.worker import Worker, WorkerConfig
from integration.gpu_pool_direct import TOKEN, DirectClient, StartHere, item, start_here, told
from scheduler.errors import StartError
from scheduler.protocol import direct
from scheduler.protocol.direct import HEADER, DirectBatch, Hello, Welcome, direct_token, pack
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from stack import free_port
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["start_here"]

HELLO = Hello("g1", TOKEN)
Connect = Callable[[Worker], Awaitable[DirectClient]]


async def still_serves(worker: Worker) -> None:
    """Another connection is let in and answered."""
    client = await DirectClient.welcomed(worker)
    assert told(await client.outcomes(item("abc"))) == {"abc": "cba"}


async def test_the_service_token_opens(start_here: StartHere) -> None:
    """The worker says who it is and how large a batch may be, within what a message may hold."""
    for worker_id, most, told_most in (("w1", 8, 8), ("w2", 4096, 100)):
        client = await DirectClient.open(await start_here(worker_id=worker_id, max_batch_size=most))
        client.send(HELLO)

        assert await client.receive() == Welcome(worker_id, told_most)


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\u00e9\u00fc" * 200])
async def test_another_token_is_refused_without_a_word(start_here: StartHere, token: str) -> None:
    """The connection ends, and whoever has the token is served."""
    worker = await start_here()
    client = await DirectClient.open(worker)

    client.send(Hello("g1", token))

    assert await client.closed()
    assert (worker._endpoint.refused, worker._endpoint.malformed) == (1, 0)
    await still_serves(worker)


async def test_whoever_says_nothing_is_closed(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even half a hello keeps a connection open; a hello that was said keeps it for ever."""
    monkeypatch.setattr(direct_server, "HELLO_S", 0.2)
    worker = await start_here()
    silent, slow, good = [await DirectClient.open(worker) for _ in range(3)]
    good.send(HELLO)
    slow.send_bytes(pack(HELLO)[:9])

    assert await silent.closed()
    assert await slow.closed()
    assert await good.receive() == Welcome("w1", 32)
    assert told(await good.outcomes(item("abc"))) == {"abc": "cba"}


BEFORE_HELLO = [
    pack(DirectBatch(1, [])),
    pack(Welcome("w9", 8)),
    HEADER.pack(2) + b"\xc1\xc1",
    HEADER.pack(1 << 31),
    HEADER.pack(5000) + b"x" * 5000,  # More than a stranger may have us read.
    b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    HEADER.pack(0),
]
AFTER_HELLO = [
    pack(HELLO),
    pack(Welcome("w9", 8)),
    pack(DirectBatch(1, [item(f"r{i}") for i in range(101)])),
    HEADER.pack(33 << 20),
    HEADER.pack(2) + b"\xc1\xc1",
    HEADER.pack(100_000) + b"\x91" * 100_000,
    HEADER.pack(len(pickle.dumps(HELLO))) + pickle.dumps(HELLO),
]


@pytest.mark.parametrize(
    ("connect", "frame"),
    [(DirectClient.open, frame) for frame in BEFORE_HELLO] + [(DirectClient.welcomed, frame) for frame in AFTER_HELLO],
)
async def test_junk_ends_its_connection(start_here: StartHere, connect: Connect, frame: bytes) -> None:
    """From a stranger or from somebody with the token: it is counted, and never ends the endpoint."""
    worker = await start_here()
    client = await connect(worker)

    client.send_bytes(frame)

    assert await client.closed()
    assert worker._endpoint.malformed == 1
    await still_serves(worker)


async def test_a_frame_that_does_not_end_ends_its_connection(
    start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that died in the middle of a message holds no place for ever."""
    monkeypatch.setattr(direct_server, "TRANSFER_S", 0.2)
    worker = await start_here()
    client = await DirectClient.welcomed(worker)

    client.send_bytes(HEADER.pack(100) + b"x")

    assert await client.closed()
    await still_serves(worker)


async def test_connections_are_bounded(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over the limit is closed at once; a place that becomes free is given again."""
    monkeypatch.setattr(direct_server, "MAX_CONNECTIONS", 2)
    worker = await start_here()
    first, second = await DirectClient.welcomed(worker), await DirectClient.welcomed(worker)

    third = await DirectClient.open(worker)
    third.send(HELLO)
    assert await third.closed()
    assert told(await second.outcomes(item("abc"))) == {"abc": "cba"}
    first.close()
    await eventually(lambda: len(worker._endpoint._connections) == 1, "a place is free")
    await still_serves(worker)


async def test_a_gateway_that_goes_while_its_batch_runs_disturbs_nobody(start_here: StartHere) -> None:
    """The run ends as if nothing had happened, and its place is free."""
    worker = await start_here("simulated:200")
    client = await DirectClient.welcomed(worker)
    client.send(DirectBatch(1, [item("a")]))
    await eventually(lambda: worker._execution.running, "it runs")

    client.close()

    await eventually(lambda: not worker._endpoint._connections, "its place is free")
    assert worker._direct.in_flight == 0
    await still_serves(worker)


async def test_answers_too_large_for_a_message_fail_their_batch(
    start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection serves the next one."""
    worker = await start_here()
    client = await DirectClient.welcomed(worker)
    monkeypatch.setattr(direct, "MAX_BODY_BYTES", 500)

    assert told(await client.outcomes(item("a", body=b"\x93\xa1m\xd9\xc8" + b"x" * 200 + b"\x80"))) == {"a": "x" * 200}
    bodies = [item(name, body=b"\x93\xa1m\xd9\xc8" + b"x" * 200 + b"\x80") for name in "ab"]
    monkeypatch.setattr(direct, "MAX_BODY_BYTES", 10_000)
    frame = pack(DirectBatch(2, bodies))
    monkeypatch.setattr(direct, "MAX_BODY_BYTES", len(frame) - HEADER.size)
    assert told(await client.outcomes(*bodies)) == {"a": "invalid_output", "b": "invalid_output"}


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_an_address_that_is_not_there_stops_the_worker(start_here: StartHere, host: str) -> None:
    """One sentence names it: no restart helps."""
    with pytest.raises(StartError, match=rf"The direct endpoint cannot listen on {host}:0: .+; choose another\."):
        await start_here(direct_host=host)


async def test_a_port_that_is_taken_stops_the_worker(start_here: StartHere) -> None:
    """Two workers of one host need two ports."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            await start_here(direct_port=port)


@pytest.mark.parametrize(
    ("changes", "local_host", "named", "announced"),
    [
        ({"direct_host": "127.0.0.1"}, "10.0.0.7", "gpu-1", "127.0.0.1:7"),
        ({"direct_host": "::1"}, "10.0.0.7", "gpu-1", "[::1]:7"),
        ({"direct_host": "0.0.0.0"}, "10.0.0.7", "gpu-1", "10.0.0.7:7"),  # From where Redis is reached.
        ({"direct_host": "::"}, "fd00::7", "gpu-1", "[fd00::7]:7"),
        ({"direct_host": "0.0.0.0"}, "127.0.0.1", "gpu-1", "gpu-1:7"),  # A Redis of this host says nothing of others.
        ({"direct_host": "0.0.0.0"}, "127.0.0.1", "", "127.0.0.1:7"),
        ({"direct_host": "0.0.0.0"}, "", "", "127.0.0.1:7"),
        ({"direct_host": "0.0.0.0", "direct_advertise": "gpu.example"}, "10.0.0.7", "gpu-1", "gpu.example:7"),
        ({"direct_host": "0.0.0.0", "direct_advertise": "fd00::8"}, "10.0.0.7", "gpu-1", "[fd00::8]:7"),
    ],
)
def test_the_announced_address_can_be_connected_to(
    changes: dict[str, str], local_host: str, named: str, announced: str
) -> None:
    """Brackets for IPv6; where the worker listens on every address, the one from which it reaches Redis."""
    config = WorkerConfig("redis://r", "w1", **changes)  # type: ignore[arg-type]

    assert direct_server.announced(config, 7, local_host, named) == announced


async def test_the_local_end_of_the_connection_to_redis_is_known(tmp_path: Path) -> None:
    """Over TCP it is an address; over a Unix socket, or before there is a connection, nothing."""
    port = free_port()
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True, extra_args=("--port", str(port)))
    await server.start()
    found = []
    for url in (f"redis://127.0.0.1:{port}", server.url):
        client = command_client(url, 5.0)
        presence = Presence(client, Keys())
        found.append(presence.local_host())
        await presence.census()
        found.append(presence.local_host())
        await client.aclose()
    await server.stop()

    assert found == ["", "127.0.0.1", "", ""]


DERIVED = direct_token(TOKEN)


@pytest.mark.parametrize(
    ("changes", "let_in", "kept_out"),
    [
        ({"service_token": "", "direct_token": DERIVED}, [DERIVED], [TOKEN, "", DERIVED[:-1]]),
        ({"service_token": TOKEN}, [TOKEN, DERIVED], [""]),  # A worker of an older deployment knows both.
    ],
)
async def test_a_worker_needs_the_direct_token_alone(
    start_here: StartHere, changes: dict[str, str], let_in: list[str], kept_out: list[str]
) -> None:
    """It does not hold the service token, and does not take it; one that still has it lets old gateways in."""
    worker = await start_here(**changes)
    for token in (*let_in, *kept_out):
        client = await DirectClient.open(worker)
        client.send(Hello("g1", token))
        if token in let_in:
            assert isinstance(await client.receive(), Welcome)
        else:
            assert await client.closed()

    assert worker._endpoint.refused == len(kept_out)


def test_the_direct_token_is_what_openssl_prints() -> None:
    """Printf 'tierlane direct 1' | openssl dgst -sha256 -hmac <service token>, as docs/deploy.md says."""
    assert direct_token("a-token-for-development") == (
        "7d734418df09110ab8b2ddbc95d1506f31952b4384ff9b9c390ed4bb5d07f31d"
    )
    assert direct_token("") == ""


async def test_the_same_batch_may_come_twice_at_once(start_here: StartHere) -> None:
    """Two gateways, or one that lost its connection: inference has no side effects, so both are answered."""
    worker = await start_here("simulated:50")
    clients = [await DirectClient.welcomed(worker) for _ in range(2)]

    answers = await asyncio.gather(*[client.outcomes(item("abc")) for client in clients])

    assert [told(answer) for answer in answers] == [{"abc": "cba"}] * 2
