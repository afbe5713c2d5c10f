"""Evidence after the drain: audit rows, dead letters, what Redis still holds, the log of runs, open files.

Monotonic times are seconds as in the history; `Evidence.wall_offset_s` converts them to UNIX time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierlane_tools.chaos.checker.leftovers import Leftovers
from tierlane_tools.chaos.checker.open_files import FileCount


@dataclass(frozen=True)
class AuditRow:
    """One audit row of a customer of the run; None and "" for missing values. Times are UNIX milliseconds."""

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
    cost_ms: float = 0.0
    queue_ms: float | None = None

    @property
    def final(self) -> bool:
        """Whether the request has ended."""
        return self.status in ("completed", "failed")

    @property
    def completed(self) -> bool:
        """Whether the request has an output."""
        return self.status == "completed"


@dataclass(frozen=True)
class ModelRun:
    """The run of one input from `began` for `takes_s`; `process` is the name of its log."""

    nonce: str
    began: float
    process: str = ""
    takes_s: float = 0.05


@dataclass(frozen=True)
class Evidence:
    """All evidence. `runs` is None where the backend writes no log; `errors`: sentences on evidence that could not be read.

    `weights`: of customers by id, 1 where there is none.
    """

    rows: tuple[AuditRow, ...] = ()
    runs: tuple[ModelRun, ...] | None = None
    dead_letters: tuple[str, ...] = ()  # Request ids.
    leftovers: Leftovers = field(default_factory=Leftovers)
    files: tuple[FileCount, ...] = ()
    cells: int = 1
    wall_offset_s: float = 0.0
    errors: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
