"""Server-sent events over a connection, and idle deadlines without a timer for each connection.

The deadlines of the server hold for streams as well: a client that does not read is dropped in time, and until then
what it does not read is not written (`full`). HTTP/1.0 has no chunks: there the end of the connection ends the stream.

All entries of one watch have the same timeout, so a dict in insertion order is sorted by deadline, and one sweep checks
only what is due.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar, cast

from aiohttp import web

from gateway.http.response import HttpResponse

T = TypeVar("T", bound=Hashable)


class ProgressTimers(Generic[T]):
    """What waits for one kind of progress, each for at most `timeout_s`. Times are monotonic seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadlines: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, item: T) -> bool:
        return item in self._deadlines

    def start(self, item: T, now: float) -> None:
        """Begin to wait; an item that is waiting already keeps its deadline."""
        if item not in self._deadlines:
            self._deadlines[item] = now + self.timeout_s

    def stop(self, item: T) -> None:
        """The progress came, or the item is gone."""
        self._deadlines.pop(item, None)

    def expired(self, now: float) -> list[T]:
        """Take out and return what is due."""
        due: list[T] = []
        for item, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.append(item)
        for item in due:
            del self._deadlines[item]
        return due


EVENTS = "text/event-stream"
PING = b": ping\n\n"
PING_EVERY_S = 2.0
"""A comment for whoever hears nothing for so long, and at most twice as long: proxies and clients hang up on silence."""


class EventStreamConnection(Protocol):
    """What it needs of its connection."""

    @property
    def pings(self) -> "ProgressTimers[EventStream]": ...


class EventStream(HttpResponse):
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

    def _pings(self) -> "ProgressTimers[EventStream]":
        return cast("EventStreamConnection", self._of_request().protocol).pings
