"""The health checks: status, figures and reasons, as a pure function of the inputs."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.direct.mode import DirectView
from gateway.direct.workers import Unreachable
from gateway.operations.health_checks import Flow, HealthInputs, health, shedding
from gateway.operations.health_losses import Loss
from health_inputs import health_inputs
from scheduler.protocol.pool_view import GatewayStats, GpuReading, Observation, TierDepth, TierStats, WorkerView


def worker(number: int, *, healthy: bool = True, status: str = "busy", age_ms: float = 100.0) -> WorkerView:
    return WorkerView(f"worker-{number}", status, 0.5, 1, age_ms, healthy, 100.0, 50.0, "tiny", "v1")


def observation(*workers: WorkerView) -> Observation:
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
    healthy: dict[str, Any] = {
        "observation": observation(worker(1), worker(2)),
        "factors": {"paid": 1.0, "free": 1.0},
        "audit_lag_ms": 20,
        "time": "now",
    }
    return health_inputs(**healthy | changes)


def test_a_healthy_system_has_figures_and_no_reasons() -> None:
    """Sums over gateways and tiers, the mean utilization of healthy GPUs, the highest p95."""
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


def test_padding_is_the_mean_of_healthy_workers() -> None:
    """A lost worker is not included."""
    padding = [msgspec.structs.replace(worker(n), padding_waste=share) for n, share in enumerate((0.1, 0.4))]
    lost = msgspec.structs.replace(LOST, padding_waste=0.9)

    assert health(inputs(observation=observation(*padding, lost)))[1]["padding_waste"] == 0.25
    assert health(inputs(observation=observation(lost)))[1]["padding_waste"] == 0.0


LOST = worker(2, healthy=False, age_ms=1400.0)
DOWN = msgspec.structs.replace(worker(4, healthy=False, status="down"), gpu=GpuReading(0.0, 0, 0, 0, 0, "Xid 95"))
PAUSING = msgspec.structs.replace(worker(5, healthy=False, status="paused"), pausing=True)
STARTING = worker(3, healthy=False, status="starting", age_ms=50.0)


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        (
            {"observation": observation(worker(1), LOST, worker(3), worker(4))},
            "degraded",
            "1 of 4 GPUs is not healthy: worker-2 was last seen 1.4 s ago.",
        ),
        (
            {"observation": observation(worker(1), LOST, STARTING)},
            "degraded",
            "2 of 3 GPUs are not healthy: worker-2 was last seen 1.4 s ago; worker-3 is starting, last seen 0.1 s ago.",
        ),
        (
            {"observation": observation(*(worker(n, healthy=False, status="down") for n in range(7)), worker(9))},
            "degraded",
            "7 of 8 GPUs are not healthy: "
            + "; ".join(f"worker-{n} is down, last seen 0.1 s ago" for n in range(5))
            + "; and 2 more.",
        ),
        ({"observation": observation(LOST)}, "down", "1 of 1 GPUs is not healthy: worker-2 was last seen 1.4 s ago."),
        (
            {"observation": observation(DOWN)},
            "down",
            "1 of 1 GPUs is not healthy: worker-4 is down (Xid 95), last seen 0.1 s ago.",
        ),
        (
            {"observation": observation(PAUSING, LOST)},
            "degraded",
            "2 of 2 GPUs are not healthy: worker-5 is briefly paused; worker-2 was last seen 1.4 s ago.",
        ),
        (
            {"observation": observation(worker(5, healthy=False, status="paused", age_ms=1400.0))},
            "down",
            "1 of 1 GPUs is not healthy: worker-5 was last seen 1.4 s ago.",
        ),
        (
            {"observation": observation(worker(5, healthy=False, status="away"))},
            "down",
            "1 of 1 GPUs is not healthy: worker-5 is away, last seen 0.1 s ago.",
        ),
        ({"observation": observation()}, "down", "No GPU is known: no worker has sent a heartbeat."),
        ({"redis_problem": "timeout", "look_age_s": 1.0}, "degraded", "Redis last responded 1.0 s ago: timeout."),
        ({"redis_problem": "timeout", "look_age_s": 2.5}, "down", "Redis last responded 2.5 s ago: timeout."),
        ({"catalog_loaded": False}, "down", "The catalog was never loaded: PostgreSQL has not responded yet."),
        (
            {"catalog_fresh": False, "catalog_age_s": 12.34},
            "degraded",
            "PostgreSQL is not responding. Serving continues with the catalog of 12.3 s ago; changes are not applied.",
        ),
        (
            {"catalog_problem": "A bad row."},
            "degraded",
            "A bad row. Serving continues with the catalog of 0.5 s ago; changes are not applied.",
        ),
        (
            {"subscribed": False},
            "degraded",
            "This gateway is not subscribed to its replies; responses are late, because it polls the stored results.",
        ),
        ({"audit_lag_ms": 15_000}, "degraded", "The audit lag is 15.0 s: records wait in Redis for PostgreSQL."),
        ({"audit_lag_ms": None}, "degraded", "The audit lag is not known."),
        ({"factors": {"paid": 1.0, "free": 0.4}}, "degraded", "Limits are reduced: free to 40%."),
        ({"factors": {"paid": 0.996, "free": 0.994}}, "degraded", "Limits are reduced: free to 99%."),
        (
            {"paused": ["free", "gold"]},
            "degraded",
            "No batches are formed for paused tiers: free (7 queued), gold.",
        ),
        (
            {"no_model": True},
            "down",
            (
                "No model is enabled, so every request gets 404 model_not_found: enable one with "
                "`tierlane model set NAME --enabled on`, or create one with `tierlane model create NAME`."
            ),
        ),
        (
            {"eviction_policy": "allkeys-lru"},
            "degraded",
            (
                "Redis has maxmemory-policy allkeys-lru, which can evict queued requests: run `CONFIG SET maxmemory-policy "
                "noeviction`, and set it in the server's configuration."
            ),
        ),
        ({"leaving": True}, "degraded", "This gateway is shutting down."),
    ],
)
def test_each_problem_has_a_level_and_a_reason(changes: dict[str, Any], status: str, reason: str) -> None:
    """One problem has one reason; only `down` is 503; only its check does not pass."""
    code, document = health(inputs(**changes))

    assert (code, document["status"], document["reasons"]) == (503 if status == "down" else 200, status, [reason])
    results = {check["status"] for checks in document["checks"].values() for check in checks}
    assert results == {"pass", "fail" if status == "down" else "warn"}


@pytest.mark.parametrize("policy", ["noeviction", ""])
def test_noeviction_and_unknown_policies_are_healthy(policy: str) -> None:
    """The policy is unknown if Redis does not report it."""
    assert health(inputs(eviction_policy=policy))[1]["status"] == "healthy"


def test_before_the_first_observation_the_gateway_is_down() -> None:
    """Without an observation, the figures are 0."""
    code, document = health(inputs(observation=None, look_age_s=None))

    assert (code, document["status"]) == (503, "down")
    assert (document["healthy_gpus"], document["queue_depth"], document["capacity_rps"]) == (0, 0, 0.0)
    assert document["reasons"][1] == "Redis has not responded yet: this gateway has just started."


def test_checks_have_the_shape_of_the_draft() -> None:
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


def with_retries(*stats: tuple[float, float]) -> Observation:
    """An observation with requests/s and retries/s of one tier at each gateway."""
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
        ([(300.0, 100.0)], 1.5, None),  # not above the threshold
        ([(20.0, 9.9)], 1.9802, None),  # below the minimum rate
        ([(150.0, 60.0), (150.0, 60.0)], 1.6667, "Client retries multiply the load: free by 1.7."),
        ([(40.0, 30.0)], 4.0, "Client retries multiply the load: free by 4.0."),
        ([(40.0, 40.0)], 100.0, "Client retries multiply the load: free by 100.0."),  # no first attempt is observed
    ],
)
def test_retries_that_multiply_the_load_are_reported(
    stats: list[tuple[float, float]], amplification: float, reason: str | None
) -> None:
    """Requests per first attempt over all gateways; reported above 1.5 with at least ten retries a second."""
    _, document = health(inputs(observation=with_retries(*stats), factors={"free": 1.0}))

    assert document["tiers"]["free"]["retry_amplification"] == amplification
    assert (document["status"], document["reasons"]) == (
        "degraded" if reason else "healthy",
        [reason] if reason else [],
    )
    assert document["checks"]["retries:amplification"][0]["observedValue"] == amplification


AT_14_02 = 14 * 3_600_000 + 2 * 60_000
ADMITTED = Flow(100.0, 0.0, 100.0)


@pytest.mark.parametrize(
    ("tiers", "capacity_rps", "losses", "reason"),
    [
        ({"paid": ADMITTED, "free": ADMITTED}, 310.0, (), None),
        ({"paid": ADMITTED, "free": ADMITTED}, 310.0, (Loss("gpu-3", AT_14_02),), None),
        ({"free": Flow(100.0, 1.9, 100.0)}, 310.0, (), None),  # below the minimum share
        ({"free": Flow(1.0, 0.4, 1.0)}, 310.0, (), None),  # below the minimum rate
        (
            {"paid": Flow(200.0, 0.0, 200.0), "free": Flow(280.0, 106.4, 280.0)},
            310.0,
            (Loss("gpu-3", AT_14_02),),
            "Rejecting 38% of free requests: 480/s demand exceeds 310/s capacity since gpu-3 was lost at 14:02 UTC.",
        ),
        (
            {"paid": Flow(200.0, 10.0, 200.0), "free": Flow(280.0, 280.0, 280.0)},
            160.0,
            (Loss("gpu-1", AT_14_02 + 90_000), Loss("gpu-3", AT_14_02)),
            (
                "Rejecting 5% of paid requests, 100% of free requests: 480/s demand exceeds 160/s capacity since gpu-3 and "
                "1 more were lost at 14:02 UTC."
            ),
        ),
        (
            {"free": Flow(280.0, 28.0, 280.0)},
            310.0,
            (),
            "Rejecting 10% of free requests: queues are too long, although 280/s demand is within 310/s capacity.",
        ),
        (
            {"free": Flow(0.0, 5.0, 4.0)},
            1.0,
            (),
            "Rejecting 100% of free requests: 4/s demand exceeds 1/s capacity.",
        ),
    ],
)
def test_rejections_for_lack_of_capacity(
    tiers: dict[str, Flow], capacity_rps: float, losses: tuple[Loss, ...], reason: str | None
) -> None:
    """The reason has the share of each tier, the cause, and since when workers are missing."""
    found = shedding(tiers, capacity_rps, losses)

    assert (found.reason, found.level) == (reason, "healthy" if reason is None else "degraded")


SHED = Observation(
    0, {}, [], [GatewayStats("g1", 0.0, {"free": TierStats(5.0, 5.0, 0.0, arrived_rps=5.0)})], 0, 0, 0, 0
)
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
FULL = replace(INACTIVE, active=True, for_s=1.0, workers=1, spool_bytes=9, spool_problem="It is full.")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"short_of_memory": True}, "Redis is short of memory and accepts no new requests (see redis:memory)"),
        (
            {"direct": FULL},
            "the gateway's spool accepts no more records while Redis is not available (see direct:spool)",
        ),
        ({"workers": [worker(1, healthy=False, status="down")]}, "no GPU is healthy (see gpus:healthy)"),
        ({}, "queues are too long, although 5/s demand is within 160/s capacity"),
    ],
)
def test_causes_of_rejections_other_than_the_capacity(changes: dict[str, Any], cause: str) -> None:
    """The reason refers to the check that explains the cause."""
    seen = msgspec.structs.replace(SHED, workers=changes.pop("workers", []))
    _, document = health(health_inputs(observation=seen, factors={"free": 1.0}, **changes))

    assert document["reasons"][0] == f"Rejecting 100% of free requests: {cause}."


REDIS_DOWN = {"redis_problem": "timeout", "look_age_s": 3.4}
SERVING = replace(
    INACTIVE, active=True, for_s=3.21, workers=4, serves=True, spool_bytes=900, breakers={"redis": "open"}
)


def direct_inputs(direct: DirectView, **changes: Any) -> HealthInputs:
    return health_inputs(observation=Observation(0, {}, [worker(1)], [], 0, 0, 0, 0), direct=direct, **changes)


@pytest.mark.parametrize(
    ("direct", "changes", "status", "reasons"),
    [
        (INACTIVE, {}, "healthy", []),
        (
            SERVING,
            REDIS_DOWN,
            "degraded",
            ["Redis is not responding; requests have been served by direct calls to 4 workers for 3.2 s."],
        ),
        (
            replace(SERVING, workers=1, breakers={"redis": "closed"}),
            {},
            "degraded",
            [
                (
                    "Redis is responding again, but is not used until it is stable; "
                    "requests have been served by direct calls to 1 worker for 3.2 s."
                )
            ],
        ),
        (
            replace(SERVING, serves=False, workers=0),
            REDIS_DOWN,
            "down",
            ["Redis last responded 3.4 s ago: timeout."],
        ),
        (replace(INACTIVE, spool_problem="The spool is full."), {}, "degraded", ["The spool is full."]),
        (
            replace(INACTIVE, breakers={"redis": "closed", "worker-2": "half_open"}),
            {},
            "degraded",
            ["Direct calls to worker-2 fail and will be retried soon."],
        ),
        (
            replace(INACTIVE, unreachable=(Unreachable("w1", "host:81", "The worker at host:81 cannot be called."),)),
            {},
            "degraded",
            [
                (
                    "This gateway cannot call 1 of the workers directly, as it must while Redis is not available. "
                    "w1: The worker at host:81 cannot be called. Set TIERLANE_DIRECT_ADVERTISE of the worker to an address "
                    "that gateways can reach, open its port to them, or disable its endpoint with TIERLANE_DIRECT_HOST=off."
                )
            ],
        ),
    ],
)
def test_direct_mode_has_a_level_and_a_reason(
    direct: DirectView, changes: dict[str, Any], status: str, reasons: list[str]
) -> None:
    """`down` only if no requests are served."""
    _, document = health(direct_inputs(direct, **changes))

    assert (document["status"], document["reasons"]) == (status, reasons)


def test_breakers_and_spool_are_checks() -> None:
    """Each with its observed value."""
    view = replace(SERVING, breakers={"redis": "open", "worker-1": "closed"})
    _, document = health(direct_inputs(view, **REDIS_DOWN))
    seen = {name: check[0]["observedValue"] for name, check in document["checks"].items()}

    assert (seen["direct:spool"], seen["breaker:redis"], seen["breaker:worker-1"]) == (900, "open", "closed")


@pytest.mark.parametrize(
    "seen",
    [
        Observation(0, {}, [], [], 0, 0, 0, 0),  # Redis lost its data.
        Observation(0, {}, [worker(1, healthy=False)], [], 0, 0, 0, 0),
        Observation(0, {}, [worker(1)], [], 0, 0, 0, 0, scheduler_age_ms=None, pass_age_ms=None),
        Observation(0, {}, [worker(1)], [], 0, 0, 0, 0, scheduler_age_ms=9000.0, pass_age_ms=9000.0),
    ],
)
def test_a_gateway_that_serves_in_direct_mode_is_not_down(seen: Observation) -> None:
    """Whatever the last observation of the queues was; without direct mode it is down."""
    with_it = health_inputs(observation=seen, direct=SERVING, **REDIS_DOWN)
    without = health_inputs(observation=seen, direct=INACTIVE)

    assert (health(with_it)[0], health(with_it)[1]["status"]) == (200, "degraded")
    assert health(without)[1]["status"] == "down"
