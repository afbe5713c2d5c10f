"""From one picture of the catalog to the next by reading only what changed: for very many customers and keys.

How it is known what changed: a picture keeps the name of the PostgreSQL snapshot in which it was read. The rows of
`config_changes`, which triggers write, that can be seen now and could not be seen in that snapshot are exactly those
of the transactions that became visible in between; ids and times would not do, for they are given out before the
commit. What rows cannot tell, or what changes every customer, is answered with None: read everything.
"""

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ledger.catalog.loader import (
    PIECE,
    LoadedCatalog,
    Row,
    SnapshotBuild,
    feed,
    one_moment,
    read_cordoned,
    read_models,
    read_state,
    read_tiers,
)
from ledger.catalog.snapshot import Quota, Tier
from ledger.postgres import Connection, statement

MOST_CHANGES = 5000
"""Above so many changed rows, reading everything is not much slower."""

_TABLES = {"customers", "api_keys", "quotas", "tiers", "models", "cordons"}


class ChangedIds(NamedTuple):
    """Ids of rows that were added, changed or deleted."""

    customers: set[str]
    keys: set[str]
    quota_owners: set[str]
    tables: set[str]


async def load_changes(connection: Connection, before: LoadedCatalog) -> LoadedCatalog | None:
    """The picture of now, made from one that was read over the same connection; None where that cannot be.

    Raises BadCatalogRow, and what asyncpg raises.
    """
    known = before.snapshot
    async with one_moment(connection):
        state = await read_state(connection)
        if state.same_as(before.state):
            return LoadedCatalog(known, state)
        if state.version <= known.version or known.version < state.whole_version:
            return None  # Another history, or what rows do not tell.
        changed = changed_by(await connection.fetch(statement("catalog_changes"), before.state.seen, MOST_CHANGES + 1))
        if changed is None:
            return None
        tiers, models, cordoned = known.tiers, known.models, known.cordoned
        if "tiers" in changed.tables:
            tiers = await read_tiers(connection)
            if _inherited(tiers) != _inherited(known.tiers):
                return None
        if "models" in changed.tables:
            models = await read_models(connection)
        if "cordons" in changed.tables:
            cordoned = await read_cordoned(connection)
        build = SnapshotBuild(tiers, known)
        await _feed_changed(connection, build, changed)
    quotas = known.quotas
    if changed.quota_owners:
        quotas = await _quotas_but(quotas, changed.customers, build.quotas)
    return LoadedCatalog(build.picture(state.version, models, quotas, cordoned), state)


def changed_by(rows: Iterable[Row]) -> ChangedIds | None:
    """What some changes touch; None where they are too many, or touch every customer."""
    changed = ChangedIds(set(), set(), set(), set())
    for count, (table, old_id, new_id, old_owner, new_owner, of_tier) in enumerate(rows, 1):
        if count > MOST_CHANGES or table not in _TABLES or (table == "quotas" and of_tier):
            return None
        changed.tables.add(table)
        if table == "customers":
            changed.customers.update(filter(None, (old_id, new_id)))
        elif table == "api_keys":
            changed.keys.update(filter(None, (old_id, new_id)))
        elif table == "quotas":
            changed.quota_owners.update(filter(None, (old_owner, new_owner)))
    changed.customers.update(changed.quota_owners)
    return changed


def _inherited(tiers: Iterable[Tier]) -> set[tuple[object, ...]]:
    """What customers have from their tiers: where it differs, all of them have to be made anew."""
    return {(tier.name, tier.limits, tier.max_queue_ms) for tier in tiers}


async def _feed_changed(connection: Connection, build: SnapshotBuild, changed: ChangedIds) -> None:
    customers, keys = list(changed.customers), list(changed.keys)
    if customers:
        await feed(connection, build.add_quotas, "catalog_quotas_of", customers)
        await feed(connection, build.add_customers, "catalog_customers_of", customers)
    build.merge_customers(customers)
    if customers or keys:
        await feed(connection, build.add_keys, "catalog_keys_of", keys, customers)
    build.merge_keys(keys)


async def _quotas_but(quotas: tuple[Quota, ...], owners: set[str], fed: list[Quota]) -> tuple[Quota, ...]:
    """The quotas with those of `owners` as they were fed; the tiers' were fed too, and are the same."""
    kept: list[Quota] = []
    rest = iter(quotas)
    while piece := list(islice(rest, 10 * PIECE)):
        kept.extend(quota for quota in piece if quota.customer_id not in owners)
        await asyncio.sleep(0)
    return (*kept, *(quota for quota in fed if quota.customer_id is not None))
