"""TLS in front of a server that was built without it: clients with a certificate are forwarded to its Unix socket.

The handshake is Redis's, from the first byte on, or PostgreSQL's, after a request in plain text.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

SSL_REQUEST = bytes.fromhex("0000000804d2162f")


@asynccontextmanager
async def tls_before_redis(socket: Path, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Serve; yield the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _forward(socket, reader, writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def tls_before_postgres(
    socket: Path, context: ssl.SSLContext, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[int]:
    """Serve; yield the port. A client that does not request TLS is disconnected."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(len(SSL_REQUEST)) != SSL_REQUEST:
            writer.close()
            return
        writer.write(b"S")
        try:
            await writer.start_tls(context)
        except (ssl.SSLError, OSError):
            writer.close()
            return
        await _forward(socket, reader, writer)

    async with await asyncio.start_server(serve, host, port) as server:
        yield server.sockets[0].getsockname()[1]


async def _forward(socket: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there, back = await asyncio.open_unix_connection(socket)
    await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        writer.close()
