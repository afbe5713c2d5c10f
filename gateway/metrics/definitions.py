"""Every metric: name, type, labels, unit and description. `python -m gateway.metrics` writes docs/metrics.md from it.

Labels are bounded: tiers, models and pools are rows of the catalog and capped, `gpu` is a live worker, all others have a
fixed set of values. Customers are never a label.
"""

from dataclasses import dataclass
from typing import Literal

from ratelimit.limits import BUCKETS

UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_ratio": "ratio", "_requests_per_second": "requests/s"}
"""Suffix of a metric's name -> unit."""

TIER, POOL, POOL_TIER, POOL_GPU, POOL_MODEL, TOKENS = (
    ("tier",),
    ("pool",),
    ("pool", "tier"),
    ("pool", "gpu"),
    ("pool", "model"),
    ("tier", "model", "endpoint"),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `values` is what it counts, or its possible values, where its name has no unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    description: str
    values: str = "requests"

    @property
    def unit(self) -> str:
        """The unit, for the documentation."""
        return next((unit for suffix, unit in UNITS.items() if self.name.endswith(suffix)), self.values)


COUNTED = (
    Metric(
        "tierlane_requests_total",
        "counter",
        ("tier", "endpoint", "outcome"),
        "HTTP requests by outcome: completed, accepted (a job), cancelled, or an error code. A list of inputs is one request.",
    ),
    Metric(
        "tierlane_request_duration_seconds",
        "histogram",
        TIER,
        "Arrival to complete response, of completed requests.",
    ),
    Metric("tierlane_queue_wait_seconds", "histogram", TIER, "Time in the tier queue, of completed requests."),
    Metric(
        "tierlane_time_to_first_token_seconds",
        "histogram",
        TOKENS,
        "Arrival to the first text, of completed streams.",
    ),
    Metric(
        "tierlane_time_per_output_token_seconds",
        "histogram",
        TOKENS,
        "Mean time between two tokens after the first text, of completed streams of two tokens or more that came in several parts.",
    ),
    Metric(
        "tierlane_input_tokens_total",
        "counter",
        TOKENS,
        "Tokens of the inputs of completed requests, as charged. Without cached and shared results, jobs and batches.",
        "tokens",
    ),
    Metric("tierlane_output_tokens_total", "counter", TOKENS, "Tokens of the outputs of the same requests.", "tokens"),
    Metric(
        "tierlane_inference_duration_seconds",
        "histogram",
        POOL_MODEL,
        "Run time of the batch, once per completed request.",
    ),
    Metric(
        "tierlane_batch_size",
        "histogram",
        POOL_MODEL,
        "Batch sizes: each completed request of a batch of n counts as 1/n.",
    ),
    Metric(
        "tierlane_batch_fill_ratio",
        "histogram",
        POOL_MODEL,
        "Batch size / max_batch_size, counted likewise.",
    ),
    Metric(
        "tierlane_shed_total", "counter", ("tier", "reason"), "Requests rejected for lack of capacity, by error code."
    ),
    Metric(
        "tierlane_rate_limited_total",
        "counter",
        ("tier", "scope"),
        f"Requests rejected by a limit of the customer: key_limit, {', '.join(kind.outcome for kind in BUCKETS)}, "
        "concurrency, quota, or auxiliary_limit (requests that run no model).",
    ),
    Metric(
        "tierlane_deadline_exceeded_total",
        "counter",
        ("tier", "stage"),
        "Requests that exceeded a deadline: in the queue, on the gpu, or in total.",
    ),
    Metric(
        "tierlane_retries_total",
        "counter",
        ("layer",),
        "Repeated runs (batch), from responses, and requests resubmitted after a loss of Redis data (redis).",
        "retries",
    ),
    Metric("tierlane_client_retry_requests_total", "counter", TIER, "Requests that the client marked as a retry."),
    Metric(
        "tierlane_batch_lines_total",
        "counter",
        ("outcome",),
        "Lines of batches that ended in the output file (completed) or in the error file (failed).",
        "lines",
    ),
    Metric(
        "tierlane_redis_call_seconds",
        "histogram",
        ("op",),
        "Duration of successful Redis calls: admit (many requests per call), beat, observe.",
    ),
)
"""Summed over the gateways of the host."""

OBSERVED = (
    Metric("tierlane_queue_depth", "gauge", POOL_TIER, "Requests in the tier queue."),
    Metric("tierlane_queue_oldest_age_seconds", "gauge", POOL_TIER, "Age of the oldest request in the tier queue."),
    Metric("tierlane_background_depth", "gauge", POOL_TIER, "Jobs in the background queue of the tier."),
    Metric(
        "tierlane_fairness_ratio",
        "gauge",
        POOL_TIER,
        "Jain's index of GPU time per weight in the last minute, of the customers that could have used more: 1 if equal.",
    ),
    Metric("tierlane_inflight_requests", "gauge", POOL_GPU, "Requests claimed by the worker."),
    Metric(
        "tierlane_effective_limit_ratio", "gauge", POOL_TIER, "Effective limits divided by the customer's base limits."
    ),
    Metric("tierlane_capacity_requests_per_second", "gauge", POOL, "Estimated capacity of the healthy GPUs."),
    Metric(
        "tierlane_demand_requests_per_second", "gauge", POOL_TIER, "Demand within the base limits, over all gateways."
    ),
    Metric("tierlane_workers", "gauge", ("pool", "state"), "Workers by their reported state.", "workers"),
    Metric("tierlane_recommended_workers", "gauge", POOL, "Recommended workers, as in /internal/autoscale.", "workers"),
    Metric("tierlane_gpu_healthy", "gauge", POOL_GPU, "Whether the worker is healthy.", "0 or 1"),
    Metric("tierlane_gpu_utilization_ratio", "gauge", POOL_GPU, "Share of time that the worker's model is running."),
    Metric(
        "tierlane_worker_slots",
        "gauge",
        POOL_GPU,
        "Requests that may run at a time, for workers with slots; those that run: tierlane_inflight_requests.",
        "requests",
    ),
    Metric(
        "tierlane_gpu_memory_bytes", "gauge", POOL_GPU, "Used memory of the worker's GPU, if the driver reports it."
    ),
    Metric("tierlane_gateways", "gauge", POOL, "Live gateways.", "gateways"),
    Metric("tierlane_dlq_size", "gauge", POOL, "Dead letters in Redis that the auditor has not stored yet."),
    Metric(
        "tierlane_audit_pending_records",
        "gauge",
        POOL,
        "Entries in the audit outbox, each of an admission call or batch.",
        "entries",
    ),
    Metric("tierlane_audit_lag_seconds", "gauge", POOL, "Age of the oldest audit entry that is not in PostgreSQL."),
    Metric(
        "tierlane_catalog_age_seconds",
        "gauge",
        (),
        "Time since this gateway last knew its catalog to be the newest; +Inf: never. Keys are accepted for 900 s without PostgreSQL.",
    ),
    Metric("tierlane_objective_duration_seconds", "gauge", TIER, "`slo_ms` of the tier, for the p95 of its responses."),
    Metric(
        "tierlane_objective_success_ratio",
        "gauge",
        TIER,
        "`slo_success` of the tier. Tiers without an objective have no sample.",
    ),
    Metric("tierlane_open_batches", "gauge", (), "Batches of /v1/batches that have not ended.", "batches"),
    Metric(
        "tierlane_open_batch_lines",
        "gauge",
        (),
        "Lines of them that have not ended, once the file was checked.",
        "lines",
    ),
    Metric("tierlane_redis_memory_ratio", "gauge", POOL, "Used memory of Redis divided by its limit."),
    Metric(
        "tierlane_look_age_seconds",
        "gauge",
        POOL,
        "Age of this gateway's last observation of the pool.",
    ),
    Metric(
        "tierlane_circuit_state",
        "gauge",
        ("pool", "target"),
        "This gateway's circuit breaker: 0 closed, 1 half open, 2 open.",
        "0, 1, 2",
    ),
    Metric(
        "tierlane_metrics_directory_usable",
        "gauge",
        (),
        "0: the counters are those of this gateway only.",
        "0 or 1",
    ),
    Metric("tierlane_metrics_processes", "gauge", (), "Gateways of this host whose counters are summed.", "gateways"),
    Metric("tierlane_build_info", "gauge", ("version",), "The version of this gateway.", "1"),
)
"""The last observation of the gateway that responds. All gateways report the same: use the maximum, not the sum."""

METRICS = COUNTED + OBSERVED
