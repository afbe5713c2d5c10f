"""The history of a run, one JSON line for each event, and the values that the parts of a run exchange.

An event is written when it happens, so the file of an interrupted run is complete up to then. All times are seconds of
CLOCK_MONOTONIC (`time.monotonic`), which the processes of a machine share. Nonces are secrets of single requests; API keys
are never written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

FLUSH_EVERY = 64  # Events: the most that a crash of this tool loses.

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class LoadCustomer:
    """One customer of the load. `id` is the UUID in `customers.id`, as text.

    `part`: of all requests, in proportion to the parts of the others. `in_flight`: its requests in the saturating load.
    """

    tier: str
    id: str
    name: str
    key: str
    weight: float = 1.0
    part: float = 1.0
    in_flight: int = 0


@dataclass(frozen=True)
class Target:
    """The target of the load: `http_urls`, one per gateway, and all customers; each request uses one of either.

    `batch_customers` create batches for `model`. Their requests are no requests of the history.
    """

    http_urls: tuple[str, ...]
    customers: tuple[LoadCustomer, ...]
    batch_customers: tuple[LoadCustomer, ...] = ()
    model: str = ""
    is_engine: bool = False  # The load is of chats and texts for the engine.


class FaultPhase(StrEnum):
    """The phase of a fault that an event reports."""

    START = "start"
    HEAL = "heal"


@dataclass(frozen=True)
class Sources:
    """The sources of evidence after the drain, without proxies.

    `database_url` and `redis_url` as in the settings (asyncpg driver). `runs`: the directory in which the backend
    `tierlane_tools.chaos.echo` writes a JSON line {"nonce", "sent", "began", "takes"} at the start of each input, in a file
    `*.jsonl` for each process, whose last line may be incomplete; None for other backends, for which late execution is
    not measured. `started_at`: UNIX time before the first request.
    """

    database_url: str
    redis_url: str
    runs: Path | None
    started_at: float
    cell_urls: tuple[str, ...] = ()  # Of the cells other than the default one.
    engine_url: str = ""


class FaultEvent(msgspec.Struct, frozen=True, tag_field="event", tag="fault"):
    """A fault began or was healed at `at`; with an `error` it was not injected."""

    at: float
    name: str
    target: str
    what: FaultPhase
    details: str = ""
    error: str = ""


@dataclass(frozen=True)
class Recovery:
    """The seconds from a heal until all requests succeed; None: not before the load ended."""

    event: FaultEvent
    seconds: float | None


@dataclass
class RunInfo:
    """One run in the report. `schedule`: a line for each planned fault; `took_s`: seconds of each part of the run."""

    seed: int
    duration_s: float
    rate: float
    shape: str
    versions: dict[str, str] = field(default_factory=dict)
    schedule: Sequence[str] = ()
    events: list[FaultEvent] = field(default_factory=list)
    recoveries: Sequence[Recovery] = ()
    drained_s: float | None = None
    interrupted: bool = False
    notes: Sequence[str] = ()
    took_s: dict[str, float] = field(default_factory=dict)


# The format is "<nonce>:<time.monotonic() at sending, 6 decimals>:<padding>". The nonce is a secret of the request, which
# its output must have; the backend logs the time.
def request_input(nonce: str, sent: float, padding: str) -> str:
    """The input of one request."""
    return f"{nonce}:{sent:.6f}:{padding}"


class Invoked(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="invoke"):
    """A try of a request was sent. `turn` counts the tries of one `nonce` from 0.

    `trace`: the trace id of this try, which identifies its audit row also without a response. `key`: its Idempotency-Key
    or "". `gateway`: the name of the gateway.
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
    """A response arrived. `owner`: the nonce in its output, "" without an output, "?" without a nonce."""

    at: float
    nonce: str
    turn: int
    seconds: float
    status: int
    code: str
    id: str
    owner: str = ""
    replayed: bool = False
    begun: bool = False  # A stream that had begun ended with an error.


class Unanswered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="client_error"):
    """No response arrived, so the outcome is unknown. `kind`: reset, timeout, refused, left or stopped.

    "refused": no connection, so the request was not sent. "left": the client closed the connection. "stopped": the run was
    interrupted.
    """

    at: float
    nonce: str
    turn: int
    kind: str
    gateway: str = ""
    detail: str = ""


class Stray(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stray"):
    """Bytes without a request, or that are no HTTP response."""

    at: float
    gateway: str
    nonce: str = ""
    detail: str = ""


class Stalled(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stall"):
    """The event loop of this tool stalled from `since` to `at`, so responses may have arrived earlier."""

    at: float
    since: float


class BatchCreated(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="batch"):
    """A batch was created. `valid`, `invalid`: the `custom_id`s of its lines; the endpoint rejects invalid ones."""

    at: float
    batch: str
    customer: str
    valid: tuple[str, ...]
    invalid: tuple[str, ...]


class BatchLine(msgspec.Struct, frozen=True):
    """A line of an output or error file. `text`: the output, or the code of the error."""

    custom_id: str
    text: str


class BatchEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="batch_end"):
    """A batch has ended: its status, its `request_counts`, and all lines of its files."""

    at: float
    batch: str
    status: str
    total: int
    completed: int
    failed: int
    outputs: tuple[BatchLine, ...]
    errors: tuple[BatchLine, ...]


class BatchFault(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="batch_fault"):
    """A call of the batch API got a response that no fault explains, or none in time. `detail` is one sentence."""

    at: float
    detail: str


Event = Invoked | Answered | Unanswered | Stray | Stalled | FaultEvent | BatchCreated | BatchEnded | BatchFault


class History:
    """The events of one run. With a path, each is also written there; `close` it, or use it as a context manager."""

    def __init__(self, path: Path | None = None) -> None:
        """Create the file at `path`. Raises OSError, also where it exists."""
        self.events: list[Event] = []
        self._file: BinaryIO | None = path.open("xb") if path else None
        self._unflushed = 0

    def add(self, event: Event) -> None:
        """Add one event."""
        self.events.append(event)
        if self._file is None:
            return
        self._file.write(_encode(event) + b"\n")
        self._unflushed += 1
        if self._unflushed >= FLUSH_EVERY:
            self._file.flush()
            self._unflushed = 0

    def close(self) -> None:
        """Close the file. Nothing may be added afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
