"""Reads the whole catalog in one read-only transaction and builds a snapshot.

It is read in pieces, because building a hundred thousand keys at once would block the requests of the process. Rows are
checked although the tables have CHECKs: a constraint may have been dropped, or the schema may be newer. One invalid row
rejects the whole snapshot, since an old snapshot is better than half of a change.
"""

import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from math import inf, isfinite
from typing import Any, NamedTuple, TypeVar

from ledger.catalog.quotas import AlertShares, BadCatalogRow, Held, QuotaBook, key_quotas
from ledger.catalog.snapshot import (
    NO_CORDONS,
    CellRow,
    Customer,
    Identity,
    Key,
    Model,
    Price,
    Quota,
    Snapshot,
    Tier,
    WorkerCordon,
    allowed_models,
)
from ledger.postgres import Connection, statement
from ratelimit.limits import AUXILIARY_COLUMNS, LIMIT_COLUMNS, usable_spread
from ratelimit.periods import zone_of

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_SHARE_SLACK = 1e-9  # The error of adding decimal fractions in binary.
_NONE_OWN = [None] * len(LIMIT_COLUMNS)
_LIMITS = ", ".join(column.name for column in LIMIT_COLUMNS)

STATES = ("open", "draining", "closed")

Row = Iterable[Any]
"""Columns as in ledger/sql/catalog.sql."""

T = TypeVar("T")

CHANNEL = "tierlane_catalog"
PIECE = 1000
"""Rows that are read and built before other tasks run: about two milliseconds."""


def tiers_from(rows: Iterable[Row]) -> tuple[Tier, ...]:
    """The tiers by priority. Raises BadCatalogRow."""
    count = len(LIMIT_COLUMNS)
    found = [
        Tier(name, priority, share, tuple(others[:count]), *others[count:]) for name, priority, share, *others in rows
    ]
    tiers = tuple(sorted(found, key=lambda tier: tier.priority))
    for tier in tiers:
        _require(_NAME.fullmatch(tier.name) is not None, "tiers", tier.name, "is not a usable name")
        _require(0 <= tier.guaranteed_share <= 1, "tiers", tier.name, "has a guaranteed_share outside 0..1")
        _positive(
            "tiers", tier.name, wait=1 if tier.max_queue_ms is None else tier.max_queue_ms, depth=tier.max_queue_depth
        )
        success = 0.5 if tier.slo_success is None else tier.slo_success
        _require(0 < success < 1, "tiers", tier.name, "has a slo_success that is not between 0 and 1")
        _require(tier.slo_ms is None or tier.slo_ms > 0, "tiers", tier.name, "has a slo_ms that is not above 0")
        for column, value in zip(LIMIT_COLUMNS, tier.limits, strict=True):
            if column.required or value is not None:
                _positive("tiers", tier.name, **{column.name: value or 0.0})
        for column, value in zip(AUXILIARY_COLUMNS, (tier.auxiliary_rate, tier.auxiliary_burst), strict=True):
            if value is not None:
                _positive("tiers", tier.name, **{column.name: value})
    _require(bool(tiers), "tiers", "*", "has no rows")
    _require(len({tier.priority for tier in tiers}) == len(tiers), "tiers", "*", "has two rows of one priority")
    total = sum(tier.guaranteed_share for tier in tiers)
    _require(total <= 1 + _SHARE_SLACK, "tiers", "*", "guarantees more than the whole capacity")
    return tiers


def customers_from(
    rows: Iterable[Row],
    tiers: Mapping[str, Tier],
    held: Callable[[str, str], Held],
    alert_shares: Callable[[str, str], tuple[tuple[str, AlertShares], ...]],
) -> Iterator[tuple[str, Customer]]:
    """The customers by id, with the limits of their tiers. `held` and `alert_shares` are those of a QuotaBook.

    A generator, so that the caller can run other tasks in between. Raises BadCatalogRow.
    """
    for id_, name, tier_name, suspended, *own, queue_ms, hosts, weight, cell, spread, models, zone, url in rows:
        tier = tiers.get(tier_name)
        if tier is None:
            raise BadCatalogRow(f"customers row {name!r} has the unknown tier {tier_name!r}.")
        limits = (
            tier.limits
            if own == _NONE_OWN
            else tuple([whole if part is None else part for part, whole in zip(own, tier.limits, strict=True)])
        )
        customer = Customer(
            id_,
            name,
            tier.name,  # Not the text of the row: one string object for all.
            suspended,
            limits,
            tier.max_queue_ms if queue_ms is None else queue_ms,
            held(id_, tier.name),
            tier.priority,
            hosts,
            weight,
            cell,
            spread if spread == 1 else usable_spread(limits, spread),
            None if models is None else tuple(models),
            "" if zone is None else _known_zone(name, zone),
            url,
            alert_shares(id_, tier.name),
        )
        if queue_ms is not None and queue_ms <= 0:
            _positive("customers", name, wait=queue_ms)
        if customer.limits is not tier.limits:
            for column, value in zip(LIMIT_COLUMNS, own, strict=True):
                if value is not None:
                    _positive("customers", name, **{column.name: value})
        yield id_, customer


def keys_from(rows: Iterable[Row], customers: Mapping[str, Customer]) -> Iterator[tuple[str, Key]]:
    """The keys by id. A generator, as `customers_from`. Raises BadCatalogRow."""
    for key_id, customer_id, secret_hash, expires_at, revoked, rate, burst, weight, models, own, owner in rows:
        customer = customers.get(customer_id)
        if customer is None or len(secret_hash) != 32:
            raise BadCatalogRow(f"api_keys row {key_id!r} has no customer or no SHA-256.")
        if rate is not None or burst is not None:
            _positive("api_keys", key_id, rate=rate or 0.0, burst=burst or 0.0)
        identity = Identity(
            key_id,
            customer.id,
            customer.name,
            customer.tier,
            customer.max_queue_ms,
            customer.priority,
            customer.cell,
            customer.models if models is None else allowed_models(models, customer.models),
            limits=customer.limits,
            quotas=(*customer.quotas, *key_quotas(key_id, owner, own)) if own else customer.quotas,
            key_rate=rate or 0.0,
            key_burst=burst or 0.0,
            weight=customer.weight,
            key_weight=weight or 0.0,
            spread=customer.spread,
            zone=customer.zone,
        )
        expiry = inf if expires_at is None else expires_at
        yield key_id, Key(identity, secret_hash, expiry, revoked, customer.suspended)


def models_from(rows: Iterable[Row], price_rows: Iterable[Row] = ()) -> dict[str, Model]:
    """The models by name. `price_rows` are in order. Raises BadCatalogRow."""
    prices: dict[str, tuple[Price, ...]] = {}
    for name, valid_from, *amounts in price_rows:
        price = Price(valid_from, *[amount or 0.0 for amount in amounts])
        _require(all(isfinite(part) and part >= 0 for part in price[1:]), "prices", name, "has a price below 0")
        prices[name] = (*prices.get(name, ()), price)
    models: dict[str, Model] = {}
    for name, *columns, capabilities, tpot_ms in rows:
        allowed = None if capabilities is None else frozenset(capabilities)
        model = models[name] = Model(*(name, *columns, allowed, prices.get(name, ()), tpot_ms))
        _positive("models", name, batch=model.max_batch_size, rate=model.rps_per_gpu)
        _require(0 < model.target_utilization <= 1, "models", name, "has a target_utilization outside 0..1")
        _require(model.tpot_ms is None or model.tpot_ms > 0, "models", name, "has a tpot_ms that is not above 0")
        _require(model.max_wait_ms >= 0 and model.cache_ttl_s >= 0, "models", name, "has a negative time")
    return models


def cells_from(rows: Iterable[Row]) -> tuple[CellRow, ...]:
    """The cells by name. Raises BadCatalogRow."""
    cells = tuple(CellRow(*row) for row in rows)
    for cell in cells:
        _require(_NAME.fullmatch(cell.name) is not None, "cells", cell.name, "is not a usable name")
        _require(cell.state in STATES, "cells", cell.name, f"has the state {cell.state!r}")
        _positive("cells", cell.name, weight=cell.weight)
    return cells


def _known_zone(customer: str, name: str) -> str:
    try:
        zone_of(name)
    except ValueError as error:
        raise BadCatalogRow(f"customers row {customer!r} has a wrong time_zone: {error}.") from None
    return name


def _positive(table: str, key: str, **numbers: float) -> None:
    for what, number in numbers.items():
        if not (number > 0 and isfinite(number)):
            raise BadCatalogRow(f"{table} row {key!r} has a {what} of {number}, which is not above 0.")


def _require(condition: bool, table: str, key: str, fault: str) -> None:  # noqa: FBT001 - it is the condition
    if not condition:
        raise BadCatalogRow(f"{table} row {key!r} {fault}.")


@contextmanager
def readable() -> Iterator[None]:
    """Raise BadCatalogRow for values of an impossible type in the block."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise BadCatalogRow(f"The catalog cannot be read: {error}") from error


class SnapshotBuild:
    """Builds a snapshot from quotas, then customers, then keys: each needs those before it. All raise BadCatalogRow.

    Objects that are equal in `known`, the previous snapshot, are shared with it. A new snapshot of a large catalog then
    needs little memory, and little has to be freed when the old one is dropped.
    """

    def __init__(self, tiers: tuple[Tier, ...], known: Snapshot | None = None) -> None:
        self._tiers = tiers
        self._by_name = {tier.name: tier for tier in tiers}
        self._known_customers = {} if known is None else known.customers
        self._known_keys = {} if known is None else known.keys
        self._known_has_key_quotas = known is not None and known.has_key_quotas
        self._has_key_quotas = False
        self._book = QuotaBook()
        self._new_customers: dict[str, Customer] = {}
        self._new_keys: dict[str, Key] = {}
        self._customers: Mapping[str, Customer] = self._new_customers
        self._keys: Mapping[str, Key] = self._new_keys

    @property
    def quotas(self) -> list[Quota]:
        """The quotas that were added."""
        return self._book.quotas

    def add_quotas(self, rows: Iterable[Row]) -> None:
        with readable():
            for row in rows:
                self._book.add(*row)

    def add_customers(self, rows: Iterable[Row]) -> None:
        with readable():
            for customer_id, customer in customers_from(rows, self._by_name, self._book.held, self._book.alert_shares):
                known = self._known_customers.get(customer_id)
                self._new_customers[customer_id] = known if known == customer else customer

    def add_keys(self, rows: Iterable[Row]) -> None:
        with readable():
            for key_id, key in keys_from(rows, self._customers):
                known = self._known_keys.get(key_id)
                self._new_keys[key_id] = known if known == key else key
                if len(key.identity.quotas) > len(self._customers[key.identity.customer_id].quotas):
                    self._has_key_quotas = True

    def merge_customers(self, changed: Collection[str]) -> None:
        """Combine the customers of `known`, without those of `changed`, with the added ones."""
        self._customers = _merged(self._known_customers, changed, self._new_customers)

    def merge_keys(self, changed: Collection[str]) -> None:
        self._keys = _merged(self._known_keys, changed, self._new_keys)
        self._has_key_quotas = self._has_key_quotas or self._known_has_key_quotas

    def finish(
        self,
        version: int,
        models: Mapping[str, Model],
        quotas: tuple[Quota, ...] | None = None,
        cordons: Mapping[str, WorkerCordon] = NO_CORDONS,
        cells: tuple[CellRow, ...] = (),
    ) -> Snapshot:
        """The snapshot; no rows may be added after this. `quotas`: all quotas, if not only the added ones."""
        all_quotas = tuple(self._book.quotas) if quotas is None else quotas
        return Snapshot(
            version,
            self._tiers,
            self._customers,
            self._keys,
            models,
            all_quotas,
            cordons,
            cells,
            self._has_key_quotas,
        )


def _merged(known: Mapping[str, T], changed: Collection[str], added: Mapping[str, T]) -> Mapping[str, T]:
    if not changed and not added:
        return known
    all_ = dict(known)
    for id_ in changed:
        if id_ not in added:
            all_.pop(id_, None)
    all_.update(added)  # Overwritten and not removed first: a dict that shrank and grew again is slow to copy.
    return all_


class CatalogState(NamedTuple):
    """The version of the catalog at one moment."""

    version: int
    changed_at: str  # With the version, since a change lost in a failover and a later change may have the same version.
    whole_version: int  # config_changes does not describe changes up to this version completely.
    seen: str  # The pg_snapshot in which this was read.

    def same_as(self, other: "CatalogState") -> bool:
        return self.version == other.version and self.changed_at == other.changed_at


class LoadedCatalog(NamedTuple):
    """A snapshot of the catalog and its version."""

    snapshot: Snapshot
    state: CatalogState


async def load(connection: Connection) -> Snapshot:
    """Read and check everything. Raises BadCatalogRow, and what asyncpg raises."""
    return (await load_whole(connection)).snapshot


async def load_whole(connection: Connection, known: Snapshot | None = None) -> LoadedCatalog:
    """Read and check everything. Equal objects are shared with `known`. Raises BadCatalogRow, and what asyncpg raises."""
    async with in_snapshot(connection):
        state = await read_state(connection)
        build = SnapshotBuild(await read_tiers(connection), known)
        models, cordons = await read_models(connection), await read_cordons(connection)
        cells = await read_cells(connection)
        await feed(connection, build.add_quotas, "catalog_quotas")
        await feed(connection, build.add_customers, "catalog_customers")
        await feed(connection, build.add_keys, "catalog_keys")
    return LoadedCatalog(build.finish(state.version, models, cordons=cordons, cells=cells), state)


@asynccontextmanager
async def in_snapshot(connection: Connection) -> AsyncIterator[None]:
    """A transaction in which the version and all rows are of one PostgreSQL snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        yield


async def read_state(connection: Connection) -> CatalogState:
    """The present version. Raises BadCatalogRow if the row is missing, and what asyncpg raises."""
    row = await connection.fetchrow(statement("catalog_state"))
    if row is None:
        raise BadCatalogRow("catalog_version has no row.")
    return CatalogState(*row)


async def read_tiers(connection: Connection) -> tuple[Tier, ...]:
    """The tiers by priority. Raises BadCatalogRow, and what asyncpg raises."""
    rows = await connection.fetch(catalog_statement("catalog_tiers"))
    with readable():
        return tiers_from(rows)


async def read_models(connection: Connection) -> dict[str, Model]:
    """The models by name. Raises BadCatalogRow, and what asyncpg raises."""
    rows = await connection.fetch(statement("catalog_models"))
    prices = await connection.fetch(statement("catalog_prices"))
    with readable():
        return models_from(rows, prices)


async def read_cordons(connection: Connection) -> dict[str, WorkerCordon]:
    """The cordons by worker. Raises what asyncpg raises."""
    return {worker: WorkerCordon(*row) for worker, *row in await connection.fetch(statement("catalog_cordons"))}


async def read_cells(connection: Connection) -> tuple[CellRow, ...]:
    """The cells by name. Raises BadCatalogRow, and what asyncpg raises."""
    with readable():
        return cells_from(await connection.fetch(statement("catalog_cells")))


async def count_callback_customers(connection: Connection) -> int:
    """How many customers have hosts of callbacks of their own. Raises what asyncpg raises."""
    return int(await connection.fetchval("SELECT count(*) FROM customers WHERE callback_hosts <> ''"))


async def feed(connection: Connection, take: Callable[[Sequence[Row]], None], name: str, *args: Any) -> None:
    """Pass the rows of a query to `take` in pieces, between which other tasks run."""
    cursor = await connection.cursor(catalog_statement(name), *args)
    while rows := await cursor.fetch(PIECE):
        take(rows)


@cache
def catalog_statement(name: str) -> str:
    """A statement of the catalog, with the columns of all limits in the place of `:limits`."""
    return statement(name).replace(":limits", _LIMITS)
