"""The gateways' port from the moment `up` has it: who gets it, who does not, and what is in nobody's way."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from eventually import eventually
from tierlane.up.data_dir import StackError, held_port
from tierlane.up.stack import wait_until_ready
from up_harness import RunningUp

HOST = "127.0.0.1"
IP_LOCAL_PORT_RANGE = 51  # Linux 6.3; Python's socket has no name for it.


def server(port: int, *, shared: bool) -> socket.socket:
    """One that listens as asyncio's and aiohttp's do."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind((HOST, port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


@contextmanager
def only_free(port: int) -> Iterator[socket.socket]:
    """A socket for which the kernel may choose this port and no other."""
    with socket.socket() as choosy:
        try:
            choosy.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
        except OSError:
            pytest.skip("needs Linux 6.3")
        yield choosy


def test_gateways_listen_beside_it_and_nobody_else() -> None:
    """A worker's direct endpoint does not get the port, however often a gateway begins again."""
    with held_port(HOST, 0) as port:
        for _ in range(2):
            with closing(server(port, shared=True)), closing(server(port, shared=True)):
                pass
            with pytest.raises(OSError, match="in use"):
                server(port, shared=False)

    with closing(server(port, shared=False)):
        pass


def test_no_connection_comes_to_it() -> None:
    """As long as no gateway listens clients are refused; once one does, all of them are its own."""
    with held_port(HOST, 0) as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        with closing(server(port, shared=True)) as gateway:
            gateway.settimeout(5)
            for _ in range(20):
                with socket.create_connection((HOST, port), timeout=5), gateway.accept()[0]:
                    pass


def test_the_kernel_gives_it_to_no_server_that_takes_any_port() -> None:
    """Before it was held, one of many workers could be given it, and no gateway ever listened."""
    with held_port(HOST, 0) as port, only_free(port) as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            worker.bind((HOST, 0))


def test_the_kernel_gives_it_to_no_client() -> None:
    """One that asks whether a gateway listens yet could be given the same port: TCP then connects it to itself."""
    with (
        held_port(HOST, 0) as port,
        only_free(port) as client,
        pytest.raises(OSError, match="assign requested address"),
    ):
        client.connect((HOST, port))


def test_a_held_port_is_refused_to_another_stack() -> None:
    """Also while no gateway listens yet: they would share it silently."""
    with (
        held_port(HOST, 0) as port,
        pytest.raises(StackError, match=f"Port {port} is in use on {HOST}"),
        held_port(HOST, port),
    ):
        pass


@pytest.mark.parametrize("shared", [True, False])
def test_closed_connections_are_no_obstacle(shared: bool) -> None:
    """Those of the last stack, nor of another server that ended a moment ago, which closed first."""
    with closing(server(0, shared=shared)) as last:
        port = last.getsockname()[1]
        with socket.create_connection((HOST, port), timeout=5) as client:
            last.accept()[0].close()
            assert client.recv(1) == b""

    with held_port(HOST, port) as same, closing(server(port, shared=True)):
        assert same == port


async def test_up_holds_its_port_before_any_gateway_listens(tmp_path: Path) -> None:
    """From its first moments on, and no longer than it runs."""
    with held_port(HOST, 0) as port:
        pass
    up = RunningUp(tmp_path / "data", port)
    try:
        await eventually(lambda: _is_taken(port), "the port is held")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        await up.ready()
        await up.interrupt()
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()

    assert not _is_taken(port)


def _is_taken(port: int) -> bool:
    try:
        server(port, shared=False).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    "said", [b"GET /readyz HTTP/1.1\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_what_is_no_answer_is_not_ready(said: bytes) -> None:
    """Whatever speaks there, `up` waits on for a gateway; it does not end with a traceback."""
    asked = answered = 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, answered
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()
        await writer.wait_closed()
        answered += 1

    stranger = await asyncio.start_server(speak, HOST, 0)
    async with stranger:
        waiting = asyncio.create_task(
            wait_until_ready(f"http://{HOST}:{stranger.sockets[0].getsockname()[1]}", "token")
        )
        await eventually(lambda: asked >= 3 or waiting.done(), "it is asked again")
        assert not waiting.done()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await asyncio.get_running_loop().shutdown_default_executor()  # The last question is asked in its thread.
        await eventually(lambda: answered == asked, "every question has its answer")
