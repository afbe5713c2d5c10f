"""The moves of workers between the cells of the catalog."""

from collections.abc import Sequence

from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import CellRow
from scheduler.cells.moves import MovesPublisher, PoolPlan
from scheduler.tasks import TaskRegistry
from tierlane.roles.pool_policy import pool_plan
from tierlane.roles.served_pools import wanted_pools
from tierlane.settings.model import Settings


def moves_publisher(settings: Settings, catalog: Catalog) -> MovesPublisher:
    """The moves of workers between the cells of the catalog."""

    def rows() -> Sequence[CellRow]:
        return catalog.snapshot.cells if catalog.snapshot is not None else ()

    def plans() -> list[PoolPlan]:
        return [pool_plan(catalog.snapshot, pool, settings) for pool in sorted(wanted_pools(settings, catalog))]

    return MovesPublisher(settings.redis_url, plans, rows)


async def publish_moves(moves: MovesPublisher) -> None:
    """Publish the moves of workers; never returns."""
    await TaskRegistry().run_forever("moves of workers", moves.run)
