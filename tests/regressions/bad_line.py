"""A proxy in front of Redis that drops, delays, refuses or cuts on demand, and records what clients send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


class BadLine:
    """Listens on loopback for the server behind a Unix socket. The faults are attributes with immediate effect."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.drop_requests = False  # Data from the client is dropped.
        self.drop_replies = False  # Data from the server is dropped.
        self.refuse = False  # New connections are reset.
        self.delay_s = 0.0  # Of each chunk from the server.
        self.accepted = 0
        self.requests: list[bytes] = []

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def sent(self, command: bytes) -> int:
        """How often this command was sent."""
        return b"".join(self.requests).upper().count(b"\r\n" + command + b"\r\n")

    def stall(self) -> None:
        """Stop reading from the server, as a client that hangs."""
        self._flowing.clear()

    def flow(self) -> None:
        """Read again."""
        self._flowing.set()

    def cut(self) -> None:
        """Reset all connections on both sides."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self.cut()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.create_task(self._carry(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        upstream_reader, upstream = await asyncio.open_unix_connection(self._socket)
        self._writers |= {writer, upstream}
        await asyncio.gather(self._requests(reader, upstream), self._replies(upstream_reader, writer))
        self._writers -= {writer, upstream}

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(1 << 16):
                self.requests.append(chunk)
                if not self.drop_requests:
                    writer.write(chunk)
        writer.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await self._next(reader):
                if not self.drop_replies:
                    writer.write(chunk)
        writer.close()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        await self._flowing.wait()
        chunk = await reader.read(1 << 16)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return chunk


@asynccontextmanager
async def bad_line(socket: Path) -> AsyncIterator[BadLine]:
    """A proxy for the server behind `socket`, without faults at first."""
    line = BadLine(socket)
    await line.start()
    try:
        yield line
    finally:
        await line.stop()
