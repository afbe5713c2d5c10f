"""What was found after the drain, as values: audit rows, runs, what is left in Redis, open files.

Monotonic times are seconds as in the history; `Evidence.wall_offset_s` turns them into UNIX time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One audit row of a customer of the run; None and "" for what it does not hold. Times are UNIX milliseconds."""

    id: str
    trace: str
    customer: str
    tier: str
    status: str
    code: str
    created_ms: float
    ended_ms: float | None = None
    http_status: int | None = None
    attempts: int | None = None
    gateway_id: str = ""
    worker_id: str = ""
    mode: str = ""

    @property
    def final(self) -> bool:
        """Whether it has reached its end."""
        return self.status in ("completed", "failed")

    @property
    def completed(self) -> bool:
        """Whether it has an output."""
        return self.status == "completed"


@dataclass(frozen=True)
class Run:
    """A model began to run one input at `began`, which takes `takes_s`; `process` is the log that says so."""

    nonce: str
    began: float
    process: str = ""
    takes_s: float = 0.05


@dataclass(frozen=True)
class DeadLetter:
    """One row of `dead_letters`."""

    id: str
    code: str
    attempts: int


@dataclass(frozen=True)
class Leftovers:
    """What Redis still holds when nothing should be under way."""

    open_requests: tuple[str, ...] = ()  # Ids whose state is queued or processing.
    lengths: Mapping[str, int] = field(default_factory=dict)  # Of lists and sets that should be empty.
    leaked_keys: tuple[str, ...] = ()  # Without a TTL, and not among the permanent ones.

    @property
    def settled(self) -> bool:
        """Whether nothing is under way any more."""
        return not self.open_requests and not any(self.lengths.values())


@dataclass(frozen=True)
class FileCount:
    """Open files of a process that lived through the whole run."""

    process: str
    before: int
    after: int


@dataclass(frozen=True)
class Evidence:
    """Everything. `runs` is None where the backend writes none; `errors` are sentences: what could not be read."""

    rows: tuple[Row, ...] = ()
    runs: tuple[Run, ...] | None = None
    dead_letters: tuple[DeadLetter, ...] = ()
    leftovers: Leftovers = Leftovers()
    files: tuple[FileCount, ...] = ()
    wall_offset_s: float = 0.0
    waited_s: float = 0.0
    errors: tuple[str, ...] = ()
