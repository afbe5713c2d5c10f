"""The documents made from the figures of pools: health, the dashboard and its history, as they are in pool_documents.txt.

To change a document, change its declaration, run `REWRITE=1 pytest tests/unit/test_pool_documents.py`, and read the
difference as a client of that document would. `test_health_reasons.py` has the checks.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from msgspec.structs import replace as changed

from gateway.http.response import encode_json
from gateway.operations.dashboard.downsampling import downsampled
from gateway.operations.dashboard.history_points import history_point
from gateway.operations.dashboard.state import state
from gateway.operations.health.checks import HealthInputs, health
from gateway.operations.health.collector import CollectedHealth
from gateway.operations.health.outcomes import TierObjective
from gateway.operations.health.pool_state import health_document, merge_pools
from health_inputs import DOWN, LOST, REDIS_DOWN, inputs, worker
from integration.gateway_fixtures import tier
from ledger.batches import OpenBatches
from ledger.catalog.snapshot import WorkerCordon
from ratelimit.capacity import CapacityEvidence
from scheduler.protocol.history import KEEP_MS, STEP_MS
from scheduler.protocol.pool_view import (
    CustomerGpuTime,
    CustomerRate,
    GatewayStats,
    Observation,
    TierDepth,
    TierOutcomes,
    TierStats,
)

GOLDEN = Path(__file__).with_name("pool_documents.txt")
APART = {"checks", "problems"}
AT_MS = 1_800_000_000_000
ROWS = [
    tier("gold", 1, 0.5, slo_ms=800, slo_success=0.99),
    tier("free", 2, 0.1, shed_depth=50),
    tier("idle", 3, 0.0),
]
OBJECTIVES = {"gold": TierObjective(800, 0.99)}
SLOTS = changed(worker(3), slots=16, in_flight=5, slots_source="kv_cache", padding_waste=0.25, utilization=0.9)


def stats(gateway: str, scale: float, *tiers: str) -> GatewayStats:
    """The heartbeat of a gateway, of which every figure grows with `scale`."""
    rates = [
        round(scale * each, 3) for each in (10.125, 1.5, 80.2, 1.0, 7.333, 8.4, 11.2, 2.5, 0.75, 40.1, 120.7, 1.625)
    ]
    return GatewayStats(
        gateway,
        round(9.875 * scale, 3),
        {name: TierStats(*rates) for name in tiers},
        batches_per_second=4.0,
        filled_per_second=round(3.0 / scale, 3),
        busiest=[CustomerRate("acme", "free", 3.3 * scale), CustomerRate(f"of-{gateway}", "gold", scale)],
        outcomes={
            name: TierOutcomes(90, 10, 590, {"internal_error": 10}, (500, 3), (6000, 70), {"queue_full": 7})
            for name in tiers
        },
        gpu_ms={"free": 900.0 * scale, "gold": 120.5},
        gpu_times=[
            CustomerGpuTime("acme", "free", 1.0, 600.25 * scale, 2.0, 20),
            CustomerGpuTime("zeta", "free", 2.0, 300.75 * scale, 2.0, 20),
            CustomerGpuTime(f"of-{gateway}", "gold", 1.0, 120.5, 0.0, 0),
        ],
    )


def seen(*workers: Any, scale: float = 1.0, dlq: int = 0) -> Observation:
    """A pool with two gateways, the second of which has only one of the tiers."""
    return Observation(
        0,
        {"gold": TierDepth("gold", 3, 12.34 * scale), "free": TierDepth("free", round(40 * scale), 900.06)},
        list(workers),
        [stats("gateway-1", scale, "gold", "free"), stats("gateway-2", 2 * scale, "free")],
        0,
        0,
        5,
        dlq,
        background={"free": TierDepth("free.background", 6, 1.0)},
    )


def pool(observation: Observation | None, **changes: Any) -> HealthInputs:
    given = {"factors": {"gold": 1.0, "free": 0.66667, "idle": 1.0}, "objectives": OBJECTIVES}
    return inputs(observation=observation, **given | changes)


FULL = pool(seen(worker(1), worker(2)), capacity_rps=123.45678, capacity_confidence=0.87654, look_age_s=0.123)
PARTLY = pool(
    seen(worker(1), LOST, SLOTS, scale=0.7, dlq=2),
    factors={"gold": 0.9, "free": 0.25},
    capacity_evidence=CapacityEvidence.MEASURED,
    capacity_confidence=0.5,
    audit_lag_ms=12_000,
    held={"free": "degraded"},
    paused=["free"],
)
ALL_LOST = pool(seen(LOST, DOWN, scale=0.3), audit_lag_ms=None)
NOT_SEEN = pool(None, look_age_s=None, redis_problem="timeout")
STATES: dict[str, dict[str, HealthInputs]] = {
    "one pool": {"default": FULL},
    "one pool, down": {"default": NOT_SEEN},
    "two pools": {"default": FULL, "large": PARTLY},
    "two pools, one of which is down": {"default": ALL_LOST, "large": FULL},
    "two pools, all down": {"default": ALL_LOST, "large": pool(seen(worker(1), scale=0.1), **REDIS_DOWN)},
    "two cells": {
        "default": FULL,
        "large": NOT_SEEN,
        "default@west": PARTLY,
        "large@west": pool(seen(SLOTS, scale=1.9)),
    },
}
"""The inputs of each pool, by what happens."""


def members(name: str, document: Mapping[str, Any]) -> list[str]:
    return [f"{name}.{key} {encode_json(value).decode()}" for key, value in document.items() if key not in APART]


def block(title: str, given: Mapping[str, HealthInputs]) -> str:
    pools = {name: CollectedHealth(each, health(each)) for name, each in given.items()}
    states = {name: each.state for name, each in pools.items()}
    whole = merge_pools(states)
    document = health_document(whole, states, {"west"}, "prod-eu")
    rows = [row for row in ROWS if row.name in whole["tiers"]]
    batches = OpenBatches(2, 30)
    first = state(
        pools,
        whole,
        rows,
        at_ms=AT_MS,
        gateway="g1",
        installation="prod-eu",
        cordons={"worker-2": WorkerCordon("new fans", "alice")},
        batches=batches,
    )
    one = dict(list(pools.items())[:1])
    last = state(one, states[next(iter(one))], rows, at_ms=AT_MS + STEP_MS, gateway="g1")
    points = [history_point(each, []) for each in (first, last)]
    lines = [f"# {title}", *members("health", document), *members("state", asdict(first))]
    lines += [f"history {encode_json(each).decode()}" for each in points]
    lines += [f"older {encode_json(each).decode()}" for each in downsampled(points, AT_MS + KEEP_MS // 2)]
    return "\n".join(lines)


def test_documents_are_those_of_the_file() -> None:
    """Byte by byte: names, order, numbers."""
    page = "\n\n".join(block(title, given) for title, given in STATES.items()) + "\n"
    if os.environ.get("REWRITE"):
        GOLDEN.write_text(page, "utf-8")
    assert page == GOLDEN.read_text("utf-8")
