"""Updates a snapshot of the catalog by reading only the rows that changed, for catalogs with many customers and keys.

A snapshot of the catalog keeps the PostgreSQL snapshot (pg_snapshot) in which it was read. The rows of `config_changes`
that are visible now and were not visible then are exactly the changes in between. Ids and times would not be exact, since
they are assigned before the commit. If single rows do not describe the change, or it affects every customer, everything is
read again.
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
    in_snapshot,
    read_cells,
    read_cordons,
    read_models,
    read_state,
    read_tiers,
)
from ledger.catalog.snapshot import Quota, Tier
from ledger.postgres import Connection, statement

MAX_CHANGES = 5000
"""With more changed rows, reading everything is about as fast."""

_TABLES = {"customers", "api_keys", "quotas", "tiers", "models", "cordons", "prices", "cells"}


class ChangedIds(NamedTuple):
    """Ids of rows that were inserted, changed or deleted, and the names of their tables."""

    customers: set[str]
    keys: set[str]
    quota_owners: set[str]
    tables: set[str]


async def load_changes(connection: Connection, before: LoadedCatalog) -> LoadedCatalog | None:
    """The present catalog, from one that was read over the same connection; None if everything must be read again.

    Raises BadCatalogRow, and what asyncpg raises.
    """
    known = before.snapshot
    async with in_snapshot(connection):
        state = await read_state(connection)
        if state.same_as(before.state):
            return LoadedCatalog(known, state)
        if state.version <= known.version or known.version < state.whole_version:
            return None  # Another server, or a change that rows do not describe.
        changed = changed_by(await connection.fetch(statement("catalog_changes"), before.state.seen, MAX_CHANGES + 1))
        if changed is None:
            return None
        tiers, models, cordons, cells = known.tiers, known.models, known.cordons, known.cells
        if "tiers" in changed.tables:
            tiers = await read_tiers(connection)
            if _inherited(tiers) != _inherited(known.tiers):
                return None
        if changed.tables & {"models", "prices"}:
            models = await read_models(connection)
        if "cordons" in changed.tables:
            cordons = await read_cordons(connection)
        if "cells" in changed.tables:
            cells = await read_cells(connection)
        build = SnapshotBuild(tiers, known)
        customers, keys = list(changed.customers), list(changed.keys)
        if customers:
            await feed(connection, build.add_quotas, "catalog_quotas_of", customers)
            await feed(connection, build.add_customers, "catalog_customers_of", customers)
        build.merge_customers(customers)
        if customers or keys:
            await feed(connection, build.add_keys, "catalog_keys_of", keys, customers)
        build.merge_keys(keys)
    quotas = known.quotas
    if changed.quota_owners:
        quotas = await _replace_quotas(quotas, changed.customers, build.quotas)
    return LoadedCatalog(build.finish(state.version, models, quotas, cordons, cells), state)


def changed_by(rows: Iterable[Row]) -> ChangedIds | None:
    """What the changes affect; None if they are too many, or affect every customer."""
    changed = ChangedIds(set(), set(), set(), set())
    for count, (table, old_id, new_id, old_owner, new_owner, of_tier) in enumerate(rows, 1):
        if count > MAX_CHANGES or table not in _TABLES or (table == "quotas" and of_tier):
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
    """The limits that customers inherit. If one differs, all customers must be built again."""
    return {(tier.name, tier.limits, tier.max_queue_ms) for tier in tiers}


async def _replace_quotas(quotas: tuple[Quota, ...], owners: set[str], fed: list[Quota]) -> tuple[Quota, ...]:
    """The quotas, with those of `owners` replaced by `fed`. The quotas of tiers in `fed` are unchanged."""
    kept: list[Quota] = []
    rest = iter(quotas)
    while piece := list(islice(rest, 10 * PIECE)):
        kept.extend(quota for quota in piece if quota.customer_id not in owners)
        await asyncio.sleep(0)
    return (*kept, *(quota for quota in fed if quota.customer_id is not None))
