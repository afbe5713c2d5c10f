"""Who watches: pages that are sent one document a second each, the same bytes to all. Few, and none may hold up another."""

import asyncio
from contextlib import suppress

from gateway.http.sse import EventStream
from scheduler.errors import ErrorCode, RequestError

MAX_READERS = 32
RETRY = b"retry: 2000\n\n"
"""How long, in ms, a page waits before it comes again."""


def message(kind: str, data: bytes) -> bytes:
    """One event of a stream; `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Readers:
    """All open streams. `missed` counts documents that a reader was too slow for."""

    def __init__(self, most: int = MAX_READERS) -> None:
        self._most = most
        self._open: dict[EventStream, asyncio.Future[None]] = {}
        self.missed = 0

    def __len__(self) -> int:
        return len(self._open)

    def check_room(self) -> None:
        """Raises RequestError `no_capacity` where there are too many."""
        if len(self._open) >= self._most:
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many dashboards are open at this gateway.")

    async def play(self, stream: EventStream, opening: bytes, lasts_s: float) -> None:
        """Send `opening`, and then whatever is published, for so long. Raises ConnectionResetError for a client that is gone."""
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
        """Send to all that keep up. What a slow one misses is gone; the edge drops it when it does not read at all."""
        for stream in self._open:
            if stream.full:
                self.missed += 1
            else:
                stream.send(events)

    def end(self) -> None:
        """The gateway leaves: pages go to another one."""
        for ended in self._open.values():
            if not ended.done():
                ended.set_result(None)
