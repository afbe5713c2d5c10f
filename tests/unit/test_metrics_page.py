"""The page for Prometheus: what its linter asks for, what the figures become, and that docs/metrics.md is the registry."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.circuit_breaker import BreakerState
from gateway.metrics.counters import BATCHES, BOUNDS_US, Counters, Series
from gateway.metrics.definitions import COUNTED, METRICS, OBSERVED, Metric
from gateway.metrics.endpoint import CIRCUIT, STALE_S, STATES, PoolFigures, exposition, gauges
from gateway.wiring import API_FORMATS
from metrics_figures import read, reply, value
from scheduler.errors import ErrorCode
from scheduler.protocol.pool_view import GpuReading, Observation, TierDepth, WorkerView

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NO_BASE_UNITS = re.compile(
    r"(milli|micro|nano)seconds|minutes|hours|days|_(ms|us|ns|s|kb|mb|gb)(_|$)|percent|kilobytes|megabytes"
)


def full_tally() -> Series:
    """Something of every metric that is counted."""
    counters = Counters()
    counters.completed("free", "/v1/inference", 0.2)
    counters.ran("free", "default", "tiny", reply())
    counters.full_batches({("default", "tiny"): 8})
    counters.ran("free", "default", "tiny", reply())
    counters.failed("free", "/v1/inference", ErrorCode.QUEUE_FULL)
    counters.failed("free", "/v1/inference", ErrorCode.QUEUE_TIMEOUT)
    counters.retried("free")
    counters.called("admit", 0.001)
    return counters.series() | {("tierlane_rate_limited_total", "free", "quota"): [1]}


def worker(worker_id: str, status: str, *, healthy: bool, gpu: GpuReading | None = None) -> WorkerView:
    return WorkerView(worker_id, status, 0.5, 3, 10.0, healthy, 100.0, 50.0, "simulated", "v1", gpu=gpu)


def look(age_s: float | None = 0.1, *, seen: bool = True) -> PoolFigures:
    """A pool with one tier, two workers and an open breaker."""
    workers = [
        worker("w1", "busy", healthy=True, gpu=GpuReading(0.5, 1024, 2048, 50, 0)),
        worker("w2", "thinking", healthy=False),
    ]
    observation = Observation(1, {"free": TierDepth("free", 7, 1500.0)}, workers, [], 0, 0, 12, 3)
    return PoolFigures(
        pool="default",
        observation=observation if seen else None,
        age_s=age_s,
        capacity_rps=310.0,
        factors={"free": 0.38},
        demand={"free": 480.0},
        memory_share=0.25,
        audit_lag_ms=400,
        recommended_workers=5,
        breakers={"redis": "open"},
    )


def whole_page() -> bytes:
    own = [
        ("tierlane_metrics_directory_usable", (), 1.0),
        ("tierlane_metrics_processes", (), 2.0),
        ("tierlane_build_info", ("1",), 1.0),
    ]
    return exposition(full_tally(), [*gauges(look()), *own])


def test_it_passes_the_linter() -> None:
    """What `promtool check metrics` asks for: HELP and TYPE of each once, suffixes by type, base units, plain names."""
    text = whole_page().decode()
    families = list(text_string_to_metric_families(text))
    typed = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    helped = re.findall(r"^# HELP (\S+) (\S.*)$", text, re.MULTILINE)

    assert text.endswith("\n")
    assert typed == [(metric.name, metric.kind) for metric in METRICS]
    assert [name for name, _ in helped] == [metric.name for metric in METRICS]
    assert len({family.name for family in families}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"tierlane_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
        assert not re.search(r"counter|gauge|histogram|summary", metric.name)
        assert not NO_BASE_UNITS.search(metric.name)
        assert metric.unit not in ("seconds", "bytes", "ratio") or metric.name.endswith(f"_{metric.unit}")


def test_every_metric_is_told() -> None:
    """Each has samples, with just the labels that it is said to have."""
    families = {family.name: family for family in text_string_to_metric_families(whole_page().decode())}

    for metric in METRICS:
        samples = families[metric.name.removesuffix("_total")].samples
        labels = {frozenset(sample.labels) - {"le"} for sample in samples}
        assert labels == {frozenset(metric.labels)}, metric.name


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.description} |"


def test_the_page_of_the_docs_is_the_registry() -> None:
    """The tables of docs/metrics.md have one row for each metric, in order, and no other."""
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `tierlane_")]

    assert rows == [row(metric) for metric in (*COUNTED, *OBSERVED)]


def test_times_become_cumulative_buckets_in_seconds() -> None:
    """The sum is exact to the microsecond."""
    page = whole_page()
    name = "tierlane_request_duration_seconds"

    assert value(page, f"{name}_bucket", tier="free", le="0.15") == 0
    assert value(page, f"{name}_bucket", tier="free", le="0.25") == 1
    assert value(page, f"{name}_bucket", tier="free", le="+Inf") == 1
    assert value(page, f"{name}_sum", tier="free") == 0.2
    ends = {dict(labels)["le"] for sample, labels in read(page) if sample == f"{name}_bucket"}
    assert len(ends) == len(BOUNDS_US) + 1


def test_batches_are_counted_from_their_requests() -> None:
    """Eight requests of batches of four are two batches; how full they were is told where a full one is known."""
    series: Series = {(BATCHES, "default", "tiny", "8", "4"): [8], (BATCHES, "default", "tiny", "0", "2"): [1]}
    page = exposition(series, [])
    of = {"pool": "default", "model": "tiny"}

    assert value(page, "tierlane_batch_size_count", **of) == 2.5
    assert value(page, "tierlane_batch_size_sum", **of) == 9
    assert value(page, "tierlane_batch_size_bucket", le="2.0", **of) == 0.5
    assert value(page, "tierlane_batch_fill_ratio_count", **of) == 2
    assert value(page, "tierlane_batch_fill_ratio_sum", **of) == 1
    assert value(page, "tierlane_batch_fill_ratio_bucket", le="0.5", **of) == 2


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("tierlane_queue_depth", {"pool": "default", "tier": "free"}, 7),
        ("tierlane_queue_oldest_age_seconds", {"pool": "default", "tier": "free"}, 1.5),
        ("tierlane_recommended_workers", {"pool": "default"}, 5),
        ("tierlane_gpu_healthy", {"pool": "default", "gpu": "w1"}, 1),
        ("tierlane_gpu_healthy", {"pool": "default", "gpu": "w2"}, 0),
        ("tierlane_gpu_memory_bytes", {"pool": "default", "gpu": "w1"}, 1024 << 20),
        ("tierlane_workers", {"pool": "default", "state": "busy"}, 1),
        ("tierlane_workers", {"pool": "default", "state": "unknown"}, 1),
        ("tierlane_workers", {"pool": "default", "state": "down"}, 0),
        ("tierlane_audit_pending_records", {"pool": "default"}, 12),
        ("tierlane_audit_lag_seconds", {"pool": "default"}, 0.4),
        ("tierlane_dlq_size", {"pool": "default"}, 3),
        ("tierlane_circuit_state", {"pool": "default", "target": "redis"}, 2),
        ("tierlane_effective_limit_ratio", {"pool": "default", "tier": "free"}, 0.38),
    ],
)
def test_what_was_seen_is_told(name: str, labels: dict[str, str], expected: float) -> None:
    """One look, figure by figure."""
    assert value(whole_page(), name, **labels) == expected


@pytest.mark.parametrize(
    ("age_s", "seen", "told"), [(0.1, True, True), (STALE_S + 1, True, False), (None, False, False)]
)
def test_an_old_look_is_not_told(age_s: float | None, seen: bool, told: bool) -> None:
    """No data is no data, not the last one; capacity and limits are what is in force now."""
    names = {name for name, *_ in gauges(look(age_s, seen=seen))}

    assert ("tierlane_queue_depth" in names) is told
    assert ("tierlane_workers" in names) is told
    assert ("tierlane_look_age_seconds" in names) is (age_s is not None)
    assert {"tierlane_capacity_requests_per_second", "tierlane_effective_limit_ratio"} <= names


def test_every_state_has_a_place() -> None:
    """Of breakers, and of workers as their heartbeat's comment lists them."""
    source = (PAGE.parents[1] / "scheduler" / "protocol" / "pool_view.py").read_text("utf-8")
    listed = re.search(r"status: str  # (.*)", source)

    assert set(CIRCUIT) == set(BreakerState)
    assert listed is not None
    assert set(STATES) == {*listed[1].split(" | "), "unknown"}


def test_each_door_is_counted_under_its_address() -> None:
    """The label `endpoint` is where the customer called."""
    assert {path: api_format.endpoint for path, api_format in API_FORMATS.items()} == {
        path: path for path in API_FORMATS
    }
