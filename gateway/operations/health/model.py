"""One health check (health+json draft), and the documents of `GET /internal/health` and of load balancers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

from ratelimit.capacity import CapacityEvidence

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


class TopCustomer(TypedDict):
    """GPU time of a customer in the last minute."""

    name: str
    gpu_ms: float


class TierHealth(TypedDict):
    """One tier over all gateways. Times in milliseconds, rates per second.

    `error_ratio_*`: the share (0..1) of ended requests that ended in an error of the service or in a timeout; rejections for
    lack of capacity do not count. `burn_rate_*`: how many times faster than `slo_success` allows requests fail, rejections
    for lack of capacity included; null without this objective. `fairness`: Jain's index (0..1) of GPU time per weight, of the
    customers that could have used more in the last minute. `background_depth`: queued jobs.
    """

    depth: int
    oldest_ms: float
    effective_limit_ratio: float
    allocated_rps: float
    shed_per_second: float
    shadow_refusals_per_second: float
    retry_amplification: float
    p95_ms: float
    error_ratio_10s: float
    error_ratio_60s: float
    burn_rate_5m: float | None
    burn_rate_1h: float | None
    slo_ms: int | None
    slo_success: float | None
    fairness: float
    top_customers: list[TopCustomer]
    background_depth: int


class HealthFigures(TypedDict):
    """Figures. `gpu_utilization` and `padding_waste` are 0..1; `audit_lag_ms` is null if it cannot be read.

    `capacity_evidence`: the source of the capacity. `capacity_confidence` (0..1): how full the measured batches were, or which
    part of the slots is in use. `slots`: requests that run at a time in workers with slots, 0 without; `running`: those that
    run; `slots_source`: the evidence for the slots.
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
    slots: int
    running: int
    slots_source: str
    tiers: dict[str, TierHealth]
    dlq: int
    audit_lag_ms: int | None


class PoolHealth(HealthFigures):
    """One pool of several."""

    status: Status


class Health(HealthFigures):
    """Status, one sentence for each problem, figures, and the checks of the health+json draft by name."""

    status: Status
    reasons: list[str]
    checks: dict[str, list[Check]]


class HealthNow(Health):
    """The response of `GET /internal/health`. `age_s`: seconds since the checks ran."""

    age_s: float


class CellHealth(TypedDict):
    """One cell, over all pools. `state`: open, or draining."""

    status: Status
    state: str
    healthy_gpus: int
    queue_depth: int
    requests_per_second: float
    capacity_rps: float
    audit_lag_ms: int | None


class HealthOfPools(Health):
    """With several pools or cells, the figures are those of all together; `pools` has those of each, by `<pool>@<cell>` in cells
    other than the default one. `cells` is empty if there is one.
    """

    pools: dict[str, PoolHealth]
    cells: dict[str, CellHealth]


class Liveness(TypedDict):
    """The event loop is running."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Whether the gateway accepts traffic, and what it is waiting for."""

    status: Literal["ready", "not ready"]
    waiting_for: NotRequired[str]
