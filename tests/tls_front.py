"""TLS before a real server that was built without it: whoever shows a certificate is passed on to the server's Unix socket.

As Redis does it, from the first byte on; or as PostgreSQL does it, after a request in the clear.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

SSL_REQUEST = bytes.fromhex("0000000804d2162f")


@asynccontextmanager
async def tls_before_redis(socket: Path, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _pass_on(socket, reader, writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def tls_before_postgres(
    socket: Path, context: ssl.SSLContext, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[int]:
    """The port. Whoever does not ask for TLS is hung up on."""

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
        await _pass_on(socket, reader, writer)

    async with await asyncio.start_server(serve, host, port) as server:
        yield server.sockets[0].getsockname()[1]


async def _pass_on(socket: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there, back = await asyncio.open_unix_connection(socket)
    await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        writer.close()
