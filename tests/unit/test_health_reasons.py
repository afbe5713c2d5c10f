"""The texts of health: every reason with its code, action and runbook, as they are in health_reasons.txt beside this file.

To change a text, change it in gateway/operations/health, run `REWRITE=1 pytest tests/unit/test_health_reasons.py`, and
read the difference as an on-call engineer would.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from gateway.direct.probe import Unreachable
from gateway.operations.health.advice import ADVICE
from gateway.operations.health.checks import HealthInputs, health
from gateway.operations.health.gateway_losses import LostGateway
from gateway.operations.health.outcomes import TierObjective
from gateway.operations.health.restarts import Restart
from gateway.operations.health.worker_losses import LostWorker
from gpu_pool.backends.openai_endpoint.availability import SILENT
from gpu_pool.backends.openai_endpoint.errors import LOADING, NO_KEY
from health_inputs import DOWN, INACTIVE, LOST, PAUSING, REDIS_DOWN, SERVING, inputs, observation, worker
from ledger.catalog.snapshot import WorkerCordon
from scheduler.protocol.pool_view import (
    CustomerGpuTime,
    GatewayStats,
    Observation,
    TierDepth,
    TierOutcomes,
    TierStats,
    WorkerView,
)
from scheduler.tasks import EndedTask

GOLDEN = Path(__file__).with_name("health_reasons.txt")
RUNBOOKS = Path(__file__).parents[2]
HEX = "0192f0c17a3b70008000000000000001"
SLOW = changed(worker(1, status="slow"), backend="simulated:3500", model_ms=3500.0, timeout_ms=3000.0)
HUNG = changed(SLOW, id="worker-2", model_ms=3000.0)
BAD_ROW = (
    "The catalog stays at version 7, because a row is invalid: tiers row 'free' has a burst of 0, which is not above 0."
)
ALL_DOWN = {"free": "down", "*": "down"}
FREE = {"factors": {"free": 1.0}}


def lost(number: int, status: str) -> WorkerView:
    return worker(number, healthy=False, status=status)


REFUSING = GatewayStats("gateway-1", 10.0, {}, refused=[1, 2, 3], served=[4])
FLOODED = GatewayStats(
    "gateway-2",
    10.0,
    {},
    gpu_times=[
        CustomerGpuTime("acme", "free", 1.0, 900.0, 2.0, 930, "0192f0c1-7a3b-7000-8000-000000000002"),
        CustomerGpuTime("zeta", "free", 1.0, 20.0, 0.0, 70, "0192f0c1-7a3b-7000-8000-000000000003"),
    ],
)
FAILING = GatewayStats("gateway-2", 10.0, {}, failed=[("acme", 1, 9)], served=[1, 2])


def seen(*workers: WorkerView, shed: float = 0.0, retries: float = 0.0, **codes: int) -> Observation:
    """Tier `free` with 100 requests/s, and these failures by code."""
    stats = TierStats(400.0, shed, 900.0, arrived_rps=100.0, retries_rps=retries)
    failed = sum(codes.values())
    counts = TierOutcomes(0 if failed else 100, failed, 0 if failed else 100, codes, (100, 20), (1000, 200))
    gateway = GatewayStats(f"gateway-1-{HEX}", 100.0, {"free": stats}, outcomes={"free": counts})
    tiers = {"free": TierDepth("free", 7, 12.0)}
    return Observation(0, tiers, list(workers or (worker(1), worker(2))), [gateway], 0, 0, 0, 0)


def with_notices(*notices: str) -> Observation:
    return changed(seen(), notices=list(notices))


CASES: dict[str, dict[str, Any]] = {
    "all requests time out": {"observation": seen(gpu_timeout=3, queue_timeout=9), "held": ALL_DOWN, **FREE},
    "the same, seen by the restarts of the model": {
        "observation": seen(deadline_exceeded=8, queue_timeout=12),
        "held": ALL_DOWN,
        "restarts_last_minute": 2,
        **FREE,
    },
    "the same in all": {"observation": seen(deadline_exceeded=8, queue_timeout=4), "held": ALL_DOWN, **FREE},
    "the same, and the worker reports it": {"observation": seen(SLOW, model_too_slow=12), "held": ALL_DOWN, **FREE},
    "some requests wait too long": {"observation": seen(queue_timeout=4), "held": {"free": "degraded"}, **FREE},
    "requests of one customer fail": {
        "observation": changed(seen(worker_lost=4), gateways=[*seen(worker_lost=4).gateways, FAILING]),
        "held": {"free": "degraded"},
        **FREE,
    },
    "requests lose their workers": {"observation": seen(worker_lost=4), "held": ALL_DOWN, **FREE},
    "requests fail otherwise": {"observation": seen(invalid_output=4, internal_error=1), "held": ALL_DOWN, **FREE},
    "the model refuses requests": {"observation": changed(seen(), gateways=[REFUSING]), **FREE},
    "more demand than capacity": {"observation": seen(shed=81.0), **FREE},
    "the same, of one customer": {
        "observation": changed(seen(shed=81.0), gateways=[*seen(shed=81.0).gateways, FLOODED]),
        **FREE,
    },
    "the same, after a loss": {"observation": seen(shed=81.0), "losses": (LostWorker("worker-2", 50_520_000),), **FREE},
    "queues are too long": {"observation": seen(shed=10.0), "capacity_rps": 500.0, **FREE},
    "the same, within the capacity": {
        "observation": seen(shed=10.0),
        "capacity_rps": 500.0,
        "losses": (LostWorker("worker-3", 50_560_000), LostWorker("worker-2", 50_520_000)),
        **FREE,
    },
    "rejections by a fault": {"observation": seen(LOST, shed=10.0), **FREE},
    "limits": {"factors": {"paid": 1.0, "free": 0.4}},
    "retries": {"observation": seen(retries=50.0), **FREE},
    "pause": {"paused": ["free", "gold"]},
    "p95": {
        "observation": seen(),
        "held": {"p95:free": "degraded"},
        "objectives": {"free": TierObjective(800)},
        **FREE,
    },
    "burn": {
        "observation": seen(),
        "held": {"burn:free": "degraded"},
        "objectives": {"free": TierObjective(None, 0.98)},
        **FREE,
    },
    "fast burn": {
        "observation": seen(),
        "held": {"fast:free": "degraded"},
        "objectives": {"free": TierObjective(None, 0.99)},
        **FREE,
    },
    "no worker": {"observation": observation()},
    "Redis came back empty": {"observation": observation(), "registering": True},
    "Redis came back empty, no scheduler": {
        "observation": changed(seen(), scheduler_age_ms=None, pass_age_ms=None),
        "registering": True,
        **FREE,
    },
    "a slow model": {"observation": observation(worker(3), SLOW, HUNG)},
    "a lost worker": {"observation": observation(worker(1), LOST)},
    "all workers are lost": {"observation": observation(LOST)},
    "a GPU fault": {"observation": observation(worker(1), LOST, DOWN)},
    "a failed model": {"observation": observation(worker(1), lost(2, "failed"), lost(3, "starting"))},
    "an endpoint": {"observation": observation(worker(1), changed(lost(2, "away"), reason=NO_KEY))},
    "an endpoint with a wrong key from the start": {
        "observation": observation(worker(1), changed(lost(2, "failed"), reason=NO_KEY, cause="key_rejected"))
    },
    "an endpoint of many workers": {
        "observation": observation(
            worker(1),
            *(changed(lost(n, "away"), reason=NO_KEY, cause="key_rejected") for n in range(2, 14)),
            LOST,
            DOWN,
        )
    },
    "many lost workers": {
        "observation": observation(worker(1), *(changed(LOST, id=f"gpu-{n}", age_ms=2000.0 - 90 * n) for n in range(7)))
    },
    "many causes": {
        "observation": observation(
            worker(1), *(changed(lost(n, "failed"), reason=f"Exit code {n}.") for n in range(2, 9))
        )
    },
    "silent endpoints": {"observation": observation(*(changed(worker(n), reason=SILENT) for n in range(1, 9)))},
    "a silent endpoint": {"observation": observation(changed(worker(1), reason=SILENT), worker(2))},
    "a start": {"observation": observation(lost(2, "starting"))},
    "a start of an endpoint": {"observation": observation(changed(lost(2, "starting"), reason=LOADING))},
    "a cordon": {"observation": observation(worker(1), lost(2, "cordoned"))},
    "cordons with reasons": {
        "observation": observation(*(lost(n, "cordoned") for n in (1, 2))),
        "cordons": {"worker-1": WorkerCordon("new fans", "operator:alice"), "worker-2": WorkerCordon("", "bob")},
    },
    "many cordons for one reason": {
        "observation": observation(worker(9), *(lost(n, "cordoned") for n in range(1, 5))),
        "cordons": {f"worker-{n}": WorkerCordon("rack 7", "operator:alice") for n in range(1, 5)},
    },
    "a stop": {"observation": observation(worker(1), lost(2, "draining"))},
    "a short pause": {"observation": observation(worker(1), PAUSING)},
    "a restarted model": {"restarts": (Restart("worker-1", 3_600_000),)},
    "two restarted models": {"restarts": (Restart("worker-1", 3_600_000), Restart("worker-2", 3_601_000))},
    "no scheduler": {"observation": changed(seen(), scheduler_age_ms=2500.0, pass_age_ms=None), **FREE},
    "gateways form batches": {"observation": changed(seen(), scheduler_age_ms=None, pass_age_ms=50.0), **FREE},
    "gateways do not form batches either": {
        "observation": changed(seen(), scheduler_age_ms=None, pass_age_ms=2500.0),
        "schedulers_expected": False,
        **FREE,
    },
    "a lost gateway": {"lost_gateways": (LostGateway(f"gateway-2-{HEX}", 3_600_000),)},
    "an ended task": {
        "ended_tasks": (EndedTask("callbacks", "UnicodeError", 3, 0.0),),
        "gateway_id": f"gateway-1-{HEX}",
    },
    "a task of a scheduler": {"observation": with_notices("scheduler-1: the task 'dispatcher' returned"), **FREE},
    "a repaired key": {"observation": with_notices("Redis key leases had a wrong type: it was rebuilt"), **FREE},
    "Redis failed once": {"redis_problem": "timeout", "look_age_s": 1.0},
    "Redis is away": REDIS_DOWN,
    "Redis has never responded": {
        "redis_problem": "connection refused",
        "look_age_s": None,
        "observation": seen(),
        **FREE,
    },
    "direct calls": {"direct": SERVING, **REDIS_DOWN},
    "direct calls while Redis returns": {"direct": replace(SERVING, breakers={})},
    "a subscription": {"subscribed": False},
    "no catalog": {"catalog_loaded": False},
    "PostgreSQL is away": {"catalog_problem": "PostgreSQL at db:5432 is not responding: TimeoutError."},
    "keys expire": {
        "catalog_problem": "PostgreSQL at db:5432 is not responding: TimeoutError.",
        "catalog_age_s": 900.5,
        "catalog_left_s": -0.5,
    },
    "PostgreSQL accepts no new connections": {
        "connection_problem": "PostgreSQL at db:5432 does not accept new connections: no response within 2 s."
    },
    "jobs": {"jobs_problem": "PostgreSQL is not available: TimeoutError."},
    "polls are late": {"catalog_fresh": False, "catalog_age_s": 12.34},
    "an invalid row": {"catalog_problem": BAD_ROW, "bad_row": True},
    "no model": {"no_model": True},
    "the audit": {"audit_lag_ms": 15_000},
    "the lag is not known": {"audit_lag_ms": None, "audit_problem": "Redis did not respond: TimeoutError"},
    "memory": {"short_of_memory": True, "memory_share": 0.83},
    "eviction": {"eviction_policy": "allkeys-lru"},
    "distance": {"round_trip_s": 0.26},
    "keys of tokens": {"tokens_problem": "The JWKS at https://issuer/keys cannot be refreshed: TimeoutError."},
    "the spool": {"direct": replace(INACTIVE, spool_problem="The spool cannot be written: no space left on device.")},
    "an endpoint of a worker": {
        "direct": replace(INACTIVE, unreachable=(Unreachable("worker-1", "host:81", "host:81 refuses connections."),))
    },
    "breakers": {
        "direct": replace(
            INACTIVE, breakers={"redis": "closed", "worker-2": "open", "worker-3": "half_open", "w": "closed"}
        )
    },
    "a breaker": {"direct": replace(INACTIVE, breakers={"redis": "closed", "worker-2": "open"})},
    "a stop of this gateway": {"leaving": True, "open_requests": 2},
}
"""Changes of the inputs of a healthy gateway, by what happens."""


def failing(given: HealthInputs) -> list[tuple[str, dict[str, Any]]]:
    checks = health(given)["checks"]
    return [(name, dict(check)) for name, several in checks.items() for check in several if check["status"] != "pass"]


def page() -> str:
    blocks = []
    for title, changes in CASES.items():
        lines = [f"# {title}"]
        for name, check in failing(inputs(**changes)):
            lines += [
                f"{name} {check['status']} {check['code']}",
                f"  {check.get('output', '-')}",
                f"  > {check['action']}",
            ]
            lines += [f"  > {check['runbook']}"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def test_texts_are_those_of_the_file() -> None:
    """Reasons, codes, actions and runbooks."""
    if os.environ.get("REWRITE"):
        GOLDEN.write_text(page(), "utf-8")
    assert page() == GOLDEN.read_text("utf-8")


def test_every_code_is_shown_and_its_runbook_exists() -> None:
    """The file covers every code, no action has an unfilled name, and each ends like a sentence."""
    found = [check for changes in CASES.values() for _, check in failing(inputs(**changes))]

    assert {check["code"] for check in found} == ADVICE.keys()
    assert [check for check in found if not (RUNBOOKS / check["runbook"]).is_file()] == []
    assert [check["action"] for check in found if "{" in check["action"] or not check["action"].endswith(".")] == []
