"""The listening sockets of a gateway: accepting several connections at a time, and closing the port without a reset."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import cast

from aiohttp import web

ACCEPTS = 8  # Connections accepted per iteration of the event loop, see `listen`.


class ListeningPort:
    """The listening sockets of a server; `number` was chosen by the kernel if it was 0."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        self.number = int(sockets[0].getsockname()[1])

    async def close(self, runner: web.ServerRunner) -> None:
        """Stop listening.

        Connections that the kernel has completed are accepted first. It would reset them, and a load balancer that has sent a
        request on one must not send it again.
        """
        for site in runner.sites:
            await site.stop()
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
                    await loop.connect_accepted_socket(cast("web.Server", runner.server), connection)
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
        for each in self._sockets:
            each.close()
        self._sockets = ()


async def listen(
    runner: web.ServerRunner, host: str, port: int, backlog: int, *, reuse_port: bool = False
) -> ListeningPort:
    """Accept connections for `runner`, several per iteration of the event loop. Raises OSError.

    libuv accepts one connection per iteration and listening descriptor. A busy loop has a few hundred iterations per
    second, so that clients opening connections quickly could keep others waiting until the backlog overflows. Each socket
    is therefore registered several times, with its own descriptors.
    """
    loop = asyncio.get_running_loop()
    bound = await loop.create_server(
        cast("web.Server", runner.server),
        host,
        port,
        reuse_port=reuse_port or None,
        start_serving=False,
    )
    try:
        kept = [socket.socket(fileno=os.dup(each.fileno())) for each in bound.sockets]
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in kept for _ in range(ACCEPTS)]
    finally:
        bound.close()
    try:
        for each in sockets:
            await web.SockSite(runner, each, backlog=backlog).start()
    except OSError:
        for each in (*sockets, *kept):
            each.close()
        raise
    return ListeningPort(kept)
