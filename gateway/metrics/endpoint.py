"""`GET /metrics` in Prometheus' text format: the sums of all gateways of this host, and its view of the pools.

A scrape writes this gateway's file first and then adds up all files, its own from the file too: whichever gateway
answers, no figure is less than what another one reported before. Files are written and read in a thread, never in the
event loop. Gauges are a pure function of the last observation; nothing is reported that is too old to be believed.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.circuit_breaker import BreakerState
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.metrics.counters import BATCHES, BOUNDS_US, Counters, Series
from gateway.metrics.definitions import COUNTED, SEEN
from gateway.metrics.definitions import Metric as Definition
from gateway.metrics.shared_counters import SharedCounters, Sum
from gateway.operations.health_collector import audit_lag_ms
from gateway.pool import PoolParts
from scheduler.protocol.pool_view import Observation, WorkerView

STALE_S = 10.0
MOST_WORKERS = 512
MEBIBYTE = 1 << 20
STATES = (
    *("starting", "ready", "busy", "paused", "away", "cordoned"),
    *("draining", "down", "quarantined", "failed", "unknown"),
)
CIRCUIT = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

Gauge = tuple[str, tuple[str, ...], float]
"""A metric's name, its labels' values, and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Everything that is told of one pool. `factors`: tier -> part of its limits in force; `demand`: requests/s."""

    pool: str
    observation: Observation | None
    age_s: float | None
    capacity_rps: float
    factors: Mapping[str, float]
    demand: Mapping[str, float]
    memory_share: float
    audit_lag_ms: int | None
    recommended_workers: int
    breakers: Mapping[str, str] = field(default_factory=dict)


def gauges(look: PoolFigures) -> Iterator[Gauge]:
    """All of one pool."""
    pool = look.pool
    yield "tierlane_capacity_requests_per_second", (pool,), look.capacity_rps
    yield "tierlane_recommended_workers", (pool,), look.recommended_workers
    for tier, part in look.factors.items():
        yield "tierlane_effective_limit_ratio", (pool, tier), part
    for target, state in list(look.breakers.items())[:MOST_WORKERS]:
        yield "tierlane_circuit_state", (pool, target), CIRCUIT[BreakerState(state)]
    if look.audit_lag_ms is not None:
        yield "tierlane_audit_lag_seconds", (pool,), look.audit_lag_ms / 1000
    if look.age_s is None or look.observation is None:
        return
    yield "tierlane_look_age_seconds", (pool,), look.age_s
    if look.age_s <= STALE_S:
        yield "tierlane_redis_memory_ratio", (pool,), look.memory_share
        yield from _queues(look, look.observation)
        yield from _workers(pool, look.observation.workers[:MOST_WORKERS])


def _queues(look: PoolFigures, seen: Observation) -> Iterator[Gauge]:
    pool = look.pool
    for name, tier in seen.tiers.items():
        yield "tierlane_queue_depth", (pool, name), tier.depth
        yield "tierlane_queue_oldest_age_seconds", (pool, name), tier.oldest_ms / 1000
    for name, demand_rps in look.demand.items():
        yield "tierlane_demand_requests_per_second", (pool, name), demand_rps
    yield "tierlane_gateways", (pool,), len(seen.gateways)
    yield "tierlane_dlq_size", (pool,), seen.dlq
    yield "tierlane_audit_pending_records", (pool,), seen.outbox


def _workers(pool: str, workers: list[WorkerView]) -> Iterator[Gauge]:
    counts = dict.fromkeys(STATES, 0)
    for worker in workers:
        counts[worker.status if worker.status in counts else "unknown"] += 1
        yield "tierlane_gpu_healthy", (pool, worker.id), int(worker.healthy)
        yield "tierlane_gpu_utilization_ratio", (pool, worker.id), worker.utilization
        yield "tierlane_inflight_requests", (pool, worker.id), worker.in_flight
        if worker.gpu is not None:
            yield "tierlane_gpu_memory_bytes", (pool, worker.id), worker.gpu.memory_used_mb * MEBIBYTE
    for state, count in counts.items():
        yield "tierlane_workers", (pool, state), count


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILLS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = tuple(bound / 1e6 for bound in BOUNDS_US)
MADE_OF_BATCHES = ("tierlane_batch_size", "tierlane_batch_fill_ratio")

Buckets = list[tuple[str, float]]
Histogram = tuple[tuple[str, ...], Buckets, float]
"""Values of the labels, cumulative counts by upper end, the sum."""


def exposition(series: Series, gauges: Iterable[Gauge]) -> bytes:
    """The whole page. Metrics of which there is nothing yet are named all the same."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsPage(series, list(gauges)))
    return generate_latest(registry)


class MetricsPage(Collector):
    """One scrape's figures as prometheus_client wants them."""

    def __init__(self, series: Series, gauges: Sequence[Gauge]) -> None:
        self._series = series
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """One family for each definition."""
        for definition in COUNTED:
            yield self._histogram(definition) if definition.kind == "histogram" else self._counter(definition)
        for definition in SEEN:
            family = GaugeMetricFamily(definition.name, definition.meaning, labels=definition.labels)
            for name, labels, value in self._gauges:
                if name == definition.name:
                    family.add_metric(labels, value)
            yield family

    def _counter(self, definition: Definition) -> Metric:
        family = CounterMetricFamily(definition.name, definition.meaning, labels=definition.labels)
        for labels, numbers in self._of(definition.name):
            family.add_metric(labels, numbers[0])
        return family

    def _histogram(self, definition: Definition) -> Metric:
        family = HistogramMetricFamily(definition.name, definition.meaning, labels=definition.labels)
        made = definition.name in MADE_OF_BATCHES
        found = self._batches(fill=definition.name.endswith("_ratio")) if made else self._times(definition.name)
        for labels, buckets, total in found:
            family.add_metric(labels, buckets, total)
        return family

    def _of(self, name: str) -> Iterator[tuple[tuple[str, ...], list[int]]]:
        return ((key[1:], numbers) for key, numbers in sorted(self._series.items()) if key[0] == name)

    def _times(self, name: str) -> Iterator[Histogram]:
        for labels, numbers in self._of(name):
            if len(numbers) == len(SECONDS) + 2:
                yield labels, cumulative(SECONDS, numbers[:-1]), numbers[-1] / 1e6

    def _batches(self, *, fill: bool) -> Iterator[Histogram]:
        """Batches by size, or by how full they were; in an order that stays, so that sums of fractions never fall."""
        models: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
        for (*labels, full, size), (count, *_) in self._of(BATCHES):
            models.setdefault(tuple(labels), []).append((int(full), int(size), count))
        for labels_of, rows in models.items():
            yield (labels_of, *(_fills(sorted(rows)) if fill else _sizes(sorted(rows))))


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> Buckets:
    """Counts of single buckets, the last without an end, as Prometheus counts them."""
    ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(ends, accumulate(counts), strict=True))


def _sizes(rows: Sequence[tuple[int, int, int]]) -> tuple[Buckets, float]:
    """Of (full, size, requests): a batch of n has n requests."""
    return _weighed(SIZES, [(size, requests / size, requests) for _, size, requests in rows if size > 0])


def _fills(rows: Sequence[tuple[int, int, int]]) -> tuple[Buckets, float]:
    """Where a full batch is not known, nothing."""
    known = [(min(1.0, size / full), requests / size) for full, size, requests in rows if full > 0 and size > 0]
    return _weighed(FILLS, [(part, batches, part * batches) for part, batches in known])


def _weighed(bounds: Sequence[float], rows: Sequence[tuple[float, float, float]]) -> tuple[Buckets, float]:
    """Of (value, how often, what it adds to the sum)."""
    buckets = [(repr(float(bound)), sum(count for value, count, _ in rows if value <= bound)) for bound in bounds]
    return [*buckets, ("+Inf", sum(count for _, count, _ in rows))], float(sum(add for *_, add in rows))


WRITE_EVERY_S = 1.0

log = structlog.get_logger("gateway")


class Metrics:
    """The handler and the loop. `pools`: all that are served, `named`: those of which something is told."""

    def __init__(
        self,
        counters: Counters,
        directory: Path | None,
        gateway_id: str,
        pools: Callable[[], Sequence[PoolParts]],
        named: Callable[[], Sequence[PoolParts]],
    ) -> None:
        self._counters = counters
        self._shared_counters = SharedCounters(directory, gateway_id) if directory is not None else None
        self._pools = pools
        self._named = named
        self._number = 0
        self._problem: str | None = None
        self._version = _version()

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """Answer a scrape."""
        total = await self._total()
        seen = [gauge for parts in self._named() for gauge in gauges(await pool_look(parts))]
        body = await asyncio.to_thread(exposition, total.series, [*seen, *self._own(total)])
        headers = [("x-request-id", call.request_id), ("Cache-Control", "no-store")]
        return HttpResponse(200, body, headers, CONTENT_TYPE)

    async def run(self) -> None:
        """Write this gateway's file about once a second; never ends by itself."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self._counters.full_batches(self._full_batches())
            await self._write()

    def close(self) -> None:
        """The last words, once nothing is served any more."""
        if self._shared_counters is not None:
            try:
                self._shared_counters.write(self._series(), self._next())
            except OSError as error:
                self._cannot(error)
            self._shared_counters.close()

    async def _total(self) -> Sum:
        """What all gateways counted; this one alone where the directory cannot be used."""
        if self._shared_counters is not None and await self._write():
            try:
                return await asyncio.to_thread(self._shared_counters.sum)
            except OSError as error:
                self._cannot(error)
        return Sum(self._series(), 1)

    async def _write(self) -> bool:
        if self._shared_counters is None:
            return False
        try:
            await asyncio.to_thread(self._shared_counters.write, self._series(), self._next())
        except OSError as error:
            self._cannot(error)
            return False
        self._problem = None
        return True

    def _cannot(self, error: OSError) -> None:
        problem = error.strerror or str(error)
        if problem != self._problem:
            log.warning("metrics are this gateway's alone: the common directory cannot be used", reason=problem)
        self._problem = problem

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _series(self) -> Series:
        again = sum(parts.recovery.submitted_again for parts in self._pools())
        return self._counters.series() | {("tierlane_retries_total", "redis"): [again]}

    def _full_batches(self) -> dict[tuple[str, str], int]:
        snapshots = [parts.snapshot for parts in self._pools()[:1]]
        models = [snapshot.models for snapshot in snapshots if snapshot is not None]
        return {(row.pool, name): row.max_batch_size for rows in models for name, row in rows.items()}

    def _own(self, total: Sum) -> Iterable[Gauge]:
        shared = self._shared_counters is not None and self._problem is None
        return (
            ("tierlane_metrics_directory_usable", (), int(shared)),
            ("tierlane_metrics_processes", (), total.processes),
            ("tierlane_build_info", (self._version,), 1),
        )


async def pool_look(parts: PoolParts) -> PoolFigures:
    """What there is to tell of one pool now."""
    snapshot, limits = parts.snapshot, parts.limits
    tiers = [tier.name for tier in snapshot.tiers] if snapshot else []
    return PoolFigures(
        pool=parts.config.pool,
        observation=parts.heartbeat.observation,
        age_s=parts.heartbeat.age_s(),
        capacity_rps=limits.capacity_rps,
        factors={name: limits.factor(name) for name in tiers},
        demand={name: limits.demand(name) for name in tiers},
        memory_share=limits.memory_share,
        audit_lag_ms=await audit_lag_ms(parts),
        recommended_workers=parts.scale.recommended,
        breakers=parts.direct.view().breakers,
    )


def _version() -> str:
    try:
        return version("tierlane")
    except PackageNotFoundError:  # A checkout that was never installed.
        return "0"
