"""One customer out of PostgreSQL, built as gateways build it, without reading the hundred thousand others."""

from time import time
from typing import NamedTuple

from ledger.catalog.loader import models_from, tiers_from
from ledger.catalog.snapshot import Key, Model, Tier
from ledger.catalog_build import SnapshotBuild, readable
from ledger.catalog_load import feed, one_moment
from ledger.postgres import Connection
from ledger.statements import statement
from tierlane.explain.customer import CustomerRow

# Where a customer is named like another one's id, the id is meant.
_CUSTOMER_ID = "SELECT id::text FROM customers WHERE name = $1 OR id::text = $1 ORDER BY id::text = $1 DESC LIMIT 1"
_LIMITS = ("requests_per_second", "burst", "max_concurrency", "tokens_per_minute")


class Rows(NamedTuple):
    """The configuration that bears on a customer; `row` is None where there is no such customer."""

    tiers: tuple[Tier, ...] = ()
    models: tuple[Model, ...] = ()
    row: CustomerRow | None = None


async def read_rows(connection: Connection, asked: str) -> Rows:
    """Everything about a customer, by name or id. Raises BadCatalogRow, and what asyncpg raises."""
    async with one_moment(connection):
        found, known_models = await connection.fetch(statement("catalog_tiers")), await _models(connection)
        with readable():
            tiers = tiers_from(found)
        customer_id = await connection.fetchval(_CUSTOMER_ID, asked)
        row = await _customer(connection, SnapshotBuild(tiers), customer_id) if customer_id else None
    return Rows(tiers, known_models, row)


async def _models(connection: Connection) -> tuple[Model, ...]:
    rows = await connection.fetch(statement("catalog_models"))
    with readable():
        return tuple(models_from(rows).values())


async def _customer(connection: Connection, build: SnapshotBuild, customer_id: str) -> CustomerRow:
    await feed(connection, build.add_quotas, "catalog_quotas_of", [customer_id])
    (row,) = await connection.fetch(statement("catalog_customers_of"), [customer_id])
    build.add_customers([row])
    await feed(connection, build.add_keys, "catalog_keys_of", [], [customer_id])
    seen = build.picture(0, {})
    return CustomerRow(
        customer=seen.customers[customer_id],
        own=frozenset(name for name in _LIMITS if row[name] is not None),
        keys=tuple(key.identity for key in seen.keys.values() if _has_own_limit(key)),
    )


def _has_own_limit(key: Key) -> bool:
    return key.identity.key_rate > 0 and not key.revoked and key.expires_at > time()
