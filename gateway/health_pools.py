"""Health of several pools as one document: the figures of all together, and each pool's own beside them. Pure.

A single pool's document stays as it is.
"""

from collections.abc import Mapping, Sequence

from gateway.finding import LEVELS, Check, Status
from gateway.operations.health_model import Health, HealthFigures, HealthOfPools, PoolHealth, TierHealth
from ratelimit.capacity import Evidence


def together(found: Mapping[str, tuple[int, Health]]) -> tuple[int, Health]:
    """The HTTP status and the document; the gateway's own pool comes first.

    It is `down` only where no pool can serve: with one that can, taking this gateway away would help nobody.
    """
    documents = list(found.values())
    if len(documents) == 1:
        return documents[0]
    statuses = [document["status"] for _, document in documents]
    status: Status = max(statuses, key=LEVELS.index)
    if status == "down" and set(statuses) != {"down"}:
        status = "degraded"
    document: HealthOfPools = {
        "status": status,
        "reasons": _reasons(found),
        **_figures([document for _, document in documents]),
        "checks": _checks(found),
        "pools": {pool: _pool(document) for pool, (_, document) in found.items()},
    }
    return (503 if status == "down" else 200), document


def _reasons(found: Mapping[str, tuple[int, Health]]) -> list[str]:
    """What several pools say alike is said once, for it is no pool's; else the pool is named."""
    said = [reason for _, document in found.values() for reason in document["reasons"]]
    common = list(dict.fromkeys(reason for reason in said if said.count(reason) == len(found)))
    return common + [
        f"Pool {pool}: {reason}"
        for pool, (_, document) in found.items()
        for reason in document["reasons"]
        if reason not in common
    ]


def _checks(found: Mapping[str, tuple[int, Health]]) -> dict[str, list[Check]]:
    """The own pool's by their names, those of the others with the pool's before it."""
    own, *others = found
    checks = dict(found[own][1]["checks"])
    for pool in others:
        checks |= {f"{pool}/{name}": check for name, check in found[pool][1]["checks"].items()}
    return checks


def _figures(documents: Sequence[Health]) -> HealthFigures:
    names = dict.fromkeys(name for each in documents for name in each["tiers"])
    gpus = sum(each["healthy_gpus"] for each in documents)
    busy = sum(each["gpu_utilization"] * each["healthy_gpus"] for each in documents)
    padded = sum(each["padding_waste"] * each["healthy_gpus"] for each in documents)
    lags = [each["audit_lag_ms"] for each in documents]
    known = [lag for lag in lags if lag is not None]
    return {
        "gpu_utilization": round(busy / gpus, 4) if gpus else 0.0,
        "padding_waste": round(padded / gpus, 4) if gpus else 0.0,
        "queue_depth": sum(each["queue_depth"] for each in documents),
        "requests_per_second": round(sum(each["requests_per_second"] for each in documents), 3),
        "healthy_gpus": gpus,
        "total_gpus": sum(each["total_gpus"] for each in documents),
        "capacity_rps": round(sum(each["capacity_rps"] for each in documents), 3),
        "capacity_evidence": max((each["capacity_evidence"] for each in documents), key=list(Evidence).index),
        "capacity_confidence": min(each["capacity_confidence"] for each in documents),
        # Each was made at a moment of its own: a tier that came or went in between is not in all.
        "tiers": {name: _tier([each["tiers"][name] for each in documents if name in each["tiers"]]) for name in names},
        "dlq": sum(each["dlq"] for each in documents),
        "audit_lag_ms": max(known) if len(known) == len(lags) else None,
    }


def _tier(rows: Sequence[TierHealth]) -> TierHealth:
    """Amounts are added up; of what cannot be, the worst pool's is told."""
    return {
        "depth": sum(row["depth"] for row in rows),
        "oldest_ms": max(row["oldest_ms"] for row in rows),
        "effective_limit_ratio": min(row["effective_limit_ratio"] for row in rows),
        "allocated_rps": round(sum(row["allocated_rps"] for row in rows), 3),
        "shed_per_second": round(sum(row["shed_per_second"] for row in rows), 3),
        "shadow_refusals_per_second": round(sum(row["shadow_refusals_per_second"] for row in rows), 3),
        "retry_amplification": max(row["retry_amplification"] for row in rows),
        "p95_ms": max(row["p95_ms"] for row in rows),
    }


def _pool(document: Health) -> PoolHealth:
    return {
        "status": document["status"],
        "gpu_utilization": document["gpu_utilization"],
        "padding_waste": document["padding_waste"],
        "queue_depth": document["queue_depth"],
        "requests_per_second": document["requests_per_second"],
        "healthy_gpus": document["healthy_gpus"],
        "total_gpus": document["total_gpus"],
        "capacity_rps": document["capacity_rps"],
        "capacity_evidence": document["capacity_evidence"],
        "capacity_confidence": document["capacity_confidence"],
        "tiers": document["tiers"],
        "dlq": document["dlq"],
        "audit_lag_ms": document["audit_lag_ms"],
    }
