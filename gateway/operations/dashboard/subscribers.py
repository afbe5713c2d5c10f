"""The browsers that subscribe to the dashboard's events.

Subscribers get one document per second, the same bytes for all. Their number is limited, and a slow one does not delay
the others.
"""

import asyncio
from contextlib import suppress

from gateway.http.sse import EventStream
from scheduler.errors import ErrorCode, RequestError

MAX_SUBSCRIBERS = 32
RETRY = b"retry: 2000\n\n"
"""Milliseconds until a browser reconnects."""


def server_event(kind: str, data: bytes) -> bytes:
    """One server-sent event; `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Subscribers:
    """All open streams. `missed`: documents that were not sent because a client was too slow."""

    def __init__(self) -> None:
        self._open: dict[EventStream, asyncio.Future[None]] = {}
        self.missed = 0

    def __len__(self) -> int:
        return len(self._open)

    def check_limit(self) -> None:
        """Raises RequestError `no_capacity` if too many streams are open."""
        if len(self._open) >= MAX_SUBSCRIBERS:
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many dashboards are open at this gateway.")

    async def serve(self, stream: EventStream, opening: bytes, lasts_s: float) -> None:
        """Send `opening`, then all published events for `lasts_s`. Raises ConnectionResetError if the client left."""
        stream.start()
        stream.send(RETRY + opening)
        ended = self._open[stream] = asyncio.get_running_loop().create_future()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(lasts_s):
                    await ended
        finally:
            del self._open[stream]
        stream.end()

    def publish(self, events: bytes) -> None:
        """Send to all streams but those with a full buffer. The server closes a connection whose client stops reading."""
        for stream in self._open:
            if stream.full:
                self.missed += 1
            else:
                stream.send(events)

    def end(self) -> None:
        """End all streams, because the gateway shuts down: browsers reconnect to another gateway."""
        for ended in self._open.values():
            if not ended.done():
                ended.set_result(None)
