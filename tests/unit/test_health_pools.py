"""Health of a gateway that serves several pools: one document made of those of the pools."""

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.operations.health.model import Status
from gateway.operations.health.pool_state import MeasuredPool, MeasuredTier, health_document, merge_pools
from ratelimit.capacity import CapacityEvidence


def tier(**changes: Any) -> MeasuredTier:
    row: Any = {
        "depth": 1,
        "oldest_ms": 10.0,
        "effective_limit_ratio": 1.0,
        "allocated_rps": 5.0,
        "shed_per_second": 0.5,
        "shadow_refusals_per_second": 0.0,
        "retry_amplification": 1.0,
        "p95_ms": 80.0,
        "error_ratio_10s": 0.0,
        "error_ratio_60s": 0.0,
        "burn_rate_5m": None,
        "burn_rate_1h": None,
        "slo_ms": None,
        "slo_success": None,
        "fairness": 0.9,
        "top_customers": [{"name": "acme", "gpu_ms": 2.5}],
        "background_depth": 3,
        "errors_60s": {"queue_full": 2},
        "in_rps": 5.5,
        "out_rps": 5.0,
        "demand_rps": 5.5,
        "failed_rps": 0.5,
        "p50_ms": 40.0,
        "p99_ms": 90.0,
    }
    return row | changes


def document(status: Status = "healthy", *reasons: str, **changes: Any) -> MeasuredPool:
    fields: Any = {
        "status": status,
        "reasons": list(reasons),
        "gpu_utilization": 0.5,
        "padding_waste": 0.0,
        "queue_depth": 1,
        "requests_per_second": 10.0,
        "healthy_gpus": 2,
        "total_gpus": 2,
        "unhealthy_gpus": {},
        "capacity_rps": 100.0,
        "capacity_evidence": CapacityEvidence.MEASURED,
        "capacity_confidence": 1.0,
        "slots": 0,
        "running": 0,
        "slots_source": "",
        "tiers": {"free": tier()},
        "dlq": 0,
        "audit_lag_ms": 5,
        "checks": {"gpus:healthy": []},
        "batches_per_second": 4.0,
        "filled_per_second": 3.0,
    }
    return fields | changes


def whole_of(found: Mapping[str, MeasuredPool], *draining: str) -> Any:
    return health_document(merge_pools(found), found, draining)


def test_a_single_pool_keeps_its_document() -> None:
    """Nothing is added for a gateway with one pool."""
    assert merge_pools({"default": document("degraded", "x")}) == document("degraded", "x")
    assert not {"pools", "cells"} & whole_of({"default": document()}).keys()


@pytest.mark.parametrize(
    ("own", "other", "status"),
    [
        ("healthy", "healthy", "healthy"),
        ("healthy", "down", "degraded"),
        ("down", "healthy", "degraded"),
        ("down", "down", "down"),
    ],
)
def test_the_gateway_is_down_only_if_all_pools_are(own: Status, other: Status, status: Status) -> None:
    """A load balancer removes a gateway that is down from all of its pools."""
    assert merge_pools({"default": document(own), "slow": document(other)})["status"] == status


def test_figures_are_sums_or_the_worst_value() -> None:
    """GPUs, queues and rates are summed, shares are weighted by GPUs, percentiles and ratios are the worst of all pools."""
    other = document(
        gpu_utilization=0.9,
        padding_waste=0.4,
        healthy_gpus=6,
        total_gpus=7,
        unhealthy_gpus={"lost": 1, "timeout": 1},
        audit_lag_ms=None,
        dlq=3,
        tiers={"free": tier(depth=4, oldest_ms=90.0, effective_limit_ratio=0.5, p95_ms=20.0), "new": tier(depth=7)},
    )
    found = {"default": document(unhealthy_gpus={"timeout": 2}), "slow": other}
    merged = whole_of(found)

    assert (merged["healthy_gpus"], merged["total_gpus"], merged["queue_depth"], merged["dlq"]) == (8, 9, 2, 3)
    assert (merged["gpu_utilization"], merged["capacity_rps"], merged["audit_lag_ms"]) == (0.8, 200.0, None)
    assert merged["unhealthy_gpus"] == {"lost": 1, "timeout": 3}
    assert (merged["padding_waste"], merged["pools"]["slow"]["padding_waste"]) == (0.3, 0.4)
    assert merge_pools(found)["tiers"]["free"] == tier(
        depth=5,
        oldest_ms=90.0,
        effective_limit_ratio=0.5,
        allocated_rps=10.0,
        shed_per_second=1.0,
        top_customers=[{"name": "acme", "gpu_ms": 5.0}],
        background_depth=6,
        errors_60s={"queue_full": 4},
        in_rps=11.0,
        out_rps=10.0,
        demand_rps=11.0,
        failed_rps=1.0,
    )
    assert merged["tiers"]["new"]["depth"] == 7  # A tier that only one pool's document has yet.


def test_reasons_and_checks_name_their_pool() -> None:
    """A reason that all pools have is given once, without a pool."""
    first, second = document("degraded", "PostgreSQL is away."), document("down", "PostgreSQL is away.", "No GPU.")
    merged = merge_pools({"default": first, "slow": second})

    assert merged["reasons"] == ["PostgreSQL is away.", "Pool slow: No GPU."]
    third = merge_pools({"default": first, "slow": second, "slower": second})["reasons"]
    assert third == ["PostgreSQL is away.", "Pools slow, slower: No GPU."]
    assert sorted(merged["checks"]) == ["gpus:healthy", "slow/gpus:healthy"]


def test_cells_are_summed_over_their_pools() -> None:
    """A cell has the worst status of its pools. With one cell the part is empty."""
    found = {
        "default": document(),
        "large": document("degraded", "x", healthy_gpus=1),
        "default@west": document(healthy_gpus=5, queue_depth=4),
    }

    merged = whole_of(found, "west")

    cells = merged["cells"]
    assert {name: (cell["status"], cell["state"], cell["healthy_gpus"]) for name, cell in cells.items()} == {
        "default": ("degraded", "open", 3),
        "west": ("healthy", "draining", 5),
    }
    assert (cells["west"]["queue_depth"], merged["healthy_gpus"]) == (4, 8)
    assert whole_of({"default": document(), "large": document()})["cells"] == {}
