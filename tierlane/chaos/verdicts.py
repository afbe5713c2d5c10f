"""What a law found, and what that means: the rows of the invariants table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Offence:
    """One breach of a law: by which request (its nonce), by which audit row (its id), and how, in one sentence."""

    says: str
    nonce: str = ""
    row: str = ""


@dataclass(frozen=True)
class Finding:
    """What one law found. `explained`: what it would have counted, had no fault excused it, by excuse.

    `measured` is false where the evidence for it does not exist; `shown` says in words what there is to say.
    """

    offences: Sequence[Offence] = ()
    explained: Mapping[str, int] = field(default_factory=dict)
    measured: bool = True
    shown: str = ""


@dataclass(frozen=True)
class Example:
    """One offence with what is known of its request, in order of time."""

    says: str
    request: str
    row: str
    timeline: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One line of the table. `limit` is None where nothing is asked of the figure: it only informs."""

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
class Verdicts:
    """The whole table, in the order in which it is shown."""

    all: tuple[Verdict, ...]

    @property
    def hold(self) -> bool:
        """Whether every law holds."""
        return all(verdict.holds for verdict in self.all)
