"""The results of the checker: violations, findings, and the lines of the table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Violation:
    """One violation of an invariant in one sentence, with the nonce of the request and the id of the audit row."""

    says: str
    nonce: str = ""
    row: str = ""


@dataclass(frozen=True)
class InvariantFinding:
    """The finding of one invariant. `explained`: excused cases by excuse.

    `measured` is false without evidence; `shown` is an informational text.
    """

    violations: Sequence[Violation] = ()
    explained: Mapping[str, int] = field(default_factory=dict)
    measured: bool = True
    shown: str = ""


@dataclass(frozen=True)
class Example:
    """One violation with the timeline of its request."""

    says: str
    request: str
    row: str
    timeline: tuple[str, ...] = ()


@dataclass(frozen=True)
class InvariantResult:
    """One line of the table. `limit` is None where the line is informational."""

    name: str
    says: str
    count: int
    limit: int | None
    holds: bool
    measured: bool = True
    explained: Mapping[str, int] = field(default_factory=dict)
    shown: str = ""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class InvariantResults:
    """The lines of the table in order."""

    all: tuple[InvariantResult, ...]

    @property
    def hold(self) -> bool:
        """Whether every invariant holds."""
        return all(verdict.holds for verdict in self.all)
