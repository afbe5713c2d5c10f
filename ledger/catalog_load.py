"""One consistent read of the catalog: all tables in one read-only transaction, built without holding up the loop."""

import asyncio
from itertools import islice

from ledger.catalog_rows import (
    BadCatalogRow,
    CatalogRows,
    customers_from,
    keys_from,
    models_from,
    quotas_from,
    tiers_from,
)
from ledger.postgres import Connection
from ledger.snapshot import Key, Snapshot
from ledger.statements import statement

CHANNEL = "tierlane_catalog"
KEYS_A_STEP = 2000
"""Keys built before other tasks get a turn: about a millisecond."""


async def read_version(connection: Connection) -> int:
    """The catalog's version now. Raises BadCatalogRow where the row is missing, and what asyncpg raises."""
    version = await connection.fetchval(statement("catalog_version"))
    if version is None:
        raise BadCatalogRow("catalog_version has no row.")
    return int(version)


async def load(connection: Connection) -> Snapshot:
    """Read and check everything. Raises BadCatalogRow, and what asyncpg raises."""
    return await build(await _read(connection))


async def build(rows: CatalogRows) -> Snapshot:
    """The snapshot of some rows; a value of an impossible type is a bad row too. Raises BadCatalogRow."""
    try:
        tiers = tiers_from(rows.tiers)
        customers = customers_from(rows.customers, tiers)
        keys: dict[str, Key] = {}
        made = keys_from(rows.keys, customers)
        while step := dict(islice(made, KEYS_A_STEP)):
            keys.update(step)
            await asyncio.sleep(0)
        return Snapshot(rows.version, tiers, customers, keys, models_from(rows.models), quotas_from(rows.quotas))
    except (TypeError, ValueError, KeyError) as error:
        raise BadCatalogRow(f"The catalog cannot be read: {error}") from error


async def _read(connection: Connection) -> CatalogRows:
    # Repeatable read: the version and all rows are of one moment.
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return CatalogRows(
            version=await read_version(connection),
            tiers=await connection.fetch(statement("catalog_tiers")),
            customers=await connection.fetch(statement("catalog_customers")),
            keys=await connection.fetch(statement("catalog_keys")),
            models=await connection.fetch(statement("catalog_models")),
            quotas=await connection.fetch(statement("catalog_quotas")),
        )
