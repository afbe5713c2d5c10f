"""TLS termination in front of the Redis of a chaos stack, which is built without TLS.

It runs in a separate process between proxies and server, and requires a client certificate of the run's authority.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from tierlane_tools.chaos.stack.certificates import Certificates, Pair, certificates

CHUNK_BYTES = 1 << 16
SERVER, CLIENT = ("server", "client")
MODULE = "tierlane_tools.chaos.stack.tls_front"


class TlsFront:
    """The socket and command of the process, and the URL for clients."""

    def __init__(self, directory: Path, server: Path) -> None:
        """Create certificates in `directory`; `server` is the socket of the server."""
        directory.mkdir(mode=0o700)
        self._certificates = certificates(directory)
        self._server = server
        self.socket = server.with_name("tls.sock")

    def command(self) -> list[str]:
        """The command line of the process; it has file names, but no secrets."""
        authority, own = self._certificates.authority.cert, self._certificates.server
        return [
            sys.executable,
            "-P",
            "-m",
            MODULE,
            *map(str, (self.socket, self._server, authority, own.cert, own.key)),
        ]

    def url(self, host: str, port: int) -> str:
        """The URL of Redis for a client at this address."""
        own = self._certificates.client
        return (
            f"rediss://{host}:{port}/0?ssl_ca_certs={self._certificates.authority.cert}"
            f"&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
        )

    async def ready(self) -> None:
        """Wait until it listens; the caller sets the deadline."""
        while not self.socket.exists():  # noqa: ASYNC110 - another process creates it within a second
            await asyncio.sleep(0.01)


async def serve(socket: Path, server: Path, made: Certificates) -> None:
    """Forward connections until cancelled."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(server)
        except OSError:
            writer.transport.abort()
            return
        # When one side ends, the other is reset at once, because a half-open connection would be another fault.
        ways = [asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (back, writer):
            end.transport.abort()

    socket.unlink(missing_ok=True)  # noqa: ASYNC240 - once, before the first connection
    async with await asyncio.start_unix_server(accepted, socket, ssl=made.demanding()) as front:
        await front.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(CHUNK_BYTES):
            writer.write(piece)
            await writer.drain()


def main(argv: Sequence[str]) -> None:
    """Run the process."""
    socket, server, authority, cert, key = map(Path, argv)
    own = Pair(cert, key)
    uvloop.run(serve(socket, server, Certificates(Pair(authority, authority), own, own)))


if __name__ == "__main__":
    main(sys.argv[1:])
