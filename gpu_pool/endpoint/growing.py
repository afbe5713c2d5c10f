"""An answer that comes in pieces: server-sent events out of bytes, and the text out of events. Pure."""

from typing import Any

import msgspec

from gpu_pool.backends.backend import InvalidOutput, ItemResult
from gpu_pool.backends.openai_endpoint.messages import Message, Usage, counted, finish

MAX_EVENT_BYTES = 4 << 20
END = b"[DONE]"


class StreamFault(InvalidOutput):
    """The server told of an error in the middle of its answer."""


class Piece(msgspec.Struct, gc=False):
    """What is added to a text, or to a message."""

    text: str | None = None
    delta: Message | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event's data. The one with the tokens has no choices."""

    choices: list[Piece] = []
    usage: Usage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(Chunk)


class EventLines:
    """Data of events, as their bytes come in whatever parts. Comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole now. Raises InvalidOutput for one that does not end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise InvalidOutput("The model's stream holds an event without an end.")
        events = []
        for line in (each.removesuffix(b"\r") for each in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Growing:
    """The answer so far. `over`: the server has said that this is all."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reason: str | None = None
        self._usage: Usage | None = None
        self.length = 0
        """Characters so far."""
        self.ended = False
        """Nothing more will come, not even tokens."""

    @property
    def over(self) -> bool:
        return self.ended or self._reason is not None

    def add(self, data: bytes) -> str:
        """What the event adds, possibly nothing. Raises InvalidOutput for junk, StreamFault for the server's error."""
        if data == END:
            self.ended = True
            return ""
        chunk = _read(data)
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return ""
        piece = chunk.choices[0]
        self._reason = piece.finish_reason or self._reason
        text = (piece.delta.content if piece.delta is not None else piece.text) or ""
        self._texts.append(text)
        self.length += len(text)
        return text

    def result(self) -> ItemResult:
        """As far as it has come."""
        read, written = counted(self._usage)
        return ItemResult("".join(self._texts), read + written, "", written, finish(self._reason))


def _read(data: bytes) -> Chunk:
    try:
        chunk = _chunk.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidOutput("The model's stream cannot be read.") from None
    if chunk.error:
        raise StreamFault("The model failed in the middle of its answer.")
    return chunk
