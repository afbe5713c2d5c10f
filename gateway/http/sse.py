"""An answer that is written while it comes about: server-sent events over the connection of any other answer.

The deadlines of the edge hold for it as well: a client that does not read is dropped in time, and until then what it
does not read is not written either (`full`). HTTP/1.0 knows no chunks: there the end of the connection ends it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from aiohttp import web

from gateway.http.response import Answer
from gateway.watch import Watch

EVENTS = "text/event-stream"
PING = b": ping\n\n"
PING_EVERY_S = 2.0
"""A comment for whoever hears nothing for so long, and at most twice as long: proxies and clients hang up on silence."""


class Connection(Protocol):
    """What it needs of its connection."""

    @property
    def pings(self) -> "Watch[EventStream]": ...


class EventStream(Answer):
    """One stream. `play` writes it, from `start` on, and is awaited once, whatever comes."""

    __slots__ = ("_chunked", "_play", "_quiet")

    def __init__(self, play: Callable[["EventStream"], Awaitable[None]]) -> None:
        super().__init__(200, b"", content_type=EVENTS)
        self._play = play
        self._chunked = True
        self._quiet = True

    async def prepare(self, request: web.BaseRequest) -> None:
        """As of an answer."""
        await super().prepare(request)
        self._chunked = request.version >= (1, 1)
        self.keep_alive = self.keep_alive and self._chunked

    async def write_eof(self) -> None:
        """Play it to its end. Raises ConnectionResetError when the client is gone."""
        request, pings = self._of_request(), self._pings()
        try:
            await self._play(self)
        finally:
            pings.stop(self)
        if self.abort:
            request.protocol.force_close()
        elif request.protocol.writing_paused:
            await request.writer.drain()

    @property
    def full(self) -> bool:
        """The client reads slower than is written."""
        return bool(self._of_request().protocol.writing_paused)

    def start(self) -> None:
        """Write the head. Raises ConnectionResetError when the client is gone already."""
        request = self._of_request()
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client is gone.")
        transport.write(self.head(self._connection(request)))
        self._pings().start(self, asyncio.get_running_loop().time())

    def send(self, events: bytes) -> None:
        """Write whole events; b"" is none. To a client that is gone nothing is written."""
        if events:
            self._quiet = False
            self._write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def end(self) -> None:
        """Nothing follows."""
        if self._chunked:
            self._write(b"0\r\n\r\n")

    def ping(self, now: float) -> None:
        """Called from time to time: say something where nothing else was said since. `now` is the loop's clock."""
        if self._quiet and not self.full:
            self.send(PING)
        self._quiet = True
        self._pings().start(self, now)

    def length(self) -> str:
        """Not known. `X-Accel-Buffering` keeps nginx from collecting what comes."""
        chunked = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        return f"{chunked}Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"

    def _write(self, data: bytes) -> None:
        transport = self._of_request().transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def _of_request(self) -> web.BaseRequest:
        return cast("web.BaseRequest", self._request)

    def _pings(self) -> "Watch[EventStream]":
        return cast("Connection", self._of_request().protocol).pings
