"""`GET /metrics` in the text format of Prometheus: counters of all gateways of this host, and observations of the pools.

A scrape writes this gateway's counters file first and then sums all files, its own included, so that no gateway returns
less than another one returned before. Files are read and written in a thread, never in the event loop. Observations that
are too old are omitted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from gateway.catalog import CatalogView
from gateway.circuit_breaker import BreakerState
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.metrics.counters import BATCHES, BOUNDS_US, Counters, Series
from gateway.metrics.definitions import COUNTED, OBSERVED, Metric
from gateway.metrics.shared_counters import SharedCounters, Sum
from ledger.batches import OpenBatches
from scheduler.protocol.pool_view import Observation, WorkerView

STALE_S = 10.0
MAX_WORKERS = 512
MEBIBYTE = 1 << 20
STATES = (
    *("starting", "ready", "busy", "paused", "away", "slow", "cordoned"),
    *("draining", "down", "quarantined", "failed", "unknown"),
)
CIRCUIT = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

Gauge = tuple[str, tuple[str, ...], float]
"""Name, values of the labels, value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """The observed values of one pool. `factors`: tier -> effective part of its limits; `demand`: requests/s.
    `fairness`: tier -> Jain's index.
    """

    pool: str
    observation: Observation | None
    age_s: float | None
    capacity_rps: float
    factors: Mapping[str, float]
    demand: Mapping[str, float]
    fairness: Mapping[str, float]
    memory_share: float
    audit_lag_ms: int | None
    recommended_workers: int
    breakers: Mapping[str, str] = field(default_factory=dict)


def gauges(figures: PoolFigures) -> Iterator[Gauge]:
    """All gauges of one pool."""
    pool = figures.pool
    yield "tierlane_capacity_requests_per_second", (pool,), figures.capacity_rps
    yield "tierlane_recommended_workers", (pool,), figures.recommended_workers
    for tier, factor in figures.factors.items():
        yield "tierlane_effective_limit_ratio", (pool, tier), factor
    for target, state in list(figures.breakers.items())[:MAX_WORKERS]:
        yield "tierlane_circuit_state", (pool, target), CIRCUIT[BreakerState(state)]
    if figures.audit_lag_ms is not None:
        yield "tierlane_audit_lag_seconds", (pool,), figures.audit_lag_ms / 1000
    if figures.age_s is None or (observation := figures.observation) is None:
        return
    yield "tierlane_look_age_seconds", (pool,), figures.age_s
    if figures.age_s > STALE_S:
        return
    yield "tierlane_redis_memory_ratio", (pool,), figures.memory_share
    for name, queue in observation.tiers.items():
        yield "tierlane_queue_depth", (pool, name), queue.depth
        yield "tierlane_queue_oldest_age_seconds", (pool, name), queue.oldest_ms / 1000
    for name, queue in observation.background.items():
        yield "tierlane_background_depth", (pool, name), queue.depth
    for name, fairness in figures.fairness.items():
        yield "tierlane_fairness_ratio", (pool, name), fairness
    for name, demand_rps in figures.demand.items():
        yield "tierlane_demand_requests_per_second", (pool, name), demand_rps
    yield "tierlane_gateways", (pool,), len(observation.gateways)
    yield "tierlane_dlq_size", (pool,), observation.dlq
    yield "tierlane_audit_pending_records", (pool,), observation.outbox
    yield from _workers(pool, observation.workers[:MAX_WORKERS])


def catalog_gauges(catalog: CatalogView) -> Iterator[Gauge]:
    """The age of the catalog, and the objectives of its tiers."""
    yield "tierlane_catalog_age_seconds", (), catalog.age_s()
    for tier in catalog.snapshot.tiers if catalog.snapshot else ():
        if tier.slo_ms is not None:
            yield "tierlane_objective_duration_seconds", (tier.name,), tier.slo_ms / 1000
        if tier.slo_success is not None:
            yield "tierlane_objective_success_ratio", (tier.name,), tier.slo_success


def _workers(pool: str, workers: list[WorkerView]) -> Iterator[Gauge]:
    counts = dict.fromkeys(STATES, 0)
    for worker in workers:
        counts[worker.status if worker.status in counts else "unknown"] += 1
        yield "tierlane_gpu_healthy", (pool, worker.id), int(worker.healthy)
        yield "tierlane_gpu_utilization_ratio", (pool, worker.id), worker.utilization
        yield "tierlane_inflight_requests", (pool, worker.id), worker.in_flight
        if worker.slots:
            yield "tierlane_worker_slots", (pool, worker.id), worker.slots
        if worker.gpu is not None:
            yield "tierlane_gpu_memory_bytes", (pool, worker.id), worker.gpu.memory_used_mb * MEBIBYTE
    for state, count in counts.items():
        yield "tierlane_workers", (pool, state), count


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILLS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = tuple(bound / 1e6 for bound in BOUNDS_US)

Histogram = tuple[tuple[str, ...], list[tuple[str, float]], float]
"""Values of the labels, cumulative counts by upper bound, sum."""


def exposition(series: Series, observed: Iterable[Gauge]) -> bytes:
    """The page. It names metrics without samples too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsPage(series, list(observed)))
    return generate_latest(registry)


class MetricsPage(Collector):
    """The metrics of one scrape."""

    def __init__(self, series: Series, observed: Sequence[Gauge]) -> None:
        self._series = series
        self._observed = observed

    def collect(self) -> Iterator[MetricFamily]:
        """One family per definition."""
        for metric in COUNTED:
            yield self._histogram(metric) if metric.kind == "histogram" else self._counter(metric)
        for metric in OBSERVED:
            family = GaugeMetricFamily(metric.name, metric.description, labels=metric.labels)
            for name, labels, value in self._observed:
                if name == metric.name:
                    family.add_metric(labels, value)
            yield family

    def _counter(self, metric: Metric) -> MetricFamily:
        family = CounterMetricFamily(metric.name, metric.description, labels=metric.labels)
        for labels, numbers in self._of(metric.name):
            family.add_metric(labels, numbers[0])
        return family

    def _histogram(self, metric: Metric) -> MetricFamily:
        family = HistogramMetricFamily(metric.name, metric.description, labels=metric.labels)
        if metric.name == "tierlane_batch_size":
            found = self._batches(_sizes)
        elif metric.name == "tierlane_batch_fill_ratio":
            found = self._batches(_fills)
        else:
            found = self._times(metric.name)
        for labels, buckets, total in found:
            family.add_metric(labels, buckets, total)
        return family

    def _of(self, name: str) -> Iterator[tuple[tuple[str, ...], list[int]]]:
        return ((key[1:], numbers) for key, numbers in sorted(self._series.items()) if key[0] == name)

    def _times(self, name: str) -> Iterator[Histogram]:
        bounds = [*(repr(bound) for bound in SECONDS), "+Inf"]
        for labels, numbers in self._of(name):
            if len(numbers) == len(bounds) + 1:
                yield labels, list(zip(bounds, accumulate(numbers[:-1]), strict=True)), numbers[-1] / 1e6

    def _batches(self, weigh: "Weigh") -> Iterator[Histogram]:
        """Batches of each model. Rows are sorted, since a sum of fractions in another order could decrease."""
        models: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
        for (*labels, full, size), (count, *_) in self._of(BATCHES):
            models.setdefault(tuple(labels), []).append((int(full), int(size), count))
        for labels_of, rows in models.items():
            bounds, weighted = weigh(sorted(rows))
            buckets = [(repr(float(bound)), sum(n for value, n in weighted if value <= bound)) for bound in bounds]
            buckets.append(("+Inf", sum(n for _, n in weighted)))
            yield labels_of, buckets, float(sum(value * n for value, n in weighted))


Weigh = Callable[[Sequence[tuple[int, int, int]]], tuple[Sequence[float], list[tuple[float, float]]]]
"""From (full size, size, requests) to the bounds of the buckets, and (value, number of batches)."""


def _sizes(rows: Sequence[tuple[int, int, int]]) -> tuple[Sequence[float], list[tuple[float, float]]]:
    return SIZES, [(size, requests / size) for _, size, requests in rows if size > 0]


def _fills(rows: Sequence[tuple[int, int, int]]) -> tuple[Sequence[float], list[tuple[float, float]]]:
    return FILLS, [(min(1.0, size / full), requests / size) for full, size, requests in rows if full > 0 and size > 0]


WRITE_EVERY_S = 1.0

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class MetricsSources:
    """The parts of a gateway that metrics are read from."""

    figures: Callable[[], Awaitable[Sequence[PoolFigures]]]
    resubmitted: Callable[[], int]  # Requests that were submitted again after a loss of Redis data.
    full_batches: Callable[[], Mapping[tuple[str, str], int]]  # (pool, model) -> max_batch_size.
    open_batches: Callable[[], OpenBatches | None]  # Of /v1/batches; None if they are not known.
    catalog: CatalogView


class Metrics:
    """The handler of `GET /metrics`, and the loop that writes this gateway's counters file."""

    def __init__(self, counters: Counters, directory: Path | None, gateway_id: str, sources: MetricsSources) -> None:
        self._counters = counters
        self._shared_counters = SharedCounters(directory, gateway_id) if directory is not None else None
        self._sources = sources
        self._number = 0
        self._problem: str | None = None
        self._version = installed_version()

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Return the metrics."""
        total = await self._total()
        observed = [gauge for figures in await self._sources.figures() for gauge in gauges(figures)]
        if (batches := self._sources.open_batches()) is not None:
            observed += [
                ("tierlane_open_batches", (), batches.batches),
                ("tierlane_open_batch_lines", (), batches.lines),
            ]
        shared = self._shared_counters is not None and self._problem is None
        observed += [
            *catalog_gauges(self._sources.catalog),
            ("tierlane_metrics_directory_usable", (), int(shared)),
            ("tierlane_metrics_processes", (), total.processes),
            ("tierlane_build_info", (self._version,), 1),
        ]
        body = await asyncio.to_thread(exposition, total.series, observed)
        headers = [("x-request-id", request.request_id), ("Cache-Control", "no-store")]
        return HttpResponse(200, body, headers, CONTENT_TYPE)

    async def run(self) -> None:
        """Write this gateway's file about once a second, forever."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self._counters.full_batches(self._sources.full_batches())
            await self._write()

    def close(self) -> None:
        """Write the final counters, when the gateway no longer serves."""
        if self._shared_counters is not None:
            try:
                self._shared_counters.write(self._series(), self._next())
            except OSError as error:
                self._failed(error)
            self._shared_counters.close()

    async def _total(self) -> Sum:
        """The counters of all gateways; those of this gateway only, if the directory is not usable."""
        if self._shared_counters is not None and await self._write():
            try:
                return await asyncio.to_thread(self._shared_counters.sum)
            except OSError as error:
                self._failed(error)
        return Sum(self._series(), 1)

    async def _write(self) -> bool:
        if self._shared_counters is None:
            return False
        try:
            await asyncio.to_thread(self._shared_counters.write, self._series(), self._next())
        except OSError as error:
            self._failed(error)
            return False
        self._problem = None
        return True

    def _failed(self, error: OSError) -> None:
        problem = error.strerror or str(error)
        if problem != self._problem:
            log.warning("shared metrics directory not usable; metrics are those of this gateway only", reason=problem)
        self._problem = problem

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _series(self) -> Series:
        return self._counters.series() | {("tierlane_retries_total", "redis"): [self._sources.resubmitted()]}


def installed_version() -> str:
    """The version of the installed distribution; "0" in a checkout that was never installed."""
    try:
        return version("tierlane")
    except PackageNotFoundError:
        return "0"
