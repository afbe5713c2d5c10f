"""The scheduler's process: it serves its own pool, and every other one that the catalog names, in every cell. Any number may run.

A gateway does the same while no scheduler runs (`StandIn`).
"""

import asyncio
import gc

import structlog
from redis.asyncio import Redis

from ledger.catalog.follower import Catalog
from scheduler.cells.places import cell_urls
from scheduler.fault_log import log_fault
from scheduler.redis_client.connections import command_client, server_url
from scheduler.redis_client.keys import DEFAULT_CELL, cell_of
from scheduler.tasks import end_all
from tierlane.roles.allotter import run_allotter
from tierlane.roles.pool_loops import CellShares, run_pool
from tierlane.roles.process import check_database, check_redis, configure_logs, run_role, stop_on_signals, with_cluster
from tierlane.roles.served_pools import LeftPools, wanted_pools
from tierlane.roles.worker_moves import moves_publisher, publish_moves
from tierlane.settings.model import Settings

CELL_RETRY_S = 1.0
COLLECT_AFTER = (20_000, 20, 20)
"""New objects between two collections: records and rows of the audit are thousands of objects without cycles."""

STOP_LOOK_S = 0.1
"""Between two looks at which pools the catalog names."""

log = structlog.get_logger("scheduler")


def run(settings: Settings) -> int:
    """Run until SIGTERM; returns the exit code."""
    configure_logs(settings.log_format, settings.log_level, "scheduler", settings.own_name)
    return run_role(lambda: _serve(settings))


async def _serve(settings: Settings) -> int:
    stop = stop_on_signals()
    settings = await with_cluster(settings)
    catalog = Catalog(settings.session_url)
    try:
        await check_redis(settings.redis_url)
        await check_database(settings.session_url)
        await catalog.start()
        gc.collect()
        gc.freeze()  # What is here stays: it need not be looked over again and again.
        gc.set_threshold(*COLLECT_AFTER)
        await serve_cells(settings, stop, catalog)
    finally:
        await catalog.stop()
    return 0


async def serve_cells(settings: Settings, stop: asyncio.Event, catalog: Catalog) -> None:
    """Serve every cell of the catalog until `stop`, or until it is closed."""
    running: dict[str, asyncio.Event] = {}
    moves = moves_publisher(settings, catalog)
    async with asyncio.TaskGroup() as group:
        of_all_cells = [
            group.create_task(publish_moves(moves), name="moves of workers"),
            group.create_task(run_allotter(settings, catalog), name="allotter"),
        ]
        while not stop.is_set():
            urls = cell_urls(settings.redis_url, catalog.snapshot.cells if catalog.snapshot is not None else ())
            for cell in sorted(urls.keys() - running.keys()):
                closed = running[cell] = asyncio.Event()
                group.create_task(_serve_cell(settings, urls[cell], closed, catalog, moves.shares), name=f"cell {cell}")
            for cell in running.keys() - urls.keys():
                log.info("cell closed", cell=cell)
                running.pop(cell).set()
            await _asked_to_stop(stop, STOP_LOOK_S)
        for closed in running.values():
            closed.set()
        await end_all(of_all_cells)


async def _serve_cell(
    settings: Settings, redis_url: str, stop: asyncio.Event, catalog: Catalog, shares: CellShares
) -> None:
    """A fault of one cell does not affect the others; one of the default cell ends the process, which is restarted."""
    cell = cell_of(redis_url)
    while not stop.is_set():
        try:
            redis_url = await server_url(redis_url)
            client = command_client(redis_url)
            try:
                await serve_pools(settings.model_copy(update={"redis_url": redis_url}), stop, catalog, client, shares)
            finally:
                await client.aclose()
        except Exception as error:
            if cell == DEFAULT_CELL:
                raise
            log_fault(f"cell {cell} is not served", error)
            await _asked_to_stop(stop, CELL_RETRY_S)


async def serve_pools(
    settings: Settings, stop: asyncio.Event, catalog: Catalog, client: Redis, shares: CellShares
) -> None:
    """A pool is served from its first appearance until the process ends, because requests may still be queued in it."""
    served: set[str] = set()
    left = LeftPools(client, catalog, settings.statement_url, served, cell=cell_of(settings.redis_url))
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(left.run()) if settings.serve_pools == "all" else None
        while not stop.is_set():
            for pool in sorted((wanted_pools(settings, catalog) | left.names) - served):
                log.info("pool served", pool=pool)
                served.add(pool)
                of_pool = settings.model_copy(update={"pool": pool})
                group.create_task(run_pool(of_pool, stop, catalog, client, shares), name=f"pool {pool}")
            await _asked_to_stop(stop, STOP_LOOK_S)
        if looking is not None:
            looking.cancel()


async def _asked_to_stop(stop: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await stop.wait()
    except TimeoutError:
        return
