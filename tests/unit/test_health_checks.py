"""Health checks of a gateway: status, figures and failing checks as a pure function of its observations."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from gateway.direct.probe import Unreachable
from gateway.limits.gpu_time import TOP_WAITING
from gateway.operations.health.checks import health
from gateway.operations.health.outcomes import TierResult
from gateway.operations.health.pool_state import MeasuredPool
from gateway.operations.health.tiers import shedding
from gateway.operations.health.worker_losses import LostWorker
from health_inputs import (
    DOWN,
    INACTIVE,
    LOST,
    PAUSING,
    REDIS_DOWN,
    SERVING,
    inputs,
    observation,
    worker,
)
from scheduler.protocol.pool_view import CustomerGpuTime, GatewayStats, Observation, TierOutcomes, TierStats, WorkerView


def failing(document: MeasuredPool) -> dict[str, str]:
    """The checks that do not pass, with their status."""
    return {
        name: check["status"]
        for name, checks in document["checks"].items()
        for check in reversed(checks)  # The first is the worst.
        if check["status"] != "pass"
    }


def test_a_healthy_system_has_figures_and_no_reasons() -> None:
    """Rates and depths are sums over gateways and tiers, utilization is a mean, p95 the maximum."""
    document = health(inputs())

    assert (document["status"], document["reasons"], failing(document)) == ("healthy", [], {})
    figures = ("gpu_utilization", "queue_depth", "requests_per_second", "healthy_gpus", "total_gpus", "capacity_rps")
    assert [document[name] for name in figures] == [0.5, 9, 150.0, 2, 2, 160.0]
    assert (document["dlq"], document["audit_lag_ms"]) == (4, 20)
    assert (document["slots"], document["running"], document["slots_source"]) == (0, 0, "")
    assert document["tiers"]["paid"]["retry_amplification"] == 1.0
    assert document["tiers"]["free"] == {
        "depth": 7,
        "oldest_ms": 12.3,
        "effective_limit_ratio": 1.0,
        "allocated_rps": 130.0,
        "shed_per_second": 2.0,
        "shadow_refusals_per_second": 3.25,
        "retry_amplification": 1.25,
        "p95_ms": 80.0,
        "error_ratio_10s": 0.0,
        "error_ratio_60s": 0.0,
        "burn_rate_5m": None,
        "burn_rate_1h": None,
        "slo_ms": None,
        "slo_success": None,
        "fairness": 1.0,
        "top_customers": [],
        "background_depth": 0,
        "errors_60s": {},
        "in_rps": 130.0,
        "out_rps": 0.0,
        "demand_rps": 130.0,
        "failed_rps": 0.0,
        "p50_ms": 0.0,
        "p99_ms": 0.0,
    }


def test_slots_are_summed_over_healthy_workers_with_their_sources() -> None:
    """What runs is that of workers with slots; each source is named once."""
    slotted = [changed(worker(n), slots=64, in_flight=9, slots_source="64 sequences in /metrics") for n in (1, 2)]
    lost = changed(LOST, id="worker-3", slots=64)
    document = health(inputs(observation=observation(*slotted, lost, worker(4))))

    assert (document["slots"], document["running"], document["slots_source"]) == (128, 18, "64 sequences in /metrics")


def test_unhealthy_gpus_are_counted_by_cause() -> None:
    """The cause that the worker reports, else its status; a lost worker cannot report its status."""
    refused = [changed(worker(n), healthy=False, status="away", cause="connection_refused") for n in (1, 2)]
    loading = changed(worker(3), healthy=False, status="starting")
    silent = changed(worker(4), healthy=False, status="busy")
    document = health(inputs(observation=observation(*refused, loading, silent, worker(5))))

    assert document["unhealthy_gpus"] == {"connection_refused": 2, "lost": 1, "starting": 1}


def test_padding_is_the_mean_of_healthy_workers() -> None:
    """A lost worker is not included."""
    padding = [changed(worker(n), padding_waste=share) for n, share in enumerate((0.1, 0.4))]
    lost = changed(LOST, padding_waste=0.9)

    assert health(inputs(observation=observation(*padding, lost)))["padding_waste"] == 0.25
    assert health(inputs(observation=observation(lost)))["padding_waste"] == 0.0


@pytest.mark.parametrize(
    ("changes", "status", "checks"),
    [
        ({"observation": observation(worker(1), LOST, worker(3))}, "degraded", {"gpus:healthy": "warn"}),
        ({"observation": observation(LOST)}, "down", {"gpus:healthy": "fail"}),
        ({"observation": observation(DOWN)}, "down", {"gpus:healthy": "fail"}),
        ({"observation": observation(PAUSING, LOST)}, "degraded", {"gpus:healthy": "warn"}),
        ({"observation": observation(changed(PAUSING, pausing=False))}, "down", {"gpus:healthy": "fail"}),
        ({"observation": observation()}, "down", {"gpus:healthy": "fail"}),
        ({"redis_problem": "timeout", "look_age_s": 1.0}, "degraded", {"redis:look_age": "warn"}),
        ({"redis_problem": "timeout", "look_age_s": 2.5}, "down", {"redis:look_age": "fail"}),
        ({"catalog_loaded": False}, "down", {"catalog:age": "fail"}),
        ({"catalog_fresh": False}, "degraded", {"catalog:age": "warn"}),
        ({"catalog_problem": "A bad row."}, "degraded", {"catalog:age": "warn"}),
        ({"subscribed": False}, "degraded", {"responses:subscribed": "warn"}),
        ({"audit_lag_ms": 15_000}, "degraded", {"audit:lag": "warn"}),
        ({"audit_lag_ms": None}, "degraded", {"audit:lag": "warn"}),
        ({"factors": {"paid": 0.996, "free": 0.994}}, "degraded", {"limits:lowest": "warn"}),
        ({"factors": {"paid": 1.0, "free": 0.996}}, "healthy", {}),
        ({"paused": ["free"]}, "degraded", {"tiers:paused": "warn"}),
        ({"no_model": True}, "down", {"models:enabled": "fail"}),
        ({"short_of_memory": True}, "degraded", {"redis:memory": "warn"}),
        ({"eviction_policy": "allkeys-lru"}, "degraded", {"redis:eviction": "warn"}),
        ({"eviction_policy": "noeviction"}, "healthy", {}),
        ({"eviction_policy": ""}, "healthy", {}),
        ({"round_trip_s": 0.151}, "degraded", {"redis:round_trip": "warn"}),
        ({"round_trip_s": 0.149}, "healthy", {}),
        ({"tokens_problem": "The keys are old."}, "degraded", {"jwks:age": "warn"}),
        ({"leaving": True}, "degraded", {"gateway:leaving": "warn"}),
        ({"direct": INACTIVE}, "healthy", {}),
        ({"direct": SERVING, **REDIS_DOWN}, "degraded", {"redis:look_age": "warn", "breaker:redis": "warn"}),
        ({"direct": replace(SERVING, breakers={"redis": "closed"})}, "degraded", {"redis:look_age": "warn"}),
        (
            {"direct": replace(SERVING, serves=False), **REDIS_DOWN},
            "down",
            {"redis:look_age": "fail", "breaker:redis": "warn"},
        ),
        ({"direct": replace(INACTIVE, spool_problem="It is full.")}, "degraded", {"direct:spool": "warn"}),
        (
            {"direct": replace(INACTIVE, breakers={"redis": "closed", "worker-2": "half_open"})},
            "degraded",
            {"breaker:worker-2": "warn"},
        ),
        (
            {"direct": replace(INACTIVE, unreachable=(Unreachable("w1", "host:81", "It cannot be called."),))},
            "degraded",
            {"direct:endpoints": "warn"},
        ),
    ],
)
def test_each_problem_has_a_level_and_fails_its_check(
    changes: dict[str, Any], status: str, checks: dict[str, str]
) -> None:
    """Every check that fails has a reason, except the breaker of Redis, which its check explains."""
    document = health(inputs(**changes))

    assert document["status"] == status
    assert failing(document) == checks
    found = [(name, check) for name, several in document["checks"].items() for check in several]
    outputs = [check["output"] for name, check in found if check["status"] != "pass" and name != "breaker:redis"]
    assert sorted(document["reasons"]) == sorted(outputs)


def test_before_the_first_observation_the_gateway_is_down() -> None:
    """Without an observation, the figures are 0."""
    document = health(inputs(observation=None, look_age_s=None))

    assert document["status"] == "down"
    assert (document["healthy_gpus"], document["queue_depth"], document["capacity_rps"]) == (0, 0, 0.0)
    assert failing(document) == {"gpus:healthy": "fail", "redis:look_age": "fail"}


def test_checks_have_the_shape_of_the_draft() -> None:
    """Each check is a list of objects with component type, value, status and time, as in the draft of health+json."""
    view = replace(SERVING, breakers={"redis": "open", "worker-1": "closed"})
    checks = health(inputs(direct=view))["checks"]

    for each in checks.values():
        assert all({"componentType", "observedValue", "status", "time"} <= set(check) for check in each)
    values = {name: check["observedValue"] for name, (check,) in checks.items()}
    assert (values["direct:spool"], values["breaker:redis"], values["breaker:worker-1"]) == (900, "open", "closed")


@pytest.mark.parametrize(
    ("stats", "amplification", "reported"),
    [
        ([], 1.0, False),
        ([(0.0, 0.0)], 1.0, False),
        ([(300.0, 100.0)], 1.5, False),  # not above the threshold
        ([(20.0, 9.9)], 1.9802, False),  # below the minimum rate
        ([(150.0, 60.0), (150.0, 60.0)], 1.6667, True),
        ([(40.0, 40.0)], 100.0, True),  # no first attempt is observed
    ],
)
def test_retries_that_multiply_the_load_are_reported(
    stats: list[tuple[float, float]], amplification: float, reported: bool
) -> None:
    """Requests per first attempt over all gateways are reported above 1.5 with at least ten retries a second."""
    gateways = [
        GatewayStats(f"g{i}", rps, {"free": TierStats(rps, 0.0, 0.0, arrived_rps=rps, retries_rps=again)})
        for i, (rps, again) in enumerate(stats)
    ]
    seen = Observation(0, {}, [worker(1)], gateways, 0, 0, 0, 0)
    document = health(inputs(observation=seen, factors={"free": 1.0}))

    assert document["tiers"]["free"]["retry_amplification"] == amplification
    assert document["checks"]["retries:amplification"][0]["observedValue"] == amplification
    assert failing(document) == ({"retries:amplification": "warn"} if reported else {})


OTHERS = [(f"c{n}", 0) for n in range(TOP_WAITING)]
AT_14_02 = 14 * 3_600_000 + 2 * 60_000


def flow(arrived: float, shed: float, demand: float) -> dict[str, float]:
    """The figures of a tier on which this check depends, requests/s."""
    return {"in_rps": arrived, "shed_per_second": shed, "demand_rps": demand}


ADMITTED = flow(100.0, 0.0, 100.0)
ONE_OF_TWO = flow(1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("tiers", "minute", "losses", "share", "reason"),
    [
        ({"paid": ADMITTED, "free": ADMITTED}, 0, (LostWorker("gpu-3", AT_14_02),), 0.0, None),
        ({"free": flow(1000.0, 19.0, 1000.0)}, 99, (), 0.0, None),  # below the minimum share
        ({"free": flow(1.0, 0.4, 1.0)}, 99, (), 0.0, None),  # below the minimum rate
        ({"free": ONE_OF_TWO}, 9, (), 0.0, None),  # too few requests
        ({"free": ONE_OF_TWO}, 10, (), 0.25, "Rejecting 25% of free requests: queues are too long"),
        ({"free": flow(280.0, 28.0, 280.0)}, 0, (), 0.1, "Rejecting 10% of free requests: queues are too long"),
        ({"free": flow(0.0, 5.0, 400.0)}, 0, (), 1.0, "Rejecting 100% of free requests: 400/s demand exceeds 310/s"),
        *(
            (
                {"paid": flow(200.0, 10.0, demand), "free": flow(280.0, 280.0, 200.0)},
                0,
                (LostWorker("gpu-1", AT_14_02 + 90_000), LostWorker("gpu-3", AT_14_02)),
                1.0,
                (
                    f"Rejecting 5% of paid requests, 100% of free requests: {demand + 200:.0f}/s demand, 310/s capacity since "
                    "gpu-3 and 1 more were lost at 14:02 UTC."
                ),
            )
            for demand in (200.0, 100.0)  # Over the capacity, and within it.
        ),
    ],
)
def test_rejections_for_lack_of_capacity(
    tiers: dict[str, Any], minute: int, losses: tuple[LostWorker, ...], share: float, reason: str | None
) -> None:
    """The reason has the share of each tier, of enough requests, and the cause: with lost workers these, whatever the demand.

    `minute`: the rejections of the last minute, of four times as many requests.
    """
    outcomes = TierOutcomes(completed_60s=3 * minute, others_60s={"queue_full": minute, "invalid_request": 50})
    finding = shedding(tiers, dict.fromkeys(tiers, TierResult(outcomes)), 310.0, losses)

    assert (finding.value, finding.level) == (share, "degraded" if reason else "healthy")
    assert (finding.reason or "").startswith(reason or "")


@pytest.mark.parametrize(
    ("unmet", "rejected", "named"),
    [
        ([("acme", 90), ("zeta", 10)], 200, "; 90% of the rejected requests are of customer acme (id-acme)."),
        ([("acme", 60), *OTHERS], 100, "; 60% of the rejected requests are of customer acme (id-acme)."),
        ([("acme", 40), *OTHERS], 100, ""),  # Of many customers, gateways publish only some.
        ([("acme", 40), ("zeta", 45), ("beta", 20)], 100, ""),
        ([("acme", 0), ("zeta", 0)], 100, ""),  # An older gateway does not report its id.
        ([("acme", 90)], 100, ""),  # The only customer of the tier.
    ],
)
def test_the_customer_of_most_rejected_requests_is_named(
    unmet: list[tuple[str, int]], rejected: int, named: str
) -> None:
    """With its id and its share over all gateways; the action then names it, whatever the demand is."""
    tier = {"free": flow(400.0, 100.0, 400.0)}
    results = {"free": TierResult(TierOutcomes(others_60s={"queue_full": rejected, "invalid_request": 900}))}
    customers = [CustomerGpuTime(name, "free", 1.0, 0.0, 0.0, n // 2, f"id-{name}" if n else "") for name, n in unmet]
    gateways = [GatewayStats("g", 0.0, {}, gpu_times=customers)] * 2
    for capacity_rps in (310.0, 500.0):
        finding = shedding(tier, results, capacity_rps, (), gateways=gateways)  # type: ignore[arg-type]
        assert finding.reason is not None
        assert ("; " in finding.reason, finding.reason.endswith(named)) == (bool(named), True)
        assert ("limits of acme with" in finding.action) == bool(named)
    for capacity_rps in (310.0, 200.0):  # With the lost one the capacity is 620/s, and 400/s, which is the demand.
        lost = shedding(tier, results, capacity_rps, (LostWorker("w", AT_14_02),), healthy_gpus=1, gateways=gateways)  # type: ignore[arg-type]
        assert "of customer acme" not in (lost.reason or "")
    lost = shedding(tier, results, 100.0, (LostWorker("w", AT_14_02),), healthy_gpus=1, gateways=gateways)  # type: ignore[arg-type]
    assert ("of customer acme" in (lost.reason or "")) == bool(named)


@pytest.mark.parametrize(
    ("workers", "changes", "check"),
    [
        ([], {"short_of_memory": True}, "redis:memory"),
        ([], {"direct": replace(SERVING, serves=False, spool_problem="It is full.")}, "direct:spool"),
        ([worker(1, healthy=False, status="down")], {}, "gpus:healthy"),
    ],
)
def test_rejections_with_another_cause_refer_to_its_check(
    workers: list[WorkerView], changes: dict[str, Any], check: str
) -> None:
    """The reason for rejections names the check that explains the cause."""
    stats = TierStats(5.0, 5.0, 0.0, arrived_rps=5.0)
    seen = Observation(0, {}, workers, [GatewayStats("g1", 0.0, {"free": stats})], 0, 0, 0, 0)

    (found,) = health(inputs(observation=seen, factors={"free": 1.0}, **changes))["checks"]["capacity:shed"]

    assert f"(see {check})" in found["output"]


@pytest.mark.parametrize(
    "seen",
    [
        Observation(0, {}, [], [], 0, 0, 0, 0),  # Redis lost its data.
        Observation(0, {}, [worker(1, healthy=False)], [], 0, 0, 0, 0),
        Observation(0, {}, [worker(1)], [], 0, 0, 0, 0, scheduler_age_ms=9000.0, pass_age_ms=9000.0),
    ],
)
def test_a_gateway_that_serves_in_direct_mode_is_not_down(seen: Observation) -> None:
    """Failures of the queue path are `degraded` while direct mode serves, and `down` otherwise."""
    assert health(inputs(observation=seen, direct=SERVING, **REDIS_DOWN))["status"] == "degraded"
    assert health(inputs(observation=seen, direct=INACTIVE))["status"] == "down"
