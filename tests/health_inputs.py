"""Inputs of the health checks for a healthy gateway."""

from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from gateway.direct.mode import DirectView
from gateway.operations.health.checks import HealthInputs
from scheduler.protocol.pool_view import GatewayStats, GpuReading, Observation, TierDepth, TierStats, WorkerView


def health_inputs(**changes: Any) -> HealthInputs:
    """`changes`: the observation, and every input that differs from those of a healthy gateway."""
    fields: dict[str, Any] = {
        "look_age_s": 0.1,
        "redis_problem": None,
        "catalog_loaded": True,
        "catalog_fresh": True,
        "catalog_age_s": 0.5,
        "catalog_problem": None,
        "subscribed": True,
        "leaving": False,
        "capacity_rps": 160.0,
    }
    return HealthInputs(**fields | changes)


def worker(number: int, *, healthy: bool = True, status: str = "busy", age_ms: float = 100.0) -> WorkerView:
    return WorkerView(f"worker-{number}", status, 0.5, 1, 100.0, 50.0, "tiny", "v1", age_ms=age_ms, healthy=healthy)


def observation(*workers: WorkerView) -> Observation:
    free = TierStats(90.0, 1.5, 60.0, 1.0, 130.0, arrived_rps=90.0, retries_rps=20.0, shadowed_rps=3.0)
    other = TierStats(40.0, 0.5, 80.0, 1.0, 130.0, arrived_rps=40.0, retries_rps=6.0, shadowed_rps=0.25)
    paid = TierStats(10.0, 0.0, 20.0, 1.0, 10.0, arrived_rps=10.0)
    stats = [GatewayStats("g1", 100.0, {"free": free}), GatewayStats("g2", 50.0, {"free": other, "paid": paid})]
    tiers = {"free": TierDepth("free", 7, 12.34), "paid": TierDepth("paid", 2, 1.0)}
    return Observation(0, tiers, list(workers), stats, 0, 0, 3, 4)


def inputs(**changes: Any) -> HealthInputs:
    healthy: dict[str, Any] = {
        "observation": observation(worker(1), worker(2)),
        "factors": {"paid": 1.0, "free": 1.0},
        "audit_lag_ms": 20,
        "time": "now",
    }
    return health_inputs(**healthy | changes)


LOST = worker(2, healthy=False, age_ms=1400.0)
DOWN = changed(worker(4, healthy=False, status="down"), gpu=GpuReading(0.0, 0, 0, 0, 0, "Xid 95"))
PAUSING = changed(worker(5, healthy=False, status="paused"), pausing=True)
INACTIVE = DirectView(
    active=False,
    for_s=0.0,
    workers=0,
    serves=False,
    waiting=0,
    spool_bytes=0,
    spool_problem=None,
    bad_lines=0,
    breakers={"redis": "closed"},
)
SERVING = replace(
    INACTIVE, active=True, for_s=3.21, workers=4, serves=True, spool_bytes=900, breakers={"redis": "open"}
)
REDIS_DOWN = {"redis_problem": "timeout", "look_age_s": 3.4}
