"""One consistent read of the whole catalog, by the piece: all tables in one read-only transaction."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from ledger.catalog.loader import BadCatalogRow, Row, models_from, tiers_from
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ledger.catalog_build import SnapshotBuild, readable
from ledger.postgres import Connection
from ledger.statements import statement

CHANNEL = "tierlane_catalog"
PIECE = 1000
"""Rows read and built before other tasks get a turn: about two milliseconds."""


class State(NamedTuple):
    """Where the catalog stands at one moment."""

    version: int
    changed_at: str  # Beside the version: after a failover that lost a change, another one may have got its number.
    whole_version: int  # Who has an older version cannot be told row by row what has changed since.
    seen: str  # Name of the snapshot of PostgreSQL in which this was read.

    def same_as(self, other: "State") -> bool:
        """Whether nothing was changed in between."""
        return self.version == other.version and self.changed_at == other.changed_at


class Picture(NamedTuple):
    """A snapshot of the catalog, and the state that it shows."""

    snapshot: Snapshot
    state: State


async def load(connection: Connection) -> Snapshot:
    """Read and check everything. Raises BadCatalogRow, and what asyncpg raises."""
    return (await load_whole(connection)).snapshot


async def load_whole(connection: Connection, known: Snapshot | None = None) -> Picture:
    """Read and check everything; what is equal in `known` is shared with it.

    Raises BadCatalogRow, and what asyncpg raises.
    """
    async with one_moment(connection):
        state = await read_state(connection)
        build = SnapshotBuild(await read_tiers(connection), known)
        models, cordoned = await read_models(connection), await read_cordoned(connection)
        await feed(connection, build.add_quotas, "catalog_quotas")
        await feed(connection, build.add_customers, "catalog_customers")
        await feed(connection, build.add_keys, "catalog_keys")
    return Picture(build.picture(state.version, models, cordoned=cordoned), state)


@asynccontextmanager
async def one_moment(connection: Connection) -> AsyncIterator[None]:
    """A transaction in which the version and all rows are of one moment."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        yield


async def read_state(connection: Connection) -> State:
    """Where it stands now. Raises BadCatalogRow where the row is missing, and what asyncpg raises."""
    row = await connection.fetchrow(statement("catalog_state"))
    if row is None:
        raise BadCatalogRow("catalog_version has no row.")
    return State(*row)


async def read_tiers(connection: Connection) -> tuple[Tier, ...]:
    """The tiers by priority. Raises BadCatalogRow, and what asyncpg raises."""
    rows = await connection.fetch(statement("catalog_tiers"))
    with readable():
        return tiers_from(rows)


async def read_models(connection: Connection) -> dict[str, Model]:
    """The models by name. Raises BadCatalogRow, and what asyncpg raises."""
    rows = await connection.fetch(statement("catalog_models"))
    with readable():
        return models_from(rows)


async def read_cordoned(connection: Connection) -> frozenset[str]:
    """Ids of the cordoned workers. Raises what asyncpg raises."""
    return frozenset(row[0] for row in await connection.fetch(statement("catalog_cordons")))


async def feed(connection: Connection, take: Callable[[Sequence[Row]], None], name: str, *args: Any) -> None:
    """Hand the rows of a statement to `take`, some at a time; other tasks run between one piece and the next."""
    cursor = await connection.cursor(statement(name), *args)
    while rows := await cursor.fetch(PIECE):
        take(rows)
