"""The fault proxy of `tierlane chaos`: what each kind of bad network does to a client of a real socket."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop

from eventually import eventually
from tierlane.chaos.faults.proxy import HOST, FaultProxy, Weather

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EchoServer:
    """Answers each line with itself; `lines` is what it got."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.lines: list[bytes] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def stop(self) -> None:
        assert self._server
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                self.lines.append(line)
                writer.write(line)
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    """A server on a Unix socket, whose path must be short."""
    with TemporaryDirectory() as directory:
        echo = EchoServer(Path(directory) / "echo.sock")
        await echo.start()
        yield echo
        await echo.stop()


@pytest.fixture
async def proxy(server: EchoServer) -> AsyncIterator[FaultProxy]:
    """A proxy before it."""
    made = FaultProxy("client>echo", server.socket)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(proxy: FaultProxy) -> AsyncIterator[Streams]:
    """A connection through the proxy."""
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    yield reader, writer
    writer.close()


async def _asked(client: Streams, text: bytes) -> bytes:
    reader, writer = client
    writer.write(text + b"\n")
    async with asyncio.timeout(2):
        return (await reader.readline()).rstrip(b"\n")


async def _silent(client: Streams, text: bytes, seconds: float = 0.15) -> bool:
    reader, writer = client
    writer.write(text + b"\n")
    try:
        async with asyncio.timeout(seconds):
            await reader.readline()
    except TimeoutError:
        return True
    return False


async def _ended(client: Streams) -> bool:
    async with asyncio.timeout(2):
        try:
            return await client[0].read() == b""
        except ConnectionResetError:
            return True


async def test_a_fair_network_passes_everything(client: Streams) -> None:
    """Bytes go both ways, small and large."""
    assert await _asked(client, b"hello") == b"hello"
    assert await _asked(client, b"x" * 50_000) == b"x" * 50_000


async def test_more_than_it_wants_to_hold_arrives_whole_and_in_order(client: Streams, proxy: FaultProxy) -> None:
    """A slow network holds the sender up instead of filling memory, and loses nothing."""
    reader, writer = client
    lines = [b"%d" % number * 100 + b"\n" for number in range(20_000)]
    with proxy.held(Weather(delay_s=0.02)):
        writer.writelines(lines)
        async with asyncio.timeout(10):
            assert [await reader.readline() for _ in lines] == lines


async def test_a_slow_network_delays_each_way_and_keeps_the_order(client: Streams, proxy: FaultProxy) -> None:
    """The delay counts both ways, and what is sent after the heal does not overtake what is on its way."""
    reader, writer = client
    began = time.monotonic()
    with proxy.held(Weather(delay_s=0.1)):
        writer.write(b"early\n")
        await asyncio.sleep(0.05)
    writer.write(b"late\n")
    assert [await reader.readline(), await reader.readline()] == [b"early\n", b"late\n"]
    assert 0.1 <= time.monotonic() - began < 1.0


async def test_lost_requests_never_reach_the_server(client: Streams, proxy: FaultProxy, server: EchoServer) -> None:
    """The server sees silence, and the connection is reset afterwards instead of carrying half a message."""
    with proxy.held(Weather(drop_requests=True)):
        assert await _silent(client, b"lost")
    assert server.lines == []
    client[1].write(b"after\n")
    assert await _ended(client)
    assert server.lines == []


async def test_lost_replies_leave_the_work_done(client: Streams, proxy: FaultProxy, server: EchoServer) -> None:
    """Half-open: the server got it and answered, the client hears nothing; the next answer resets the connection."""
    with proxy.held(Weather(drop_replies=True)):
        assert await _silent(client, b"done")
        assert server.lines == [b"done\n"]
    client[1].write(b"after\n")
    assert await _ended(client)


def test_what_is_late_for_a_client_that_left_is_dropped() -> None:
    """A timer of the slow network finds the connection closed, and minds nothing; uvloop would raise on a write."""

    async def scenario() -> list[object]:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        with TemporaryDirectory() as directory:
            server = EchoServer(Path(directory) / "echo.sock")
            await server.start()
            proxy = FaultProxy("client>echo", server.socket)
            await proxy.start()
            _, writer = await asyncio.open_connection(HOST, proxy.port)
            with proxy.held(Weather(delay_s=0.1)):
                writer.write(b"hello\n")
                await eventually(lambda: server.lines, "the server has answered")
                await asyncio.sleep(0.02)
                writer.transport.abort()
                await asyncio.sleep(0.15)
            await proxy.stop()
            await server.stop()
        return faults

    assert uvloop.run(scenario()) == []


async def test_a_cut_resets_both_sides(client: Streams, proxy: FaultProxy) -> None:
    """The client sees its connection end, and may connect again at once."""
    assert await _asked(client, b"hello") == b"hello"
    assert proxy.cut() == 1
    assert await _ended(client)
    again = await asyncio.open_connection(HOST, proxy.port)
    assert await _asked(again, b"again") == b"again"
    again[1].close()


async def test_refusing_ends_what_is_open_and_takes_nothing_new(client: Streams, proxy: FaultProxy) -> None:
    """Like a host without a listener; afterwards the port is the same."""
    port = proxy.port
    with proxy.held(Weather(refuse=True)):
        assert await _ended(client)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
        await proxy.settle()  # Not before the last one that refuses has ended.
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
    await proxy.settle()
    again = await asyncio.open_connection(HOST, port)
    assert await _asked(again, b"again") == b"again"
    again[1].close()


async def test_faults_overlap_and_end_one_by_one(client: Streams, proxy: FaultProxy) -> None:
    """Two faults on one proxy: the heal of the first leaves the second as it is."""
    with proxy.held(Weather(delay_s=0.05)):
        with proxy.held(Weather(drop_replies=True, delay_s=0.2)):
            assert proxy.weather == Weather(delay_s=0.2, drop_replies=True)
        assert proxy.weather == Weather(delay_s=0.05)
    assert proxy.weather == Weather()
    assert await _asked(client, b"hello") == b"hello"


async def test_a_server_that_is_away_resets_the_client(proxy: FaultProxy, server: EchoServer) -> None:
    """The proxy never stands in for its server; when that is back, so is the way to it."""
    await server.stop()
    server.socket.unlink(missing_ok=True)
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    assert await _ended((reader, writer))
    writer.close()

    await server.start()

    async def answers() -> bool:
        again = await asyncio.open_connection(HOST, proxy.port)
        answer = await _asked(again, b"back")
        again[1].close()
        return answer == b"back"

    await eventually(answers, "the server is reached again")
