"""Parses an event stream from parts of any size, as the WHATWG's HTML standard defines it (section 9.2.6). No I/O.

The time and memory are linear in the size of the stream: a part is searched once, whatever the size of its event.
"""

from typing import NamedTuple

from gpu_pool.backends.backend import InvalidOutput

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
END = b"[DONE]"
"""The data after which OpenAI's format has nothing more; not JSON."""


class StreamEvent(NamedTuple):
    """One event. `name`: its `event` field, "" without one."""

    name: bytes
    data: bytes


class EventParser:
    """The events of one response. `most_bytes`: the limit for the data of one event."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._line: list[bytes] = []  # The parts of a line that has no end yet.
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0  # Of `_line` and `_data`.
        self._begun = self._ends_with_cr = False

    def feed(self, part: bytes) -> list[StreamEvent]:
        """The events that are complete now; one without data is none. Raises InvalidOutput for one that is too large."""
        usual = part.startswith(b"data: ") and part.endswith(b"\n\n") and part.find(b"\n") == len(part) - 2 > 6
        if usual and not (self._line or self._data or self._name) and b"\r" not in part:  # One event.
            self._begun, self._ends_with_cr = True, False
            return [StreamEvent(b"", part[6:-2])]
        events: list[StreamEvent] = []
        for line in self._lines(part):
            name, _, value = line.partition(b":")
            if name == b"data":
                value = value.removeprefix(b" ")
                self._data.append(value)
                self._size += len(value)
            elif name == b"event":
                self._name = value.removeprefix(b" ")
            elif not line:
                self._size -= sum(map(len, self._data))
                if data := b"\n".join(self._data):
                    events.append(StreamEvent(self._name, data))
                self._name, self._data = b"", []
            # Comments, which begin with a colon, and other fields are ignored.
        if self._size > self._most_bytes:
            raise InvalidOutput("The model's stream holds an event that is too large.")
        return events

    def _lines(self, part: bytes) -> list[bytes]:
        """The lines that are complete now, each ended by CR, LF or both."""
        if self._ends_with_cr and part:
            part, self._ends_with_cr = part.removeprefix(b"\n"), False
        if not part:
            return []
        ended = part.splitlines(keepends=True)
        rest = b"" if ended[-1].endswith((b"\n", b"\r")) else ended.pop()
        self._ends_with_cr = part.endswith(b"\r")
        if ended and self._line:
            self._size -= sum(map(len, self._line))
            ended[0] = b"".join((*self._line, ended[0]))
            self._line = []
        if rest:
            self._line.append(rest)
            self._size += len(rest)
        lines = [line.rstrip(b"\r\n") for line in ended]
        if lines and not self._begun:
            self._begun = True
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        return lines
