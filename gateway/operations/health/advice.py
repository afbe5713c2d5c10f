"""What to do about each problem that health reports: by code, the action, the runbook, and what customers see.

The texts are in one table, so that they can be read together, as on-call does. tests/unit/health_reasons.txt shows each
with its reason.
"""

from dataclasses import replace
from typing import NamedTuple

from gateway.operations.health.model import HealthFinding, Status

_NO_CAPACITY = "All requests get 503 no_capacity."
_BY_FAULT = "Resolve the problem of {about} first; the rejections end with it."


class ProblemAdvice(NamedTuple):
    """`action`: `{about}` is replaced by the affected processes or tiers, `{first}` by the first of them. `runbook`: a file of docs/runbooks without .md.

    `impact`: what customers see while the check is down.
    """

    action: str
    runbook: str
    impact: str = ""


ADVICE: dict[str, ProblemAdvice] = {
    "capacity_exceeded": ProblemAdvice(
        "Add workers, or lower the limits of {about} with `tierlane customer set`.", "TierlaneOverloaded"
    ),
    "capacity_lost": ProblemAdvice(
        "Restore {about}, or start another worker. If the demand exceeds the capacity then, lower the limits of the top "
        "customers with `tierlane customer set`.",
        "TierlaneOverloaded",
    ),
    "queues_too_long": ProblemAdvice(
        "The capacity is sufficient but requests wait: check the schedulers and the batch times of the workers.",
        "TierlaneOverloaded",
    ),
    "rejected_by_fault": ProblemAdvice(_BY_FAULT, "TierlaneOverloaded"),
    "requests_time_out": ProblemAdvice(
        "Measure the batches with `tierlane check model SPEC`. Raise TIERLANE_GPU_TIMEOUT_MS of the workers and "
        "TIERLANE_TOTAL_REQUEST_MS above them, or make batches shorter.",
        "TierlaneModelTooSlow",
        "Nearly all requests get 504.",
    ),
    "requests_wait_too_long": ProblemAdvice(
        "Add workers, or check why batches take long. `tierlane tier set TIER --max-queue-ms N` allows longer waits of "
        "{about}.",
        "TierlaneOverloaded",
        "Nearly all requests get 504 queue_timeout.",
    ),
    "requests_lose_workers": ProblemAdvice(
        "Read the logs of the workers, and find inputs that break the model with `tierlane dlq list`.",
        "TierlaneRequestsRunTwice",
        "Nearly all requests get 503 worker_lost.",
    ),
    "requests_of_one_customer_fail": ProblemAdvice(
        "Look at its errors with `tierlane explain`, and tell the customer; `tierlane customer set` lowers its limits meanwhile.",
        "TierlaneBudgetBurnsFast",
    ),
    "requests_fail": ProblemAdvice(
        "Read the logs of the gateways and workers for {about}; if it began with a release, roll it back.",
        "TierlaneBudgetBurnsFast",
        "Nearly all requests get an error.",
    ),
    "model_refuses": ProblemAdvice(
        "Read the log of the model's server for the reason, such as a missing chat template. If it began with a release, roll "
        "it back.",
        "TierlaneBudgetBurnsFast",
    ),
    "latency_over_objective": ProblemAdvice(
        "Compare `queue_ms` and `gpu_ms` of recent requests of {about}: add workers, or make batches shorter.",
        "TierlaneTooSlow",
    ),
    "budget_burns_fast": ProblemAdvice(
        "Find the error codes of {about} (`tierlane_requests_total` by `outcome`), and resolve the most frequent one now.",
        "TierlaneBudgetBurnsFast",
    ),
    "budget_burns": ProblemAdvice(
        "Find when it began for {about}, and compare with releases, lost GPUs and `tierlane config-changes`.",
        "TierlaneBudgetBurns",
    ),
    "limits_reduced": ProblemAdvice(
        "Add workers if demand is normal, or restore lost workers. `tierlane explain CUSTOMER` shows the factor.",
        "TierlaneOverloaded",
    ),
    "client_retries": ProblemAdvice(
        "See why the first attempts are rejected (`capacity:shed`), and have the clients obey Retry-After.",
        "TierlaneClientsRetry",
    ),
    "tier_paused": ProblemAdvice(
        "Run `tierlane queue resume TIER` for {about} when the pause is over; `tierlane config-changes --table tiers` says who "
        "paused it, and when.",
        "TierlaneTierPaused",
    ),
    "no_gpu": ProblemAdvice(
        "Start a worker. If workers run, check that they use this Redis and this pool (TIERLANE_REDIS_URL, TIERLANE_POOL).",
        "TierlaneNoGpu",
        _NO_CAPACITY,
    ),
    "workers_registering": ProblemAdvice(
        "Wait: workers and schedulers register again within a second. Restart those that do not.", "TierlaneNoGpu"
    ),
    "model_too_slow": ProblemAdvice(
        "Raise TIERLANE_GPU_TIMEOUT_MS of {about}, and TIERLANE_TOTAL_REQUEST_MS of the gateways if needed, above the "
        "batch time; or make batches shorter. `tierlane check model` measures it.",
        "TierlaneModelTooSlow",
        "All requests get 503 model_too_slow.",
    ),
    "gpu_fault": ProblemAdvice(
        "Restart {about}; if the fault returns, reset the GPU or take the machine out of service.",
        "TierlaneGpuLost",
        _NO_CAPACITY,
    ),
    "gpu_lost": ProblemAdvice(
        "Check the process and the host of {about} (`ps` shows T if it is suspended: `kill -CONT PID`), and restart the "
        "worker. Its batches run again on other workers.",
        "TierlaneGpuLost",
        _NO_CAPACITY,
    ),
    "model_failed": ProblemAdvice(
        "The worker restarts its model process by itself. If that repeats or takes long, read the log of {about}; "
        "`tierlane check model SPEC` runs the model alone.",
        "TierlaneGpuLost",
        _NO_CAPACITY,
    ),
    "endpoint_unavailable": ProblemAdvice(
        "Check the model server that {about} calls (TIERLANE_BACKEND), and its address and token.",
        "TierlaneGpuLost",
        _NO_CAPACITY,
    ),
    "endpoint_silent": ProblemAdvice(
        "Check the model server that {about} calls: it has requests, and does not answer a `GET /health` either.",
        "TierlaneGpuLost",
    ),
    "worker_starting": ProblemAdvice(
        "Wait until the model of {about} is loaded; if it takes minutes, read the log.", "TierlaneGpuLost", _NO_CAPACITY
    ),
    "worker_cordoned": ProblemAdvice(
        "An operator cordoned {about}: `tierlane gpu uncordon {first}` when the work is done.",
        "TierlaneGpuLost",
        _NO_CAPACITY,
    ),
    "worker_paused": ProblemAdvice("Wait: {about} resumes by itself within seconds.", "TierlaneGpuLost"),
    "worker_stopping": ProblemAdvice(
        "No action if {about} was stopped on purpose; otherwise read its log.", "TierlaneGpuLost", _NO_CAPACITY
    ),
    "model_restarted": ProblemAdvice(
        "If it repeats, read the log of {about} for the exit code of the model process.", "TierlaneRequestsRunTwice"
    ),
    "no_scheduler": ProblemAdvice(
        "Start a scheduler, or resume a suspended one (`ps` shows T, `kill -CONT PID`); requests stay in Redis meanwhile.",
        "TierlaneNoScheduler",
        "All requests get 504 queue_timeout.",
    ),
    "gateway_lost": ProblemAdvice(
        "If the process of {about} exists but is suspended (`ps` shows T), it still holds the port and clients may hang: "
        "`kill -CONT PID` resumes it, `kill -KILL PID` ends it. If it is gone, start another gateway, and read its last log "
        "lines. The notice ends when another one serves.",
        "TierlaneGatewayGone",
    ),
    "gateway_stopping": ProblemAdvice("No action: the load balancer uses the other gateways.", "TierlaneGatewayGone"),
    "task_ended": ProblemAdvice(
        "Report the log line `task_ended` of that process with its traceback. Restart the process if this continues.",
        "TierlaneTaskEnded",
    ),
    "redis_key_repaired": ProblemAdvice(
        "Find the other client that writes to this Redis (`CLIENT LIST`), and stop it.", "TierlaneForeignRedisClient"
    ),
    "redis_unavailable": ProblemAdvice(
        "Start Redis if it is down; resume it if it is suspended (`ps` shows T, `kill -CONT PID`); otherwise check its load "
        "(`SLOWLOG GET`) and the network.",
        "TierlaneBlind",
        _NO_CAPACITY,
    ),
    "redis_not_responding": ProblemAdvice(
        "Start Redis if it is down; resume it if it is suspended (`ps` shows T, `kill -CONT PID`); otherwise check its load "
        "(`SLOWLOG GET`) and the network.",
        "TierlaneBlind",
    ),
    "direct_mode": ProblemAdvice(
        "Restore Redis: direct calls have no queues, and each gateway applies the limits by itself.", "TierlaneBlind"
    ),
    "responses_not_subscribed": ProblemAdvice(
        "Check Redis; the gateway subscribes again by itself. If only one gateway reports this, restart it.",
        "TierlaneBlind",
    ),
    "catalog_not_loaded": ProblemAdvice(
        "Check that PostgreSQL is running, TIERLANE_DATABASE_URL is its address, and `tierlane migrate` has run.",
        "TierlaneCatalogStale",
        "All requests get 503 catalog_unavailable.",
    ),
    "catalog_stale": ProblemAdvice(
        "Start PostgreSQL if it is down; resume it if it is suspended (`ps` shows T, `kill -CONT PID`); otherwise check the "
        "network and its connection limit.",
        "TierlaneCatalogStale",
    ),
    "catalog_expired": ProblemAdvice(
        "Start PostgreSQL if it is down; resume it if it is suspended (`ps` shows T, `kill -CONT PID`); otherwise check the "
        "network and its connection limit.",
        "TierlaneCatalogStale",
        "All requests get 503 catalog_unavailable.",
    ),
    "postgres_refuses_connections": ProblemAdvice(
        "Check the main process of PostgreSQL (`ps` shows T if it is suspended), its connection limit, and the network.",
        "TierlaneCatalogStale",
    ),
    "jobs_not_stored": ProblemAdvice(
        "Check that PostgreSQL runs and is not a standby, its disk, and its connection limit or pooler.",
        "TierlaneCatalogStale",
    ),
    "catalog_invalid": ProblemAdvice(
        "Correct the row that the reason names, or undo its last change (`SELECT * FROM config_changes`).",
        "TierlaneCatalogStale",
    ),
    "no_model_enabled": ProblemAdvice(
        "Run `tierlane model set NAME --enabled on`, or create a model with `tierlane model create NAME`.",
        "TierlaneNoModel",
        "All requests get 404 model_not_found.",
    ),
    "audit_lag": ProblemAdvice(
        "Check PostgreSQL (running, disk, locks) and the log of the schedulers for `audit`.", "TierlaneAuditLags"
    ),
    "audit_lag_unknown": ProblemAdvice(
        "Resolve the problem of Redis, from which the lag is read; PostgreSQL has checks of its own.",
        "TierlaneAuditLags",
    ),
    "redis_full": ProblemAdvice(
        "Find the long list (`LLEN outbox`, `LLEN queue:free`). Restore the audit if it is `outbox`, else raise `maxmemory`.",
        "TierlaneRedisFull",
    ),
    "redis_far": ProblemAdvice(
        "Run the roles near Redis, in the same region; check the network if the distance is new.", "TierlaneBlind"
    ),
    "redis_evicts": ProblemAdvice(
        "Run `CONFIG SET maxmemory-policy noeviction`, and set it in the configuration file of Redis.",
        "TierlaneRedisFull",
    ),
    "jwks_stale": ProblemAdvice(
        "Check the file or address of the JWKS. Tokens are verified with the last valid keys for a day.",
        "TierlaneJwksStale",
    ),
    "spool_not_writable": ProblemAdvice(
        "Free disk space in the gateway's data directory, and check its permissions.", "TierlaneSpool"
    ),
    "worker_unreachable": ProblemAdvice(
        "Set TIERLANE_DIRECT_ADVERTISE of {about} to an address that gateways can reach, and open its port; or disable "
        "the endpoint with TIERLANE_DIRECT_HOST=off.",
        "TierlaneCircuitOpen",
    ),
    "circuit_open": ProblemAdvice(
        "Check {about} and the network to it. The gateway retries several times a second.", "TierlaneCircuitOpen"
    ),
}


def finding(  # noqa: PLR0917 - the fields of a HealthFinding
    name: str,
    kind: str,
    value: str | float | None,
    unit: str,
    reason: str | None,
    code: str,
    about: str = "",
    *,
    level: Status = "degraded",
) -> HealthFinding:
    """The finding of a check: healthy without a reason, else the problem `code`."""
    if not reason:
        return HealthFinding(name, kind, "healthy", value, unit)
    return problem(code, name, kind, level, value, unit, reason, about)


def problem(  # noqa: PLR0917 - the fields of a HealthFinding
    code: str,
    name: str,
    kind: str,
    level: Status,
    value: str | float | None,
    unit: str,
    reason: str | None,
    about: str = "",
) -> HealthFinding:
    """The finding of a check that fails, with its advice. `about`: the processes or tiers that the action names."""
    advice = ADVICE[code]
    return HealthFinding(
        name,
        kind,
        level,
        value,
        unit,
        reason,
        code=code,
        action=advice.action.replace("{about}", about).replace("{first}", about.partition(", ")[0]),
        runbook=f"docs/runbooks/{advice.runbook}.md",
    )


def with_impact(found: HealthFinding) -> HealthFinding:
    """The finding with what customers see, if it is down."""
    impact = ADVICE[found.code].impact if found.level == "down" and found.code else ""
    return replace(found, reason=f"{found.reason} {impact}") if impact and found.reason else found
