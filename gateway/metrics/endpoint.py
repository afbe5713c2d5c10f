"""`GET /metrics`: the sums of all gateways of this host, and what this one sees. And the loop that keeps its own file.

A scrape writes this gateway's file first and then adds up all files, itself from the file too: whichever gateway answers,
no figure is less than what another one said before. Files are written and read in a thread, never in the event loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from gateway.http.response import Answer
from gateway.http.router import Call
from gateway.metrics.counters import Series, Tally
from gateway.metrics.exposition import CONTENT_TYPE, exposition
from gateway.metrics.fleet import Gauge, PoolLook, gauges
from gateway.metrics.shared_counters import Shelf, Sum
from gateway.operations.health_collector import audit_lag_ms
from gateway.pool import PoolParts

WRITE_EVERY_S = 1.0

log = structlog.get_logger("gateway")


class Metrics:
    """The handler and the loop. `pools`: all that are served, `named`: those of which something is told."""

    def __init__(
        self,
        tally: Tally,
        directory: Path | None,
        gateway_id: str,
        pools: Callable[[], Sequence[PoolParts]],
        named: Callable[[], Sequence[PoolParts]],
    ) -> None:
        self._tally = tally
        self._shelf = Shelf(directory, gateway_id) if directory is not None else None
        self._pools = pools
        self._named = named
        self._number = 0
        self._problem: str | None = None
        self._version = _version()

    async def __call__(self, call: Call) -> Answer:
        """Answer a scrape."""
        total = await self._total()
        seen = [gauge for parts in self._named() for gauge in gauges(await pool_look(parts))]
        body = await asyncio.to_thread(exposition, total.series, [*seen, *self._own(total)])
        headers = [("x-request-id", call.request_id), ("Cache-Control", "no-store")]
        return Answer(200, body, headers, CONTENT_TYPE)

    async def run(self) -> None:
        """Write this gateway's file about once a second; never ends by itself."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self._tally.full_batches(self._full_batches())
            await self._write()

    def close(self) -> None:
        """The last words, once nothing is served any more."""
        if self._shelf is not None:
            try:
                self._shelf.write(self._series(), self._next())
            except OSError as error:
                self._cannot(error)
            self._shelf.close()

    async def _total(self) -> Sum:
        """What all gateways counted; this one alone where the directory cannot be used."""
        if self._shelf is not None and await self._write():
            try:
                return await asyncio.to_thread(self._shelf.sum)
            except OSError as error:
                self._cannot(error)
        return Sum(self._series(), 1)

    async def _write(self) -> bool:
        if self._shelf is None:
            return False
        try:
            await asyncio.to_thread(self._shelf.write, self._series(), self._next())
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
        again = sum(parts.witness.submitted_again for parts in self._pools())
        return self._tally.series() | {("tierlane_retries_total", "redis"): [again]}

    def _full_batches(self) -> dict[tuple[str, str], int]:
        snapshots = [parts.snapshot for parts in self._pools()[:1]]
        models = [snapshot.models for snapshot in snapshots if snapshot is not None]
        return {(row.pool, name): row.max_batch_size for rows in models for name, row in rows.items()}

    def _own(self, total: Sum) -> Iterable[Gauge]:
        shared = self._shelf is not None and self._problem is None
        return (
            ("tierlane_metrics_directory_usable", (), int(shared)),
            ("tierlane_metrics_processes", (), total.processes),
            ("tierlane_build_info", (self._version,), 1),
        )


async def pool_look(parts: PoolParts) -> PoolLook:
    """What there is to tell of one pool now."""
    snapshot, limits = parts.snapshot, parts.limits
    tiers = [tier.name for tier in snapshot.tiers] if snapshot else []
    return PoolLook(
        pool=parts.config.pool,
        observation=parts.beat.observation,
        age_s=parts.beat.age_s(),
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
