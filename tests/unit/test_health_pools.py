"""Health of several pools: one document, which names the pool wherever it matters."""

from typing import Any

import pytest

from gateway.operations.health_collector import merge_pools
from gateway.operations.health_model import Health, Status, TierHealth
from ratelimit.capacity import CapacityEvidence


def tier(**changes: Any) -> TierHealth:
    row: Any = {
        "depth": 1,
        "oldest_ms": 10.0,
        "effective_limit_ratio": 1.0,
        "allocated_rps": 5.0,
        "shed_per_second": 0.5,
        "shadow_refusals_per_second": 0.0,
        "retry_amplification": 1.0,
        "p95_ms": 80.0,
    }
    return row | changes


def document(status: Status = "healthy", *reasons: str, **changes: Any) -> tuple[int, Health]:
    found: Any = {
        "status": status,
        "reasons": list(reasons),
        "gpu_utilization": 0.5,
        "padding_waste": 0.0,
        "queue_depth": 1,
        "requests_per_second": 10.0,
        "healthy_gpus": 2,
        "total_gpus": 2,
        "capacity_rps": 100.0,
        "capacity_evidence": CapacityEvidence.MEASURED,
        "capacity_confidence": 1.0,
        "tiers": {"free": tier()},
        "dlq": 0,
        "audit_lag_ms": 5,
        "checks": {"gpus:healthy": []},
    }
    return (503 if status == "down" else 200), found | changes


def test_one_pool_is_told_as_it_is() -> None:
    """Nothing is added for who has a single pool."""
    assert merge_pools({"default": document("degraded", "x")}) == document("degraded", "x")


@pytest.mark.parametrize(
    ("own", "other", "status", "http"),
    [
        ("healthy", "healthy", "healthy", 200),
        ("healthy", "degraded", "degraded", 200),
        ("healthy", "down", "degraded", 200),
        ("down", "healthy", "degraded", 200),
        ("down", "down", "down", 503),
    ],
)
def test_it_is_down_only_where_no_pool_serves(own: Status, other: Status, status: Status, http: int) -> None:
    """A load balancer that hears `down` takes the gateway away, from the pools that serve as well."""
    code, found = merge_pools({"default": document(own), "slow": document(other)})

    assert (code, found["status"]) == (http, status)


def test_amounts_are_added_up_and_the_worst_is_told() -> None:
    """GPUs, queues and rates add up; a percentile or a ratio does not. Utilisation and padding count by GPU."""
    other = document(
        gpu_utilization=0.9,
        padding_waste=0.4,
        healthy_gpus=6,
        total_gpus=7,
        audit_lag_ms=None,
        dlq=3,
        tiers={"free": tier(depth=4, oldest_ms=90.0, effective_limit_ratio=0.5, p95_ms=20.0)},
    )
    _, found = merge_pools({"default": document(), "slow": other})

    assert (found["healthy_gpus"], found["total_gpus"], found["queue_depth"], found["dlq"]) == (8, 9, 2, 3)
    assert (found["gpu_utilization"], found["capacity_rps"], found["audit_lag_ms"]) == (0.8, 200.0, None)
    assert found["padding_waste"] == 0.3
    assert found["pools"]["slow"]["padding_waste"] == 0.4
    assert found["tiers"]["free"] == tier(
        depth=5, oldest_ms=90.0, effective_limit_ratio=0.5, allocated_rps=10.0, shed_per_second=1.0
    )


def test_reasons_name_their_pool() -> None:
    """What all pools say is no pool's fault, and is said once."""
    first, second = document("degraded", "PostgreSQL is away."), document("down", "PostgreSQL is away.", "No GPU.")
    _, found = merge_pools({"default": first, "slow": second})

    assert found["reasons"] == ["PostgreSQL is away.", "Pool slow: No GPU."]
    assert sorted(found["checks"]) == ["gpus:healthy", "slow/gpus:healthy"]


def test_a_tier_that_came_in_between_is_told_of_those_that_have_it() -> None:
    """Each pool's document is made at a moment of its own."""
    before, after = document(tiers={"free": tier()}), document(tiers={"free": tier(), "new": tier(depth=7)})

    for found in ({"a": before, "b": after}, {"a": after, "b": before}):
        told = merge_pools(found)[1]["tiers"]
        assert {name: row["depth"] for name, row in told.items()} == {"free": 2, "new": 7}
