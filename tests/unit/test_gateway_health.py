"""Health as a pure function: status, figures and the sentences for the person on call."""

from typing import Any

import msgspec
import pytest

from gateway.operations.health_checks import HealthInputs, health
from health_inputs import health_inputs
from scheduler.protocol.pool_view import GatewayStats, GpuReading, Observation, TierDepth, TierStats, WorkerView


def worker(number: int, *, healthy: bool = True, status: str = "busy", age_ms: float = 100.0) -> WorkerView:
    return WorkerView(f"worker-{number}", status, 0.5, 1, age_ms, healthy, 100.0, 50.0, "tiny", "v1")


def looking(*workers: WorkerView) -> Observation:
    stats = [
        GatewayStats(
            "g1",
            100.0,
            {"free": TierStats(90.0, 1.5, 60.0, 1.0, 130.0, arrived_rps=90.0, retries_rps=20.0, shadowed_rps=3.0)},
        ),
        GatewayStats(
            "g2",
            50.0,
            {
                "free": TierStats(40.0, 0.5, 80.0, 1.0, 130.0, arrived_rps=40.0, retries_rps=6.0, shadowed_rps=0.25),
                "paid": TierStats(10.0, 0.0, 20.0, 1.0, 10.0, arrived_rps=10.0),
            },
        ),
    ]
    tiers = {"free": TierDepth("free", 7, 12.34), "paid": TierDepth("paid", 2, 1.0)}
    return Observation(0, tiers, list(workers), stats, 0, 0, 3, 4)


def inputs(**changes: Any) -> HealthInputs:
    told: dict[str, Any] = {
        "observation": looking(worker(1), worker(2)),
        "factors": {"paid": 1.0, "free": 1.0},
        "audit_lag_ms": 20,
        "time": "now",
    }
    return health_inputs(**told | changes)


def test_a_well_system_shows_its_figures() -> None:
    """Sums over gateways and tiers, the mean utilization of healthy GPUs, the worst gateway's p95."""
    status, document = health(inputs())

    assert (status, document["status"], document["reasons"]) == (200, "healthy", [])
    figures = ("gpu_utilization", "queue_depth", "requests_per_second", "healthy_gpus", "total_gpus", "capacity_rps")
    assert [document[name] for name in figures] == [0.5, 9, 150.0, 2, 2, 160.0]
    assert (document["dlq"], document["audit_lag_ms"]) == (4, 20)
    assert document["tiers"] == {
        "paid": {
            "depth": 2,
            "oldest_ms": 1.0,
            "effective_limit_ratio": 1.0,
            "allocated_rps": 10.0,
            "shed_per_second": 0.0,
            "shadow_refusals_per_second": 0.0,
            "retry_amplification": 1.0,
            "p95_ms": 20.0,
        },
        "free": {
            "depth": 7,
            "oldest_ms": 12.3,
            "effective_limit_ratio": 1.0,
            "allocated_rps": 130.0,
            "shed_per_second": 2.0,
            "shadow_refusals_per_second": 3.25,
            "retry_amplification": 1.25,
            "p95_ms": 80.0,
        },
    }


def test_padding_is_the_mean_of_the_healthy() -> None:
    """A worker that is gone says nothing of what runs."""
    wasting = [msgspec.structs.replace(worker(n), padding_waste=share) for n, share in enumerate((0.1, 0.4))]
    gone = msgspec.structs.replace(LOST, padding_waste=0.9)

    assert health(inputs(observation=looking(*wasting, gone)))[1]["padding_waste"] == 0.25
    assert health(inputs(observation=looking(gone)))[1]["padding_waste"] == 0.0


LOST = worker(2, healthy=False, age_ms=1400.0)
OUT = msgspec.structs.replace(worker(4, healthy=False, status="down"), gpu=GpuReading(0.0, 0, 0, 0, 0, "Xid 95"))
PAUSING = msgspec.structs.replace(worker(5, healthy=False, status="paused"), pausing=True)
STARTING = worker(3, healthy=False, status="starting", age_ms=50.0)


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        (
            {"observation": looking(worker(1), LOST, worker(3), worker(4))},
            "degraded",
            "1 of 4 GPUs is not healthy: worker-2 was last seen 1.4 s ago.",
        ),
        (
            {"observation": looking(worker(1), LOST, STARTING)},
            "degraded",
            "2 of 3 GPUs are not healthy: worker-2 was last seen 1.4 s ago; worker-3 is starting, last seen 0.1 s ago.",
        ),
        (
            {"observation": looking(*(worker(n, healthy=False, status="down") for n in range(7)), worker(9))},
            "degraded",
            "7 of 8 GPUs are not healthy: "
            + "; ".join(f"worker-{n} is down, last seen 0.1 s ago" for n in range(5))
            + "; and 2 more.",
        ),
        ({"observation": looking(LOST)}, "down", "1 of 1 GPUs is not healthy: worker-2 was last seen 1.4 s ago."),
        (
            {"observation": looking(OUT)},
            "down",
            "1 of 1 GPUs is not healthy: worker-4 is down (Xid 95), last seen 0.1 s ago.",
        ),
        (
            {"observation": looking(PAUSING, LOST)},
            "degraded",
            "2 of 2 GPUs are not healthy: worker-5 pauses for a moment; worker-2 was last seen 1.4 s ago.",
        ),
        (
            {"observation": looking(worker(5, healthy=False, status="paused", age_ms=1400.0))},
            "down",
            "1 of 1 GPUs is not healthy: worker-5 was last seen 1.4 s ago.",
        ),
        (
            {"observation": looking(worker(5, healthy=False, status="away"))},
            "down",
            "1 of 1 GPUs is not healthy: worker-5 is away, last seen 0.1 s ago.",
        ),
        ({"observation": looking()}, "down", "No GPU is known: no worker has said that it lives."),
        (
            {"redis_problem": "no answer", "look_age_s": 1.0},
            "degraded",
            "Redis was last looked at 1.0 s ago: no answer.",
        ),
        ({"redis_problem": "no answer", "look_age_s": 2.5}, "down", "Redis was last looked at 2.5 s ago: no answer."),
        (
            {"catalog_loaded": False},
            "down",
            "The catalog was never loaded: PostgreSQL has not answered yet.",
        ),
        (
            {"catalog_fresh": False, "catalog_age_s": 12.34},
            "degraded",
            "The catalog is 12.3 s old: PostgreSQL does not answer.",
        ),
        ({"catalog_problem": "a bad row"}, "degraded", "The catalog is 0.5 s old: a bad row."),
        (
            {"subscribed": False},
            "degraded",
            "This gateway is not subscribed to its answers; they come late, by reading the stored results.",
        ),
        (
            {"audit_lag_ms": 15_000},
            "degraded",
            "The audit's lag is 15.0 s: entries wait in Redis for PostgreSQL.",
        ),
        ({"audit_lag_ms": None}, "degraded", "The audit's lag is not known."),
        ({"factors": {"paid": 1.0, "free": 0.4}}, "degraded", "Limits are lowered: free to 40%."),
        ({"factors": {"paid": 0.996, "free": 0.994}}, "degraded", "Limits are lowered: free to 99%."),
        ({"leaving": True}, "degraded", "This gateway is shutting down."),
    ],
)
def test_every_fault_has_a_level_and_a_sentence(changes: dict[str, Any], status: str, reason: str) -> None:
    """One fault, one reason; only `down` is a 503; the check that found it does not pass."""
    code, document = health(inputs(**changes))

    assert (code, document["status"], document["reasons"]) == (503 if status == "down" else 200, status, [reason])
    results = {check["status"] for checks in document["checks"].values() for check in checks}
    assert results == {"pass", "fail" if status == "down" else "warn"}


def test_before_the_first_look_everything_is_said_to_be_down() -> None:
    """Nothing was observed yet: no figure is invented."""
    code, document = health(inputs(observation=None, look_age_s=None))

    assert (code, document["status"]) == (503, "down")
    assert (document["healthy_gpus"], document["queue_depth"], document["capacity_rps"]) == (0, 0, 0.0)
    assert document["reasons"][1] == "Redis has not been looked at yet: this gateway has just begun."


def test_a_paused_tier_is_told_with_what_waits() -> None:
    """Whoever is called at night must see that somebody holds it back."""
    status, document = health(inputs(paused=["free", "gold"]))

    assert (status, document["status"]) == (200, "degraded")
    assert document["reasons"] == ["No batches are formed of free (7 waiting), gold: paused."]
    assert document["checks"]["tiers:paused"][0]["observedValue"] == 2


def test_checks_have_the_drafts_shape() -> None:
    """Every check is a list of objects with component type, value, status and time."""
    _, document = health(inputs())

    assert set(document["checks"]) == {
        "gpus:healthy", "redis:look_age", "catalog:age", "responses:subscribed", "audit:lag", "limits:lowest",
        "retries:amplification", "redis:memory", "tiers:paused", "capacity:shed",
            "scheduler:pass_age", "gateways:beating", "models:restarted", "tasks:ended",
            "models:enabled", "redis:eviction", "redis:repaired",
    }  # fmt: skip
    for checks in document["checks"].values():
        assert all({"componentType", "observedValue", "status", "time"} <= set(check) for check in checks)


def retried(*stats: tuple[float, float]) -> Observation:
    """Each gateway's requests/s and retries/s of one tier."""
    gateways = [
        GatewayStats(f"g{i}", arrived, {"free": TierStats(arrived, 0.0, 0.0, arrived_rps=arrived, retries_rps=again)})
        for i, (arrived, again) in enumerate(stats)
    ]
    return Observation(0, {}, [worker(1)], gateways, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("stats", "amplification", "reason"),
    [
        ([], 1.0, None),
        ([(0.0, 0.0)], 1.0, None),
        ([(300.0, 0.0), (100.0, 0.0)], 1.0, None),
        ([(300.0, 100.0)], 1.5, None),  # not over it
        ([(20.0, 9.9)], 1.9802, None),  # so few that they are no load
        ([(150.0, 60.0), (150.0, 60.0)], 1.6667, "Clients' retries multiply the load: free 1.7-fold."),
        ([(40.0, 30.0)], 4.0, "Clients' retries multiply the load: free 4.0-fold."),
        ([(40.0, 40.0)], 100.0, "Clients' retries multiply the load: free 100.0-fold."),  # no first try is seen
    ],
)
def test_retries_that_multiply_the_load_are_told(
    stats: list[tuple[float, float]], amplification: float, reason: str | None
) -> None:
    """All requests for each new one, over all gateways; over 1.5 at ten retries a second or more, on-call is told."""
    _, document = health(inputs(observation=retried(*stats), factors={"free": 1.0}))

    assert document["tiers"]["free"]["retry_amplification"] == amplification
    assert (document["status"], document["reasons"]) == (
        "degraded" if reason else "healthy",
        [reason] if reason else [],
    )
    assert document["checks"]["retries:amplification"][0]["observedValue"] == amplification


def test_without_an_enabled_model_nothing_is_served() -> None:
    """Every request is a 404, however well the rest is; the reason says what to do."""
    status, document = health(inputs(no_model=True))

    assert (status, document["status"]) == (503, "down")
    assert (
        "No model is enabled, so every request is answered 404 model_not_found: enable one with"
        in document["reasons"][0]
    )


@pytest.mark.parametrize(("policy", "level"), [("noeviction", "healthy"), ("", "healthy"), ("allkeys-lru", "degraded")])
def test_a_redis_that_may_evict_is_told(policy: str, level: str) -> None:
    """It may have been changed since the roles began; what it does not tell is no news."""
    _, document = health(inputs(eviction_policy=policy))

    assert document["status"] == level
    reasons = document["reasons"]
    assert (f"Redis has maxmemory-policy {policy}, which can evict queued requests" in " ".join(reasons)) == bool(
        reasons
    )
