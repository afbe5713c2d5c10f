"""`GET /metrics`: counters of all gateways of this host, and observations of the pools.

A scrape writes this gateway's counters file first and then sums all files, its own included, so that no gateway returns
less than another one returned before. Files are read and written in a thread, never in the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.metrics.counters import Counters, Series
from gateway.metrics.exposition import METRICS_TYPE, exposition
from gateway.metrics.gauges import PoolFigures, catalog_gauges, gauges
from gateway.metrics.shared_counters import SharedCounters, Sum
from gateway.version import installed_version
from ledger.batches import OpenBatches
from ledger.catalog.follower import Catalog

WRITE_EVERY_S = 1.0

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class MetricsSources:
    """The parts of a gateway that metrics are read from."""

    figures: Callable[[], Awaitable[Sequence[PoolFigures]]]
    resubmitted: Callable[[], int]  # Requests that were submitted again after a loss of Redis data.
    full_batches: Callable[[], Mapping[tuple[str, str], int]]  # (pool, model) -> max_batch_size.
    open_batches: Callable[[], OpenBatches | None]  # Of /v1/batches; None if they are not known.
    catalog: Catalog


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
        total = Sum(self._series(), 1)  # Of this gateway only, if the directory is not usable.
        if self._shared_counters is not None and await self._write():
            try:
                total = await asyncio.to_thread(self._shared_counters.sum)
            except OSError as error:
                self._failed(error)
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
        return HttpResponse(200, body, headers, METRICS_TYPE)

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
