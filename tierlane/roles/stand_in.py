"""The work of schedulers in a gateway, while no scheduler runs."""

import asyncio

from ledger.catalog.follower import Catalog
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import DEFAULT_CELL, cell_of
from scheduler.tasks import end_all
from tierlane.roles.allotter import run_allotter
from tierlane.roles.pool_loops import run_pool
from tierlane.roles.served_pools import LeftPools
from tierlane.roles.worker_moves import moves_publisher, publish_moves
from tierlane.settings.model import Settings


class StandIn:
    """The work of schedulers in a gateway that has this catalog, for each pool on connections of its own."""

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self._settings = settings
        self._catalog = catalog
        self._served: dict[str, set[str]] = {}  # By cell.
        self._moves = moves_publisher(settings, catalog)

    async def run(self, redis_url: str, pool: str, stop: asyncio.Event) -> None:
        """Run for `pool` in the cell at this URL until `stop`. With the gateway's own pool, also look for those that are left."""
        settings = self._settings.model_copy(update={"redis_url": redis_url, "pool": pool})
        client, cell = command_client(redis_url), cell_of(redis_url)
        served = self._served.setdefault(cell, set())
        served.add(pool)
        left = LeftPools(client, self._catalog, settings.statement_url, served, cell=cell)
        is_own = pool == self._settings.pool
        try:
            async with asyncio.TaskGroup() as group:
                besides = [group.create_task(left.run())] if is_own and settings.serve_pools == "all" else []
                if is_own and cell == DEFAULT_CELL:
                    besides.append(group.create_task(publish_moves(self._moves)))
                    besides.append(group.create_task(run_allotter(self._settings, self._catalog)))
                await run_pool(settings, stop, self._catalog, client, self._moves.shares, standing_in=True)
                await end_all(besides)
        finally:
            await client.aclose()
