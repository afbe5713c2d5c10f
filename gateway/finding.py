"""One check of health: what was seen, how bad it is, and its form in the health+json draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

Status = Literal["healthy", "degraded", "down"]

LEVELS: tuple[Status, ...] = ("healthy", "degraded", "down")
CheckStatus = Literal["pass", "warn", "fail"]
_CHECK_STATUS: dict[Status, CheckStatus] = {"healthy": "pass", "degraded": "warn", "down": "fail"}


class Check(TypedDict):
    """One check in the form of the health+json draft; `time` is RFC 3339."""

    componentType: str
    observedValue: str | float | None
    status: CheckStatus
    time: str
    observedUnit: NotRequired[str]
    output: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name in the health+json draft's form, how bad it is, what was seen, and why it is not healthy."""

    name: str
    kind: str
    level: Status
    value: str | float | None
    unit: str
    reason: str | None = None

    def check(self, time: str) -> Check:
        """The draft's object; `time` is now, RFC 3339."""
        check: Check = {
            "componentType": self.kind,
            "observedValue": self.value,
            "status": _CHECK_STATUS[self.level],
            "time": time,
        }
        if self.unit:
            check["observedUnit"] = self.unit
        if self.reason:
            check["output"] = self.reason
        return check


def first_of(names: Sequence[str], most: int) -> str:
    """Return the names for a sentence: the first `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def clock(at_ms: int) -> str:
    """Return a wall clock's milliseconds as its time of day, with the zone."""
    return f"{datetime.fromtimestamp(at_ms / 1000, tz=UTC):%H:%M:%S} UTC"
