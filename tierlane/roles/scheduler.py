"""The scheduler's process: it serves its own pool, and every other one that the catalog names. Any number may run."""

import asyncio
import gc
import os
import socket
from typing import TYPE_CHECKING

import structlog
from redis.asyncio import Redis

from ledger.catalog.follower import Catalog
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import pools_to_serve
from tierlane.roles.left_pools import LeftPools
from tierlane.roles.log_output import configure_logs
from tierlane.roles.pool_loops import run_pool
from tierlane.roles.process import run_role, stop_on_signals
from tierlane.roles.start_checks import check_database, check_redis

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

LOOK_S = 0.1
"""Between two looks at which pools the catalog names."""

log = structlog.get_logger("scheduler")


def run(settings: "Settings") -> int:
    """Run until SIGTERM; returns the exit code."""
    configure_logs(settings.log_format, settings.log_level, "scheduler", f"{socket.gethostname()}-{os.getpid()}")
    return run_role(lambda: _serve(settings))


async def _serve(settings: "Settings") -> int:
    stop = stop_on_signals()
    client, catalog = command_client(settings.redis_url), Catalog(settings.database_url)
    try:
        await check_redis(settings.redis_url)
        await check_database(settings.database_url)
        await catalog.start()
        gc.collect()
        gc.freeze()  # What is here stays: it need not be looked over again and again.
        await serve_pools(settings, stop, catalog, client)
    finally:
        await catalog.stop()
        await client.aclose()
    return 0


async def serve_pools(settings: "Settings", stop: asyncio.Event, catalog: Catalog, client: Redis) -> None:
    """A pool is served from when it is first named until the process ends: somebody may still wait in it."""
    served: set[str] = set()
    left = LeftPools(client, catalog, settings.database_url, served)
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(left.run()) if settings.serve_pools == "all" else None
        while not stop.is_set():
            for pool in sorted((wanted_pools(settings, catalog) | left.names) - served):
                log.info("pool served", pool=pool)
                served.add(pool)
                of_pool = settings.model_copy(update={"pool": pool})
                group.create_task(run_pool(of_pool, stop, catalog, client), name=f"pool {pool}")
            await _asked_to_stop(stop, LOOK_S)
        if looking is not None:
            looking.cancel()


def wanted_pools(settings: "Settings", catalog: Catalog) -> set[str]:
    """Its own, and each that a model names, were it switched off: an outbox that nobody empties loses its audit."""
    if catalog.snapshot is None or settings.serve_pools != "all":
        return {settings.pool}
    return {settings.pool} | pools_to_serve(catalog.snapshot.models.values())


async def _asked_to_stop(stop: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await stop.wait()
    except TimeoutError:
        return
