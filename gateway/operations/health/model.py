"""One health check (health+json draft), and the documents of `GET /internal/health` and of load balancers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Literal, NotRequired, TypedDict

from gateway.operations.figures import First, Highest, Lowest, Total, Value, merged
from gateway.operations.merge_rules import WeightedMean, highest
from ratelimit.capacity import CapacityEvidence

Status = Literal["healthy", "degraded", "down"]

LEVELS: tuple[Status, ...] = ("healthy", "degraded", "down")
CheckStatus = Literal["pass", "warn", "fail"]
_CHECK_STATUS: dict[Status, CheckStatus] = {"healthy": "pass", "degraded": "warn", "down": "fail"}
TOP_CUSTOMERS = 5
PerGpu = Annotated[Value, WeightedMean("healthy_gpus")]

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


def _top_customers(several: Sequence[Sequence[TopCustomer]]) -> list[TopCustomer]:
    total: dict[str, float] = {}
    for each in chain.from_iterable(several):
        total[each["name"]] = total.get(each["name"], 0.0) + each["gpu_ms"]
    ordered = sorted(total.items(), key=lambda each: (-each[1], each[0]))
    return [{"name": name, "gpu_ms": round(gpu_ms, 1)} for name, gpu_ms in ordered[:TOP_CUSTOMERS]]


class TierHealth(TypedDict):
    """One tier over all gateways. Times in milliseconds, rates per second.

    `error_ratio_*`: the share (0..1) of ended requests that ended in an error of the service or in a timeout; rejections for
    lack of capacity do not count. `burn_rate_*`: how many times faster than `slo_success` allows requests fail, rejections
    for lack of capacity included; null without this objective. `fairness`: Jain's index (0..1) of GPU time per weight, of the
    customers that could have used more in the last minute. `background_depth`: queued jobs.
    """

    depth: Total[int]
    oldest_ms: Highest[float]
    effective_limit_ratio: Lowest[float]
    allocated_rps: Total[float]
    shed_per_second: Total[float]
    shadow_refusals_per_second: Total[float]
    retry_amplification: Highest[float]
    p95_ms: Highest[float]
    error_ratio_10s: Highest[float]
    error_ratio_60s: Highest[float]
    burn_rate_5m: Highest[float | None]
    burn_rate_1h: Highest[float | None]
    slo_ms: First[int | None]
    slo_success: First[float | None]
    fairness: Lowest[float]
    top_customers: Annotated[list[TopCustomer], _top_customers]
    background_depth: Total[int]


class MeasuredTier(TierHealth):
    """All figures of a tier: those of health, and those that only the dashboard shows, as in TierStats."""

    in_rps: Total[float]
    out_rps: Total[float]
    demand_rps: Total[float]
    failed_rps: Total[float]
    p50_ms: Highest[float]
    p99_ms: Highest[float]


def _tiers(several: Sequence[Mapping[str, MeasuredTier]]) -> dict[str, MeasuredTier]:
    # Pools were measured one after the other: a tier that was added or removed meanwhile is not in all.
    names = dict.fromkeys(chain.from_iterable(several))
    return {name: merged(MeasuredTier, [each[name] for each in several if name in each]) for name in names}


def _weakest_evidence(several: Sequence[CapacityEvidence]) -> CapacityEvidence:
    return max(several, key=list(CapacityEvidence).index)


def _joined(several: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(each for each in several if each))


def _highest_if_known(several: Sequence[int | None]) -> int | None:
    return None if None in several else highest(several)


class ServingFigures(TypedDict):
    """Figures of the workers and of the queues."""

    gpu_utilization: PerGpu[float]
    padding_waste: PerGpu[float]
    queue_depth: Total[int]
    requests_per_second: Total[float]
    healthy_gpus: Total[int]
    total_gpus: Total[int]
    capacity_rps: Total[float]
    capacity_evidence: Annotated[CapacityEvidence, _weakest_evidence]
    capacity_confidence: Lowest[float]
    slots: Total[int]
    running: Total[int]
    slots_source: Annotated[str, _joined]


class TiersOfHealth(TypedDict):
    """The tiers by name."""

    tiers: dict[str, TierHealth]


class StorageFigures(TypedDict):
    """Figures of what is stored."""

    dlq: Total[int]
    audit_lag_ms: Annotated[int | None, _highest_if_known]


class MeasuredPool(ServingFigures, StorageFigures):
    """The state of a pool, or of several, of which health, the dashboard and its history are views. Batches as in GatewayStats."""

    status: Status
    reasons: list[str]
    checks: dict[str, list[Check]]
    tiers: Annotated[dict[str, MeasuredTier], _tiers]
    batches_per_second: Total[float]
    filled_per_second: Total[float]


class HealthFigures(ServingFigures, TiersOfHealth, StorageFigures):
    """Figures. `gpu_utilization` and `padding_waste` are 0..1; `audit_lag_ms` is null if it cannot be read.

    `capacity_evidence`: the source of the capacity. `capacity_confidence` (0..1): how full the measured batches were, or which
    part of the slots is in use. `slots`: requests that run at a time in workers with slots, 0 without; `running`: those that
    run; `slots_source`: the evidence for the slots.
    """


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
