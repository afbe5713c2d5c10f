"""The history of a run, one JSON line for each event, and the values that the parts of a run exchange.

An event is written when it happens, so a run that is cut short can still be judged from its file. All times are seconds
of CLOCK_MONOTONIC on this machine (`time.monotonic`), which its processes share. Nonces are secrets of single requests
and worth nothing afterwards; API keys are never written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Self

import msgspec


@dataclass(frozen=True)
class LoadCustomer:
    """One customer of the load. `id` is the UUID in `customers.id`, as text."""

    tier: str
    id: str
    name: str
    key: str


@dataclass(frozen=True)
class Target:
    """Where the load goes: `http_urls`, one per gateway, and all customers; each request draws one of either."""

    http_urls: tuple[str, ...]
    customers: tuple[LoadCustomer, ...]


class What(StrEnum):
    """What a fault event tells."""

    START = "start"
    HEAL = "heal"


@dataclass(frozen=True)
class FaultEvent:
    """A fault began or was healed at `at`; `error` says why it could not be (it is then no fault)."""

    at: float
    name: str
    target: str
    what: What
    details: str = ""
    error: str = ""


@dataclass(frozen=True)
class Sources:
    """Where evidence is read after the drain, past all proxies.

    `database_url` and `redis_url` as in the settings (asyncpg driver). `runs` is the directory into which the backend
    `tierlane.chaos.echo` writes one JSON line for each item when it begins to run it, {"nonce", "sent", "began",
    "takes"} (`sent` is the client's time out of the input, null where there is none; `takes` in seconds), in a file
    `*.jsonl` for each process, whose last line may be cut; None where the stack's backend writes none, and late execution cannot be measured. `started_at` is wall-clock seconds (UNIX time)
    before the first request. `gateway_urls` and `service_token` are for `/internal/*`.
    """

    database_url: str
    redis_url: str
    runs: Path | None
    started_at: float
    gateway_urls: tuple[str, ...] = ()
    service_token: str = ""


@dataclass(frozen=True)
class Recovery:
    """How long after its heal the load was whole again; None: not until the load ended."""

    event: FaultEvent
    seconds: float | None


@dataclass(frozen=True)
class RunInfo:
    """What the report says of the run itself. `schedule` is in plain text, one line for each planned fault.

    `took_s`: seconds of each part of the run, by name.
    """

    seed: int
    duration_s: float
    rate: float
    versions: dict[str, str]
    shape: str
    schedule: Sequence[str] = ()
    events: Sequence[FaultEvent] = ()
    recoveries: Sequence[Recovery] = ()
    drained_s: float | None = None
    interrupted: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    took_s: Mapping[str, float] = field(default_factory=dict)


# The contract of an input: "<nonce>:<time.monotonic() at sending, 6 decimals>:<padding>". The nonce is a secret of the
# request, so the reversed output ends with it reversed; the time tells the backend's log how late a run began.
def request_input(nonce: str, sent: float, padding: str) -> str:
    """The input of one request."""
    return f"{nonce}:{sent:.6f}:{padding}"


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


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="fault"):
    """A fault began ("start") or was healed ("heal"); with an `error` it could not be done and is none."""

    at: float
    name: str
    target: str
    what: str
    details: str = ""
    error: str = ""


Event = Invoked | Answered | Unanswered | Stray | Stalled | FaultRecord

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
            FaultRecord(
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
