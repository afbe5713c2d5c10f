"""Clients that violate HTTP, a number at a time: each connects again when its connection has ended.

`python hostile_connections.py HOST PORT KEY COUNT` runs them in one process until its stdin closes; then it waits until
the gateway has ended all connections, and writes the counts of `HostileClients` as JSON to stdout.
"""

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

BODY = b'{"input":"hello"}'
LARGEST = 262_144  # The default of TIERLANE_MAX_BODY_BYTES.
PAUSE_S = 5.0  # Between two connections of one client.
PATIENCE_S = 25.0  # A connection that the gateway has not ended by then has no deadline.


class Line:
    """One connection of a hostile client to a gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self.reader = reader
        self.writer = writer
        self._key = key.encode()

    def head(self, *lines: bytes, length: int = len(BODY)) -> bytes:
        """The head of a valid request."""
        framing = b"Transfer-Encoding: chunked" if length < 0 else b"Content-Length: %d" % length
        first = [b"POST /v1/inference HTTP/1.1", b"Host: gateway", b"Authorization: Bearer " + self._key, framing]
        return b"\r\n".join([*first, *lines]) + b"\r\n\r\n"

    def request(self) -> bytes:
        """A valid request."""
        return self.head() + BODY

    async def send(self, data: bytes) -> None:
        """Send data as far as the gateway reads it."""
        self.writer.write(data)
        await self.writer.drain()


async def undecodable_target(line: Line) -> None:
    """A host name that cannot be decoded."""
    await line.send(b"GET http://xn--/ HTTP/1.1\r\nHost: a\r\n\r\n")


async def undecodable_authority(line: Line) -> None:
    """A CONNECT with a host name that cannot be decoded."""
    await line.send(b"CONNECT xn--:80 HTTP/1.1\r\nHost: a\r\n\r\n")


async def half_a_head(line: Line) -> None:
    """An incomplete head."""
    await line.send(line.request()[:40])


async def trickled_head(line: Line) -> None:
    """A head that never ends, one byte at a time."""
    await line.send(line.request()[:-30])
    while True:
        await line.send(b"x")
        await asyncio.sleep(0.5)


async def half_a_head_behind(line: Line) -> None:
    """A valid request with half of the next head."""
    await line.send(line.request() + line.request()[:40])


async def a_byte_short(line: Line) -> None:
    """The largest body without its last byte."""
    await line.send(line.head(length=LARGEST) + b"x" * (LARGEST - 1))


async def chunks_without_end(line: Line) -> None:
    """A chunked body without an end."""
    await line.send(line.head(length=-1) + b"10000\r\n%s\r\n" % (b"x" * 65_536))


async def broken_chunk(line: Line) -> None:
    """A chunk without a length."""
    await line.send(line.head(length=-1))
    await line.send(b"5\r\nhello\r\nzz\r\n")


async def garbage_behind(line: Line) -> None:
    """A valid request followed by garbage."""
    await line.send(line.request() + b"\x00garbage\r\n\r\n")


async def half_closed(line: Line) -> None:
    """A valid request, then a half-closed connection."""
    await line.send(line.request())
    line.writer.write_eof()


async def half_closed_body(line: Line) -> None:
    """Half a body, then a half-closed connection."""
    await line.send(line.head(length=LARGEST) + b"x" * (LARGEST // 2))
    line.writer.write_eof()


async def reset(line: Line) -> None:
    """Most of a body, then a reset."""
    await line.send(line.head(length=LARGEST) + b"x" * (LARGEST - 1))
    line.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.writer.close()


async def other_protocol(line: Line) -> None:
    """RTSP, in two pieces."""
    await line.send(b"GET /livez RT")
    await line.send(b"SP/1.1\r\nHost: a\r\n\r\n")


async def unread(line: Line) -> None:
    """Requests whose responses are never read."""
    line.reader._transport.pause_reading()  # type: ignore[attr-defined]  # has no public interface
    while True:
        await line.send(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
        await asyncio.sleep(0.1)  # Sending does not yield to other tasks before the buffers are full.


KINDS: tuple[Callable[[Line], Awaitable[None]], ...] = (
    undecodable_target,
    undecodable_authority,
    half_a_head,
    trickled_head,
    half_a_head_behind,
    a_byte_short,
    chunks_without_end,
    broken_chunk,
    garbage_behind,
    half_closed,
    half_closed_body,
    reset,
    other_protocol,
    unread,
)


class HostileClients:
    """`count` clients of all kinds, until `stop` is set. The gateway has to end their last connections."""

    def __init__(self, host: str, port: int, key: str, count: int) -> None:
        self._address = (host, port)
        self._key = key
        self._count = count
        self.stop = asyncio.Event()
        self.ended: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.begun_s = 0.0  # Monotonic time of the first byte of the last connection.

    async def run(self) -> None:
        """Return when every client's last connection has ended, or was held for too long."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._client(KINDS[number % len(KINDS)], number / self._count))

    async def _client(self, kind: Callable[[Line], Awaitable[None]], late: float) -> None:
        await self._stopped(late * 5.0)  # Not all at once.
        while not self.stop.is_set():
            name = kind.__name__
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._connection(kind)
                self.ended[name] += 1
            except TimeoutError:
                self.held[name] += 1
            await self._stopped(PAUSE_S)

    async def _connection(self, kind: Callable[[Line], Awaitable[None]]) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*self._address)
            sending = asyncio.ensure_future(self._send(kind, Line(reader, writer, self._key)))
            try:
                await writer.wait_closed() if kind is unread else await _read_to_the_end(reader)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                writer.close()

    async def _send(self, kind: Callable[[Line], Awaitable[None]], line: Line) -> None:
        self.begun_s = time.monotonic()
        await kind(line)

    async def _stopped(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stop.wait()


async def _read_to_the_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


async def main(host: str, port: str, key: str, count: str) -> None:
    """Run the clients of this process."""
    os.nice(5)  # The clients must not take CPU from the stack.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients = HostileClients(host, int(port), key, int(count))
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: (loop.remove_reader(sys.stdin), clients.stop.set()))
    await clients.run()
    json.dump({"ended": clients.ended, "held": clients.held, "begun_s": clients.begun_s}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
