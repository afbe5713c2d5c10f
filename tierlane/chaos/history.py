"""What happened, in order: one JSON line for each event in a file that only grows, and the same in memory.

An event is written when it happens, so a run that is cut short can still be judged from its file. Times are seconds of
CLOCK_MONOTONIC. Nonces are secrets of single requests and worth nothing afterwards; API keys are never written.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from tierlane.chaos.plan import FaultEvent

FLUSH_EVERY = 64  # Events: what a crash of this tool may cost.


class HistoryError(Exception):
    """The file is not a history; the message is one sentence that names the line."""


class Invoked(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="invoke"):
    """A try of a request was written to a connection. `turn` counts the tries of one `nonce` from 0.

    `trace` is the trace id that this try alone sent, by which its audit row is known even where it got no answer.
    `key` is its Idempotency-Key, "" without one. `gateway` is the name of the gateway that it was sent to.
    """

    at: float
    nonce: str
    turn: int
    trace: str
    gateway: str
    tier: str
    customer: str
    key: str = ""


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="response"):
    """An answer came. `owner` is the nonce that its output carries: "" without output, "?" where it carries none."""

    at: float
    nonce: str
    turn: int
    seconds: float
    status: int
    code: str
    id: str
    owner: str = ""
    replayed: bool = False


class Unanswered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="client_error"):
    """No answer came, and what became of the request is not known. `kind`: reset, timeout, refused or stopped.

    "refused": no connection could be had, so the request was never sent. "stopped": the run was interrupted.
    """

    at: float
    nonce: str
    turn: int
    kind: str
    gateway: str = ""
    detail: str = ""


class Stray(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stray"):
    """Something came that nobody had asked for, or that is not an answer at all."""

    at: float
    gateway: str
    nonce: str = ""
    detail: str = ""


class Stalled(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stall"):
    """The tool itself did nothing from `since` to `at`: what it saw then may have come earlier."""

    at: float
    since: float


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="fault"):
    """A fault began ("start") or was healed ("heal"); with an `error` it could not be done and is none."""

    at: float
    name: str
    target: str
    what: str
    details: str = ""
    error: str = ""


Event = Invoked | Answered | Unanswered | Stray | Stalled | Fault

_encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class History:
    """The events of one run. With a path, each is also written there; `close` it, or use it as a context manager."""

    def __init__(self, path: Path | None = None) -> None:
        """Begin a new file at `path`. Raises OSError, also where the file is there already."""
        self.events: list[Event] = []
        self._file: BinaryIO | None = path.open("xb") if path else None
        self._unflushed = 0

    def add(self, event: Event) -> None:
        """Note one event."""
        self.events.append(event)
        if self._file is None:
            return
        self._file.write(_encode(event) + b"\n")
        self._unflushed += 1
        if self._unflushed >= FLUSH_EVERY:
            self._file.flush()
            self._unflushed = 0

    def fault(self, event: FaultEvent) -> None:
        """Note what was done to the stack."""
        self.add(
            Fault(
                at=event.at,
                name=event.name,
                target=event.target,
                what=event.what.value,
                details=event.details,
                error=event.error,
            )
        )

    def close(self) -> None:
        """Write what is left. Nothing may be added afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_history(path: Path) -> list[Event]:
    """The events of a file; a last line that was cut is left out. Raises HistoryError for any other bad line, OSError."""
    lines = path.read_bytes().split(b"\n")
    # Whatever follows the last newline was cut while it was written.
    return list(_decoded(lines[:-1]))


def _decoded(lines: Iterable[bytes]) -> Iterable[Event]:
    for number, line in enumerate(lines, 1):
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HistoryError(f"Line {number} is not an event of a history: {error}.") from None
