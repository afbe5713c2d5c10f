"""Metrics: what the counters count, and the page for Prometheus."""

import re
from math import inf
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.circuit_breaker import BreakerState
from gateway.limits.rejections import OWN_LIMITS
from gateway.metrics.counters import BATCHES, BOUNDS_US, MAX_MODELS, MAX_TIERS, MAX_TOKEN_SERIES, Counters, Series
from gateway.metrics.definitions import METRICS
from gateway.metrics.exposition import exposition
from gateway.metrics.gauges import BREAKER_VALUES, STALE_S, WORKER_STATES, PoolFigures, gauges
from gateway.wiring import API_FORMATS
from metrics_figures import read, reply, value
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.protocol.pool_view import GpuReading, Observation, TierDepth, WorkerView
from scheduler.states import Admission

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/inference"
SHED, LIMITED, LATE = "tierlane_shed_total", "tierlane_rate_limited_total", "tierlane_deadline_exceeded_total"
NO_BASE_UNITS = re.compile(
    r"(milli|micro|nano)seconds|minutes|hours|days|_(ms|us|ns|s|kb|mb|gb)(_|$)|percent|kilobytes|megabytes"
)


@pytest.mark.parametrize(
    ("code", "outcome", "expected"),
    [
        (ErrorCode.SHED_FOR_PRIORITY, Admission.SHED, {(SHED, "shed_for_priority")}),
        (ErrorCode.REDUCED_CAPACITY, Admission.CUSTOMER_LIMIT, {(SHED, "reduced_capacity")}),
        (ErrorCode.QUOTA_EXCEEDED, Admission.QUOTA, {(LIMITED, "quota")}),
        *((ErrorCode.RATE_LIMIT_EXCEEDED, outcome, {(LIMITED, outcome.value)}) for outcome in sorted(OWN_LIMITS)),
        (ErrorCode.RATE_LIMIT_EXCEEDED, None, set()),
        (ErrorCode.QUEUE_TIMEOUT, Admission.ACCEPTED, {(LATE, "queue")}),
        (ErrorCode.GPU_TIMEOUT, Admission.ACCEPTED, {(LATE, "gpu")}),
        (ErrorCode.DEADLINE_EXCEEDED, Admission.TOO_LATE, {(LATE, "total")}),
        (ErrorCode.POISON_REQUEST, Admission.ACCEPTED, set()),
    ],
)
def test_a_failed_request_is_counted_by_its_code(
    code: ErrorCode, outcome: Admission | None, expected: set[tuple[str, str]]
) -> None:
    """And as shed, limited or late, where it is one of them."""
    counters = Counters()
    counters.failed("free", PATH, code, None if outcome is None else Verdict(outcome))

    counted = {key: numbers for key, numbers in counters.series().items() if len(numbers) == 1 and numbers[0]}
    assert counted[("tierlane_requests_total", "free", PATH, code.value)] == [1]
    assert {(key[0], key[2]) for key in counted if len(key) == 3} == expected


@pytest.mark.parametrize(("seconds", "bucket"), [(-1.0, 0), (0.001, 0), (0.0011, 1), (0.05, 5), (61.0, 18)])
def test_a_duration_is_counted_in_the_bucket_up_to_its_bound(seconds: float, bucket: int) -> None:
    """A bound belongs to its bucket; longer durations have a bucket of their own."""
    counters = Counters()
    counters.completed("free", PATH, seconds)

    *counts, total_us = counters.series()[("tierlane_request_duration_seconds", "free")]
    assert [place for place, count in enumerate(counts) if count] == [bucket]
    assert (total_us, len(counts)) == (max(0, int(seconds * 1e6)), len(BOUNDS_US) + 1)


def test_a_run_is_counted_by_its_reply() -> None:
    """Queue wait, run time, batch size beside the full size, and retries. A cached response had no run."""
    counters = Counters()
    counters.ran("paid", PATH, "default", "tiny", reply())
    counters.full_batches({("default", "tiny"): 8, ("default", "other"): 2})
    counters.ran("paid", PATH, "default", "tiny", reply(attempts=3))
    counters.ran("paid", PATH, "default", "tiny", reply(served_from="cache"))

    series = counters.series()
    assert [series[(BATCHES, "default", "tiny", full, "4")] for full in ("0", "8")] == [[1], [1]]
    assert series[("tierlane_queue_wait_seconds", "paid")][-1] == 40_000
    assert series[("tierlane_inference_duration_seconds", "default", "tiny")][-1] == 100_000
    assert series[("tierlane_retries_total", "batch")] == [2]


def test_tokens_and_the_pace_of_streams_are_counted_by_tier_model_and_endpoint() -> None:
    """Five tokens in 0.5 s: the first after 0.1 s, the others 0.1 s apart. A cached reply is not counted."""
    counters = Counters()
    streamed = reply(tokens_used=12, output_tokens=5)
    counters.ran("paid", PATH, "default", "tiny", streamed)
    counters.streamed("paid", PATH, "tiny", streamed, first_s=0.1, seconds=0.5)
    counters.streamed("paid", PATH, "tiny", reply(output_tokens=1), first_s=0.1, seconds=0.1)
    counters.ran("paid", PATH, "default", "tiny", reply(served_from="cache"))
    counters.streamed("paid", PATH, "tiny", reply(output_tokens=5), first_s=0.1, seconds=0.1)  # All text at once.
    counters.streamed("paid", PATH, "tiny", reply(served_from="cache"), first_s=0.001, seconds=0.001)

    series, labels = counters.series(), ("paid", "tiny", PATH)
    firsts, paces = (
        series[(f"tierlane_time_{name}_seconds", *labels)] for name in ("to_first_token", "per_output_token")
    )
    assert (sum(firsts[:-1]), firsts[-1], sum(paces[:-1]), paces[-1]) == (3, 300_000, 1, 100_000)
    assert [series[(f"tierlane_{name}_tokens_total", *labels)] for name in ("input", "output")] == [[7], [5]]


def test_the_number_of_label_values_is_bounded() -> None:
    """Further tiers and models are counted as `other`."""
    counters = Counters()
    for number in range(100):
        counters.ended(f"tier-{number}", PATH, "completed")
        for tier in ("tier-0", "tier-1", "tier-2"):
            counters.ran(tier, PATH, "default", f"model-{number}", reply())

    series = counters.series()
    assert len([key for key in series if key[0] == "tierlane_input_tokens_total"]) == MAX_TOKEN_SERIES + 1
    tiers = {key[1]: numbers[0] for key, numbers in series.items() if key[0] == "tierlane_requests_total"}
    models = {key[2] for key in series if key[0] == "tierlane_inference_duration_seconds"}
    assert (len(tiers), tiers["other"], len(models)) == (MAX_TIERS + 1, 100 - MAX_TIERS, MAX_MODELS + 1)


def all_counters() -> Series:
    """A value of every metric that is counted."""
    counters = Counters()
    counters.completed("free", PATH, 0.2)
    counters.ran("free", PATH, "default", "tiny", reply())
    counters.full_batches({("default", "tiny"): 8})
    counters.ran("free", PATH, "default", "tiny", reply())
    counters.streamed("free", PATH, "tiny", reply(output_tokens=3), first_s=0.1, seconds=0.2)
    counters.failed("free", PATH, ErrorCode.QUEUE_FULL)
    counters.failed("free", PATH, ErrorCode.QUEUE_TIMEOUT)
    counters.retried("free")
    counters.quota_alert("free", 0.85)
    counters.called("admit", 0.001)
    return counters.series() | {(LIMITED, "free", "quota"): [1]}


def figures(age_s: float | None = 0.1, *, observed: bool = True) -> PoolFigures:
    """A pool with one tier, two workers and an open circuit breaker."""
    gpu = GpuReading(0.5, 1024, 2048, 50, 0)
    workers = [
        WorkerView("w1", "busy", 0.5, 3, 100.0, 50.0, "simulated", "v1", age_ms=10.0, healthy=True, gpu=gpu, slots=64),
        WorkerView("w2", "thinking", 0.5, 3, 100.0, 50.0, "simulated", "v1", age_ms=10.0, healthy=False),
    ]
    observation = Observation(
        1,
        {"free": TierDepth("free", 7, 1500.0)},
        workers,
        [],
        0,
        0,
        12,
        3,
        background={"free": TierDepth("free.background", 4, 9.0)},
    )
    return PoolFigures(
        pool="default",
        observation=observation if observed else None,
        age_s=age_s,
        capacity_rps=310.0,
        factors={"free": 0.38},
        demand={"free": 480.0},
        fairness={"free": 0.98},
        memory_share=0.25,
        audit_lag_ms=400,
        recommended_workers=5,
        breakers={"redis": "open"},
    )


def page() -> bytes:
    own = [
        ("tierlane_catalog_age_seconds", (), inf),
        ("tierlane_objective_duration_seconds", ("free",), 4.0),
        ("tierlane_objective_success_ratio", ("free",), 0.95),
        ("tierlane_open_batches", (), 1.0),
        ("tierlane_open_batch_lines", (), 7.0),
        ("tierlane_metrics_directory_usable", (), 1.0),
        ("tierlane_metrics_processes", (), 2.0),
        ("tierlane_build_info", ("1",), 1.0),
    ]
    return exposition(all_counters(), [*gauges(figures()), *own])


def test_the_page_follows_the_conventions_of_prometheus() -> None:
    """As `promtool check metrics`: HELP and TYPE once, suffixes by type, base units. Each metric has its labels."""
    text = page().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.endswith("\n")
    assert re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE) == [(metric.name, metric.kind) for metric in METRICS]
    assert re.findall(r"^# HELP (\S+) \S.*$", text, re.MULTILINE) == [metric.name for metric in METRICS]
    assert len(families) == len(METRICS)
    for metric in METRICS:
        samples = families[metric.name.removesuffix("_total")].samples
        assert {frozenset(sample.labels) - {"le"} for sample in samples} == {frozenset(metric.labels)}, metric.name
        assert re.fullmatch(r"tierlane_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
        assert not re.search(r"counter|gauge|histogram|summary", metric.name)
        assert not NO_BASE_UNITS.search(metric.name)
        assert metric.unit not in ("seconds", "bytes", "ratio") or metric.name.endswith(f"_{metric.unit}")


def test_durations_become_cumulative_buckets() -> None:
    """In seconds; the sum is exact to the microsecond."""
    text, name = page(), "tierlane_request_duration_seconds"

    assert [value(text, f"{name}_bucket", tier="free", le=le) for le in ("0.15", "0.25", "+Inf")] == [0, 1, 1]
    assert value(text, f"{name}_sum", tier="free") == 0.2
    assert (
        len({dict(labels)["le"] for sample, labels in read(text) if sample == f"{name}_bucket"}) == len(BOUNDS_US) + 1
    )


def test_batches_are_counted_by_their_requests() -> None:
    """Eight requests of batches of four are two batches; the fill ratio needs a known full size."""
    series: Series = {(BATCHES, "default", "tiny", "8", "4"): [8], (BATCHES, "default", "tiny", "0", "2"): [1]}
    text, labels = exposition(series, []), {"pool": "default", "model": "tiny"}

    assert [value(text, f"tierlane_batch_size_{kind}", **labels) for kind in ("count", "sum")] == [2.5, 9]
    assert value(text, "tierlane_batch_size_bucket", le="2.0", **labels) == 0.5
    assert [value(text, f"tierlane_batch_fill_ratio_{kind}", **labels) for kind in ("count", "sum")] == [2, 1]
    assert value(text, "tierlane_batch_fill_ratio_bucket", le="0.5", **labels) == 2


def test_gauges_of_the_observation() -> None:
    """Value by value."""
    text = page()
    expected = [
        ("queue_depth", {"tier": "free"}, 7),
        ("queue_oldest_age_seconds", {"tier": "free"}, 1.5),
        ("gpu_healthy", {"gpu": "w2"}, 0),
        ("gpu_memory_bytes", {"gpu": "w1"}, 1024 << 20),
        ("workers", {"state": "busy"}, 1),
        ("workers", {"state": "unknown"}, 1),
        ("audit_pending_records", {}, 12),
        ("audit_lag_seconds", {}, 0.4),
        ("dlq_size", {}, 3),
        ("circuit_state", {"target": "redis"}, 2),
        ("effective_limit_ratio", {"tier": "free"}, 0.38),
    ]

    for name, labels, number in expected:
        assert value(text, f"tierlane_{name}", pool="default", **labels) == number, name


@pytest.mark.parametrize(
    ("age_s", "observed", "shown"), [(0.1, True, True), (STALE_S + 1, True, False), (None, False, False)]
)
def test_a_stale_observation_is_not_shown(age_s: float | None, observed: bool, shown: bool) -> None:
    """Capacity and effective limits are those of now, and always shown."""
    names = {name for name, *_ in gauges(figures(age_s, observed=observed))}

    assert ("tierlane_queue_depth" in names, "tierlane_workers" in names) == (shown, shown)
    assert ("tierlane_look_age_seconds" in names) is (age_s is not None)
    assert {"tierlane_capacity_requests_per_second", "tierlane_effective_limit_ratio"} <= names


def test_label_values_are_complete() -> None:
    """States of circuit breakers and workers; the label `endpoint` is the path of the request."""
    source = (ROOT / "scheduler" / "protocol" / "pool_view.py").read_text("utf-8")
    states = re.search(r"status: str  # (.*)", source)

    assert set(BREAKER_VALUES) == set(BreakerState)
    assert states is not None
    assert set(WORKER_STATES) == {*states[1].split(" | "), "unknown"}
    assert all(path == api_format.endpoint for path, api_format in API_FORMATS.items())
