"""Server-sent events, and timeouts of connections without a timer per connection.

The server's timeouts apply to streams too: a client that does not read is disconnected, and until then nothing more is
written to it (`full`). HTTP/1.0 has no chunks: there the end of the connection ends the stream, and a reset breaks it off.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from gateway.http.response import HttpResponse

if TYPE_CHECKING:
    from gateway.http.parsed_request import ParsedRequest

EVENTS = "text/event-stream"
PING = b": ping\n\n"
PING_EVERY_S = 1.75
"""A comment is sent to a stream after this time without events, at most twice as long: proxies close silent connections."""
BREAK_OFF_S = 0.5
"""From the error of a stream to the end of its connection: Node's `fetch` drops the events that its client has not read then."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the end of the connection is a reset, which HTTP/1.0 does not take for the end of a body."""

T = TypeVar("T", bound=Hashable)
Result = TypeVar("Result")


class ProgressTimers(Generic[T]):
    """Items that wait for one kind of progress, each for at most `timeout_s`. Times are monotonic seconds.

    All items have the same timeout, so a dict in insertion order is sorted by deadline.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadlines: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, item: T) -> bool:
        return item in self._deadlines

    def start(self, item: T, now: float) -> None:
        """Start the timeout; an item that already waits keeps its deadline."""
        if item not in self._deadlines:
            self._deadlines[item] = now + self.timeout_s

    def stop(self, item: T) -> None:
        """Stop the timeout of an item, if it waits."""
        self._deadlines.pop(item, None)

    def expired(self, now: float) -> list[T]:
        """Remove and return the items whose timeout expired."""
        due: list[T] = []
        for item, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.append(item)
        for item in due:
            del self._deadlines[item]
        return due


class EventStream(HttpResponse):
    """One stream. `play` writes it, starting with `start`, and is awaited exactly once.

    The headers are written with the first event or, if there is none yet, with the first ping: until then the response may
    still become an error with its own status. With `abort` the body ends incomplete, so that no client takes it for whole.
    """

    __slots__ = ("_chunked", "_play", "_quiet", "_request", "begun")

    def __init__(self, play: Callable[["EventStream"], Awaitable[None]]) -> None:
        super().__init__(200, b"", content_type=EVENTS)
        self._play = play
        self._request: ParsedRequest | None = None
        self._chunked = True
        self._quiet = True
        self.begun = False
        """Whether the headers were written."""

    async def write_to(self, request: "ParsedRequest") -> None:
        """Run `play`. Streams to HTTP/1.0 have no chunks and end with the connection.

        Raises ConnectionResetError if the client left.
        """
        self._request = request
        self._chunked = request.version >= (1, 1)
        self.keep_alive = request.keep_alive and not self.close and not self.abort and self._chunked
        pings = request.protocol.pings
        try:
            await self._play(self)
        finally:
            pings.stop(self)
        if self.abort:
            await asyncio.sleep(BREAK_OFF_S)
            if not self._chunked and request.transport is not None:
                request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.keep_alive = False
            request.protocol.close()
        else:
            await self.drain()

    async def drain(self) -> None:
        """Wait while the client reads slower than events are written. Raises ConnectionResetError if it left."""
        connection = self._of_request().protocol
        if connection.writing_paused:
            await connection.drain()

    async def outcome(self, future: "asyncio.Future[Result]") -> Result:
        """Wait for the result of the request, while events are sent."""
        return await future

    @property
    def full(self) -> bool:
        """Whether the client reads slower than events are written."""
        return self._of_request().protocol.writing_paused

    def start(self) -> None:
        """Start the stream. Raises ConnectionResetError if the client left."""
        transport = self._of_request().transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client left.")
        self._pings().start(self, asyncio.get_running_loop().time())

    def replace(self, response: HttpResponse) -> None:
        """Write this response instead of the stream, which has not begun."""
        response.keep_alive = self.keep_alive
        self.begun = True
        self._write(response.head(self.connection_option(self._of_request())) + response.body)

    def send(self, events: bytes) -> None:
        """Write complete events, possibly none. Does nothing if the client left."""
        if events:
            self._quiet = False
            self._write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def end(self) -> None:
        """Write the end of the stream that has begun."""
        if self._chunked:
            self._write(b"0\r\n\r\n")

    def ping(self, now: float) -> None:
        """Write a comment if nothing was written since the last call. `now` is the loop's clock."""
        if self._quiet and not self.full:
            self.send(PING)
        self._quiet = True
        self._pings().start(self, now)

    def length(self) -> str:
        """The headers of a body of unknown length. `X-Accel-Buffering` disables buffering in nginx."""
        chunked = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        return f"{chunked}Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"

    def _write(self, data: bytes) -> None:
        request = self._of_request()
        if not self.begun:
            self.begun, data = True, self.head(self.connection_option(request)) + data
        if request.transport is not None and not request.transport.is_closing():
            request.transport.write(data)

    def _of_request(self) -> "ParsedRequest":
        return cast("ParsedRequest", self._request)

    def _pings(self) -> "ProgressTimers[EventStream]":
        return self._of_request().protocol.pings
