"""Every metric: name, type, labels, unit and description. `python -m gateway.metrics` writes docs/metrics.md from it.

Labels are bounded: tiers, models and pools are rows of the catalog and capped, `gpu` is a live worker, all others have a
fixed set of values. Customers are never a label.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

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


@dataclass(frozen=True)
class Metric:
    """One metric. `values` is what it counts, or its possible values, where its name has no unit."""

    kind: ClassVar[Literal["counter", "gauge", "histogram"]]
    name: str
    labels: tuple[str, ...]
    description: str
    values: str = "requests"

    @property
    def unit(self) -> str:
        """The unit, for the documentation."""
        return next((unit for suffix, unit in UNITS.items() if self.name.endswith(suffix)), self.values)


class CounterMetric(Metric):
    """A number that only rises."""

    kind = "counter"


class GaugeMetric(Metric):
    """An observed value."""

    kind = "gauge"


class HistogramMetric(Metric):
    """Values counted by the buckets that they fall into."""

    kind = "histogram"


COUNTED: tuple[Metric, ...] = (
    CounterMetric(
        "tierlane_requests_total",
        ("tier", "endpoint", "outcome"),
        "HTTP requests by outcome: completed, accepted (a job), cancelled, or an error code. A list of inputs is one request.",
    ),
    HistogramMetric(
        "tierlane_request_duration_seconds",
        TIER,
        "Arrival to complete response, of completed requests.",
    ),
    HistogramMetric("tierlane_queue_wait_seconds", TIER, "Time in the tier queue, of completed requests."),
    HistogramMetric(
        "tierlane_time_to_first_token_seconds",
        TOKENS,
        "Arrival to the first text, of completed streams.",
    ),
    HistogramMetric(
        "tierlane_time_per_output_token_seconds",
        TOKENS,
        "Mean time between two tokens after the first text, of completed streams of two tokens or more that came in several parts.",
    ),
    CounterMetric(
        "tierlane_input_tokens_total",
        TOKENS,
        "Tokens of the inputs of completed requests, as charged. Without cached and shared results, jobs and batches.",
        "tokens",
    ),
    CounterMetric("tierlane_output_tokens_total", TOKENS, "Tokens of the outputs of the same requests.", "tokens"),
    HistogramMetric(
        "tierlane_inference_duration_seconds",
        POOL_MODEL,
        "Run time of the batch, once per completed request.",
    ),
    HistogramMetric(
        "tierlane_batch_size",
        POOL_MODEL,
        "Batch sizes: each completed request of a batch of n counts as 1/n.",
    ),
    HistogramMetric(
        "tierlane_batch_fill_ratio",
        POOL_MODEL,
        "Batch size / max_batch_size, counted likewise.",
    ),
    CounterMetric("tierlane_shed_total", ("tier", "reason"), "Requests rejected for lack of capacity, by error code."),
    CounterMetric(
        "tierlane_rate_limited_total",
        ("tier", "scope"),
        f"Requests rejected by a limit of the customer: key_limit, {', '.join(kind.outcome for kind in BUCKETS)}, "
        "concurrency, quota, or auxiliary_limit (requests that run no model).",
    ),
    CounterMetric(
        "tierlane_deadline_exceeded_total",
        ("tier", "stage"),
        "Requests that exceeded a deadline: in the queue, on the gpu, or in total.",
    ),
    CounterMetric(
        "tierlane_retries_total",
        ("layer",),
        "Repeated runs (batch), from responses, and requests resubmitted after a loss of Redis data (redis).",
        "retries",
    ),
    CounterMetric("tierlane_client_retry_requests_total", TIER, "Requests that the client marked as a retry."),
    CounterMetric(
        "tierlane_quota_alerts_total",
        ("tier", "share"),
        "Shares of quotas that customers reached, rounded down to tenths; each once in a period.",
        "alerts",
    ),
    CounterMetric(
        "tierlane_batch_lines_total",
        ("outcome",),
        "Lines of batches that ended in the output file (completed) or in the error file (failed).",
        "lines",
    ),
    HistogramMetric(
        "tierlane_redis_call_seconds",
        ("op",),
        "Duration of successful Redis calls: admit (many requests per call), beat, observe.",
    ),
)
"""Summed over the gateways of the host."""

OBSERVED: tuple[Metric, ...] = (
    GaugeMetric("tierlane_queue_depth", POOL_TIER, "Requests in the tier queue."),
    GaugeMetric("tierlane_queue_oldest_age_seconds", POOL_TIER, "Age of the oldest request in the tier queue."),
    GaugeMetric("tierlane_background_depth", POOL_TIER, "Jobs in the background queue of the tier."),
    GaugeMetric(
        "tierlane_fairness_ratio",
        POOL_TIER,
        "Jain's index of GPU time per weight in the last minute, of the customers that could have used more: 1 if equal.",
    ),
    GaugeMetric("tierlane_inflight_requests", POOL_GPU, "Requests claimed by the worker."),
    GaugeMetric("tierlane_effective_limit_ratio", POOL_TIER, "Effective limits divided by the customer's base limits."),
    GaugeMetric("tierlane_capacity_requests_per_second", POOL, "Estimated capacity of the healthy GPUs."),
    GaugeMetric("tierlane_demand_requests_per_second", POOL_TIER, "Demand within the base limits, over all gateways."),
    GaugeMetric("tierlane_workers", ("pool", "state"), "Workers by their reported state.", "workers"),
    GaugeMetric("tierlane_recommended_workers", POOL, "Recommended workers, as in /internal/autoscale.", "workers"),
    GaugeMetric("tierlane_gpu_healthy", POOL_GPU, "Whether the worker is healthy.", "0 or 1"),
    GaugeMetric("tierlane_gpu_utilization_ratio", POOL_GPU, "Share of time that the worker's model is running."),
    GaugeMetric(
        "tierlane_worker_slots",
        POOL_GPU,
        "Requests that may run at a time, for workers with slots; those that run: tierlane_inflight_requests.",
        "requests",
    ),
    GaugeMetric("tierlane_gpu_memory_bytes", POOL_GPU, "Used memory of the worker's GPU, if the driver reports it."),
    GaugeMetric("tierlane_gateways", POOL, "Live gateways.", "gateways"),
    GaugeMetric("tierlane_dlq_size", POOL, "Dead letters in Redis that the auditor has not stored yet."),
    GaugeMetric(
        "tierlane_audit_pending_records",
        POOL,
        "Entries in the audit outbox, each of an admission call or batch.",
        "entries",
    ),
    GaugeMetric("tierlane_audit_lag_seconds", POOL, "Age of the oldest audit entry that is not in PostgreSQL."),
    GaugeMetric(
        "tierlane_catalog_age_seconds",
        (),
        "Time since this gateway last knew its catalog to be the newest; +Inf: never. Keys are accepted for 900 s without PostgreSQL.",
    ),
    GaugeMetric("tierlane_objective_duration_seconds", TIER, "`slo_ms` of the tier, for the p95 of its responses."),
    GaugeMetric(
        "tierlane_objective_success_ratio",
        TIER,
        "`slo_success` of the tier. Tiers without an objective have no sample.",
    ),
    GaugeMetric("tierlane_open_batches", (), "Batches of /v1/batches that have not ended.", "batches"),
    GaugeMetric(
        "tierlane_open_batch_lines",
        (),
        "Lines of them that have not ended, once the file was checked.",
        "lines",
    ),
    GaugeMetric("tierlane_redis_memory_ratio", POOL, "Used memory of Redis divided by its limit."),
    GaugeMetric(
        "tierlane_look_age_seconds",
        POOL,
        "Age of this gateway's last observation of the pool.",
    ),
    GaugeMetric(
        "tierlane_circuit_state",
        ("pool", "target"),
        "This gateway's circuit breaker: 0 closed, 1 half open, 2 open.",
        "0, 1, 2",
    ),
    GaugeMetric(
        "tierlane_metrics_directory_usable",
        (),
        "0: the counters are those of this gateway only.",
        "0 or 1",
    ),
    GaugeMetric("tierlane_metrics_processes", (), "Gateways of this host whose counters are summed.", "gateways"),
    GaugeMetric("tierlane_build_info", ("version",), "The version of this gateway.", "1"),
)
"""The last observation of the gateway that responds. All gateways report the same: use the maximum, not the sum."""

METRICS = COUNTED + OBSERVED
