"""The form of `GET /internal/health` and of the two pages for load balancers: written so, and described so."""

from typing import Literal, NotRequired, TypedDict

from gateway.finding import Check, Status
from ratelimit.capacity import Evidence


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
    capacity_evidence: Evidence
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
