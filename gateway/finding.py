"""One check of health: what was seen, how bad it is, and its form in the health+json draft."""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["healthy", "degraded", "down"]

LEVELS: tuple[Status, ...] = ("healthy", "degraded", "down")
_CHECK_STATUS: dict[Status, str] = {"healthy": "pass", "degraded": "warn", "down": "fail"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name in the health+json draft's form, how bad it is, what was seen, and why it is not healthy."""

    name: str
    kind: str
    level: Status
    value: object
    unit: str
    reason: str | None = None

    def check(self, time: str) -> dict[str, Any]:
        """The draft's object; `time` is now, RFC 3339."""
        check: dict[str, Any] = {
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
