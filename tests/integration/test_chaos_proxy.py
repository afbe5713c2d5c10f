"""The fault proxy of `tierlane chaos`: what each network fault does to a client on a real socket."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from eventually import eventually
from tierlane_tools.chaos.faults.proxy import HOST, FaultProxy, NetworkFault

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EchoServer:
    """Returns each line; `lines` holds those that it received, `connections` counts open ones."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError):
            while line := await reader.readline():
                self.lines.append(line)
                writer.write(line)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self.connections -= 1


@pytest.fixture
async def server() -> EchoServer:
    """The server behind the proxy."""
    return EchoServer()


@pytest.fixture
async def proxy(server: EchoServer) -> AsyncIterator[FaultProxy]:
    """A proxy before the server, whose socket needs a short path."""
    with TemporaryDirectory() as directory:
        socket = Path(directory) / "echo.sock"
        async with await asyncio.start_unix_server(server.serve, socket):
            proxy = FaultProxy("client>echo", socket)
            await proxy.start()
            yield proxy
            await proxy.stop()
            await eventually(lambda: not server.connections, "every connection is closed")


@pytest.fixture
async def client(proxy: FaultProxy) -> AsyncIterator[Streams]:
    """A connection through the proxy."""
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    yield reader, writer
    writer.close()


async def _echo(client: Streams, text: bytes) -> bytes:
    reader, writer = client
    writer.write(text + b"\n")
    async with asyncio.timeout(2):
        return (await reader.readline()).rstrip(b"\n")


async def _no_reply(client: Streams, text: bytes) -> bool:
    reader, writer = client
    writer.write(text + b"\n")
    try:
        async with asyncio.timeout(0.15):
            await reader.readline()
    except TimeoutError:
        return True
    return False


async def _closed(client: Streams) -> bool:
    async with asyncio.timeout(2):
        try:
            return await client[0].read() == b""
        except ConnectionResetError:
            return True


async def test_delay_keeps_the_order(client: Streams, proxy: FaultProxy) -> None:
    """Data sent after the fault does not overtake data that is still delayed."""
    reader, writer = client
    began = time.monotonic()
    with proxy.inject(NetworkFault(delay_s=0.1)):
        writer.write(b"early\n")
        await asyncio.sleep(0.05)  # The proxy must have read the first line within the fault.
    writer.write(b"late\n")
    assert [await reader.readline(), await reader.readline()] == [b"early\n", b"late\n"]
    assert 0.1 <= time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    ("fault", "received"), [(NetworkFault(drop_requests=True), []), (NetworkFault(drop_replies=True), [b"first\n"])]
)
async def test_dropped_data_resets_the_connection_later(
    client: Streams, proxy: FaultProxy, server: EchoServer, fault: NetworkFault, received: list[bytes]
) -> None:
    """Requests or replies are lost, and the next data resets the connection instead of carrying half a message."""
    with proxy.inject(fault):
        assert await _no_reply(client, b"first")
        assert server.lines == received
    client[1].write(b"after\n")
    assert await _closed(client)


async def test_refuse_closes_the_port(client: Streams, proxy: FaultProxy) -> None:
    """Open connections are reset and new ones refused until the last refusing fault is over; the port stays the same."""
    port = proxy.port
    with proxy.inject(NetworkFault(refuse=True)):
        assert await _closed(client)
        await proxy.reopen()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
    await proxy.reopen()
    again = await asyncio.open_connection(HOST, port)
    assert await _echo(again, b"again") == b"again"
    again[1].close()


async def test_faults_overlap(client: Streams, proxy: FaultProxy) -> None:
    """Each ends by itself and leaves the other as it is."""
    with proxy.inject(NetworkFault(delay_s=0.05)):
        with proxy.inject(NetworkFault(drop_replies=True, delay_s=0.2)):
            assert proxy.network == NetworkFault(delay_s=0.2, drop_replies=True)
        assert proxy.network == NetworkFault(delay_s=0.05)
    assert proxy.network == NetworkFault()
    assert await _echo(client, b"hello") == b"hello"
