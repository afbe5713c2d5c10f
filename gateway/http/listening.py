"""The listening sockets of a gateway: accepting several connections at a time, and closing the port without a reset."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

ACCEPTS = 8  # Connections accepted per iteration of the event loop, see `listen`.

NewProtocol = Callable[[], asyncio.Protocol]
"""Creates the protocol of an accepted connection."""


class ListeningPort:
    """The listening sockets of a server; `number` was chosen by the kernel if it was 0."""

    def __init__(
        self,
        new_protocol: NewProtocol,
        sockets: Sequence[socket.socket],
        servers: Sequence[asyncio.AbstractServer] = (),
    ) -> None:
        self._new_protocol = new_protocol
        self._sockets = sockets
        self._servers = servers
        self.number = int(sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening.

        Connections that the kernel has completed are accepted first. It would reset them, and a load balancer that has sent a
        request on one must not send it again.
        """
        self._close_servers()
        accepted: list[socket.socket] = []
        for listening in self._sockets:  # Each accepts what waits, and is closed without a pause in between.
            listening.settimeout(0)
            with listening, contextlib.suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])
        loop = asyncio.get_running_loop()
        self._sockets = ()
        try:
            while accepted:
                connection = accepted.pop()
                try:
                    await loop.connect_accepted_socket(self._new_protocol, connection)
                except OSError:  # The client has left; the others must not be lost with it.
                    connection.close()
                except asyncio.CancelledError:
                    connection.close()
                    raise
        finally:  # Of a drain that is cancelled.
            for connection in accepted:
                connection.close()

    def abort(self) -> None:
        """Stop listening at once."""
        self._close_servers()
        for each in self._sockets:
            each.close()
        self._sockets = ()

    def _close_servers(self) -> None:
        for each in self._servers:
            each.close()
        self._servers = ()


async def listen(
    new_protocol: NewProtocol, host: str, port: int, backlog: int, *, reuse_port: bool = False
) -> ListeningPort:
    """Accept connections, several per iteration of the event loop. Raises OSError.

    libuv accepts one connection per iteration and listening descriptor. A busy loop has a few hundred iterations per
    second, so that clients opening connections quickly could keep others waiting until the backlog overflows. Each socket
    is therefore registered several times, with its own descriptors.
    """
    loop = asyncio.get_running_loop()
    bound = await loop.create_server(new_protocol, host, port, reuse_port=reuse_port or None, start_serving=False)
    try:
        kept = [socket.socket(fileno=os.dup(each.fileno())) for each in bound.sockets]
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in kept for _ in range(ACCEPTS)]
    finally:
        bound.close()
    servers: list[asyncio.AbstractServer] = []
    try:
        for each in kept:  # Accepted connections inherit it.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        servers += [await loop.create_server(new_protocol, sock=each, backlog=backlog) for each in sockets]
    except OSError:
        for server in servers:
            server.close()
        for each in (*sockets, *kept):
            each.close()
        raise
    return ListeningPort(new_protocol, kept, servers)
