"""The asyncio end of the socket between a worker and its model process, as a protocol without tasks or streams."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from gpu_pool.model_process.messages import HEADER, FrameError, body_length

Message = TypeVar("Message")


class FrameConnection(asyncio.Protocol, Generic[Message]):
    """Calls `take` for each message, and `ended` once, at the end of the connection or after a malformed frame.

    `read` decodes a message, and raises FrameError.
    """

    def __init__(
        self, take: Callable[[Message], None], ended: Callable[[], None], read: Callable[[bytes], Message]
    ) -> None:
        self._take = take
        self._ended = ended
        self._read = read
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Frames can be sent from now on."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Process complete frames; the rest waits."""
        self._buffer += data
        try:
            while len(self._buffer) >= HEADER.size and not self.over.is_set():
                size = HEADER.size + body_length(self._buffer[: HEADER.size])
                if len(self._buffer) < size:
                    return
                message = self._read(bytes(self._buffer[HEADER.size : size]))
                del self._buffer[:size]
                self._take(message)
        except FrameError:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The peer closed the connection, or `close` was called."""
        self._end()

    def send(self, frame: bytes) -> bool:
        """Whether the frame could be sent; if not, `ended` was called or is about to be."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(frame)
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self._ended()
