"""One health check (health+json draft), and the documents of `GET /internal/health` and of load balancers."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

from ratelimit.capacity import CapacityEvidence

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
class HealthFinding:
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


class TierHealth(TypedDict):
    """One tier over all gateways. Times in milliseconds, rates per second."""

    depth: int
    oldest_ms: float
    effective_limit_ratio: float
    allocated_rps: float
    shed_per_second: float
    shadow_refusals_per_second: float
    retry_amplification: float
    p95_ms: float


class HealthFigures(TypedDict):
    """What is counted. `gpu_utilization` and `padding_waste` are 0..1; `audit_lag_ms` is null where it cannot be read.

    `capacity_evidence` is what the capacity is derived from, `capacity_confidence` (0..1) how near to full the batches were
    that were measured.
    """

    gpu_utilization: float
    padding_waste: float
    queue_depth: int
    requests_per_second: float
    healthy_gpus: int
    total_gpus: int
    capacity_rps: float
    capacity_evidence: CapacityEvidence
    capacity_confidence: float
    tiers: dict[str, TierHealth]
    dlq: int
    audit_lag_ms: int | None


class PoolHealth(HealthFigures):
    """One pool of several."""

    status: Status


class Health(HealthFigures):
    """The judgement, why it is not better in sentences, the figures, and the checks of the health+json draft by name."""

    status: Status
    reasons: list[str]
    checks: dict[str, list[Check]]


class HealthNow(Health):
    """As it is answered; `age_s`: seconds since it was judged."""

    age_s: float


class HealthOfPools(Health):
    """With more than one pool the figures are of all together, and each pool's own stand in `pools`."""

    pools: dict[str, PoolHealth]


class Alive(TypedDict):
    """The event loop turns."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Whether traffic may come, and what is missing."""

    status: Literal["ready", "not ready"]
    waiting_for: NotRequired[str]
