"""One health check (health+json draft), and the documents of load balancers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

Status = Literal["healthy", "degraded", "down"]

LEVELS: tuple[Status, ...] = ("healthy", "degraded", "down")
CheckStatus = Literal["pass", "warn", "fail"]
_CHECK_STATUS: dict[Status, CheckStatus] = {"healthy": "pass", "degraded": "warn", "down": "fail"}

_ID_SUFFIX = re.compile(r"-[0-9a-f]{32}$")


class Check(TypedDict):
    """One check in the form of the health+json draft; `time` is RFC 3339.

    If it is not healthy, `code` names the problem, `action` is what to do, and `runbook` the path of its runbook.
    """

    componentType: str
    observedValue: str | float | None
    status: CheckStatus
    time: str
    observedUnit: NotRequired[str]
    output: NotRequired[str]
    code: NotRequired[str]
    action: NotRequired[str]
    runbook: NotRequired[str]


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """The result of one check: its name in the form of the health+json draft, level, observed value, and reason.

    `code`, `action` and `runbook` as in Check; "" if it is healthy.
    """

    name: str
    kind: str
    level: Status
    value: str | float | None
    unit: str
    reason: str | None = None
    code: str = ""
    action: str = ""
    runbook: str = ""

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
        if self.level != "healthy":
            check |= {"code": self.code, "action": self.action, "runbook": self.runbook}
        return check


def shortened(names: Sequence[str], most: int) -> str:
    """The first `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def process_name(process_id: str) -> str:
    """The name of a process, which its id contains: `gateway-1-<UUID in hex>` is `gateway-1`."""
    return _ID_SUFFIX.sub("", process_id)


def time_of_day(at_ms: int) -> str:
    """The time of day with its zone. `at_ms`: milliseconds since the epoch."""
    return f"{datetime.fromtimestamp(at_ms / 1000, tz=UTC):%H:%M:%S} UTC"


class Liveness(TypedDict):
    """The event loop is running."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Whether the gateway accepts traffic, and what it is waiting for."""

    status: Literal["ready", "not ready"]
    waiting_for: NotRequired[str]
