"""Every metric by name: its type, labels, unit and meaning. docs/metrics.md is this table; a test compares them.

Labels are bounded: tiers, models and pools are rows of the catalog and capped, `gpu` is a worker that lives, everything
else is of a closed list. Customers are never a label.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is for people; it is in the name as well where it is not a plain count."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    meaning: str


COUNTED: tuple[Metric, ...] = (
    Metric(
        "tierlane_requests_total",
        "counter",
        ("tier", "endpoint", "outcome"),
        "requests",
        "Calls of customers by how they ended: completed, accepted (a job), cancelled, or an error code. A list of inputs "
        "is one call. The tier is unknown where the key is.",
    ),
    Metric(
        "tierlane_request_duration_seconds",
        "histogram",
        ("tier",),
        "seconds",
        "From a call's arrival to its complete answer, of those that were completed.",
    ),
    Metric(
        "tierlane_queue_wait_seconds",
        "histogram",
        ("tier",),
        "seconds",
        "Time in the tier queue until a batch was formed, of completed requests.",
    ),
    Metric(
        "tierlane_inference_duration_seconds",
        "histogram",
        ("pool", "model"),
        "seconds",
        "Run of the batch that a completed request was in; each request counts once.",
    ),
    Metric(
        "tierlane_batch_size",
        "histogram",
        ("pool", "model"),
        "requests",
        "Sizes of batches, as told by their answers: each completed request of a batch of n counts 1/n of a batch.",
    ),
    Metric(
        "tierlane_batch_fill_ratio",
        "histogram",
        ("pool", "model"),
        "ratio",
        "Size of a batch as a part of the model's max_batch_size, counted as tierlane_batch_size is.",
    ),
    Metric(
        "tierlane_shed_total",
        "counter",
        ("tier", "reason"),
        "requests",
        "Calls refused for want of capacity, by error code.",
    ),
    Metric(
        "tierlane_rate_limited_total",
        "counter",
        ("tier", "scope"),
        "requests",
        "Calls refused by a limit of the customer's own: key_limit, customer_limit, token_limit, concurrency or quota.",
    ),
    Metric(
        "tierlane_deadline_exceeded_total",
        "counter",
        ("tier", "stage"),
        "requests",
        "Calls that ran out of time: in the queue, on the gpu, or over all (total).",
    ),
    Metric(
        "tierlane_retries_total",
        "counter",
        ("layer",),
        "retries",
        "Requests that were run again (batch), as told by their answers, and requests submitted again to a Redis that may "
        "have lost them (redis).",
    ),
    Metric(
        "tierlane_client_retry_requests_total",
        "counter",
        ("tier",),
        "requests",
        "Requests whose client says that it tried them before.",
    ),
    Metric(
        "tierlane_redis_call_seconds",
        "histogram",
        ("op",),
        "seconds",
        "Calls on Redis that were answered: admit (many requests at once), beat, observe.",
    ),
)
"""Summed over the gateways of the host."""

SEEN: tuple[Metric, ...] = (
    Metric("tierlane_queue_depth", "gauge", ("pool", "tier"), "requests", "Requests that wait in the tier queue."),
    Metric(
        "tierlane_queue_oldest_age_seconds",
        "gauge",
        ("pool", "tier"),
        "seconds",
        "How long the oldest request of the tier queue has waited.",
    ),
    Metric("tierlane_inflight_requests", "gauge", ("pool", "gpu"), "requests", "Requests that a worker has claimed."),
    Metric(
        "tierlane_effective_limit_ratio",
        "gauge",
        ("pool", "tier"),
        "ratio",
        "Part of its base limits that each customer of the tier has now.",
    ),
    Metric(
        "tierlane_capacity_requests_per_second",
        "gauge",
        ("pool",),
        "requests/s",
        "What the healthy GPUs are held to serve.",
    ),
    Metric(
        "tierlane_demand_requests_per_second",
        "gauge",
        ("pool", "tier"),
        "requests/s",
        "What the base limits would let through, over all gateways.",
    ),
    Metric("tierlane_workers", "gauge", ("pool", "state"), "workers", "Workers by what they say of themselves."),
    Metric(
        "tierlane_recommended_workers",
        "gauge",
        ("pool",),
        "workers",
        "How many workers the pool should have, as /internal/autoscale says.",
    ),
    Metric("tierlane_gpu_healthy", "gauge", ("pool", "gpu"), "0 or 1", "Whether the worker counts as healthy."),
    Metric("tierlane_gpu_utilization_ratio", "gauge", ("pool", "gpu"), "ratio", "How busy the worker's model is."),
    Metric(
        "tierlane_gpu_memory_bytes",
        "gauge",
        ("pool", "gpu"),
        "bytes",
        "Memory of the worker's GPU in use, where a driver tells it.",
    ),
    Metric("tierlane_gateways", "gauge", ("pool",), "gateways", "Gateways that beat."),
    Metric("tierlane_dlq_size", "gauge", ("pool",), "requests", "Dead letters that wait in Redis for the auditor."),
    Metric(
        "tierlane_audit_pending_records",
        "gauge",
        ("pool",),
        "entries",
        "Entries in the audit outbox; one entry holds the records of one admission call or batch.",
    ),
    Metric(
        "tierlane_audit_lag_seconds",
        "gauge",
        ("pool",),
        "seconds",
        "Age of the oldest audit entry that is not in PostgreSQL.",
    ),
    Metric("tierlane_redis_memory_ratio", "gauge", ("pool",), "ratio", "Part of its memory limit that Redis uses."),
    Metric(
        "tierlane_look_age_seconds",
        "gauge",
        ("pool",),
        "seconds",
        "Age of this gateway's last look at the pool. Over 10 s what that look showed is left out.",
    ),
    Metric(
        "tierlane_circuit_state",
        "gauge",
        ("pool", "target"),
        "0, 1, 2",
        "This gateway's circuit breaker: 0 closed, 1 half open, 2 open.",
    ),
    Metric(
        "tierlane_metrics_directory_usable",
        "gauge",
        (),
        "0 or 1",
        "0: the counters are this gateway's alone, since the common directory cannot be used.",
    ),
    Metric("tierlane_metrics_processes", "gauge", (), "processes", "Gateways of this host whose counters are summed."),
    Metric("tierlane_build_info", "gauge", ("version",), "1", "The version of this gateway."),
)
"""Told by the gateway that answers, of what it last saw: all gateways of a fleet say the same, so take the max, not the sum."""

METRICS = COUNTED + SEEN
