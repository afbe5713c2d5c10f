"""Database rows to the parts of a Snapshot: pure functions that refuse what no gateway should obey.

The table's CHECKs say the same; this is the second lock, for a constraint that was dropped or a newer schema. One bad
row refuses the whole picture: half a change is worse than an old one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf, isfinite
from typing import Any

from ledger.catalog.quotas import BadCatalogRow, Held, parse_quota
from ledger.catalog.snapshot import Customer, Identity, Key, Model, Tier

__all__ = ["BadCatalogRow", "Row", "customers_from", "keys_from", "models_from", "parse_quota", "tiers_from"]

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_SHARE_SLACK = 1e-9  # What adding decimal fractions in binary may be off.

Row = Iterable[Any]
"""Columns as in ledger/sql/catalog_*.sql."""


def tiers_from(rows: Iterable[Row]) -> tuple[Tier, ...]:
    """The tiers by priority. Raises BadCatalogRow."""
    tiers = tuple(sorted((Tier(*row) for row in rows), key=lambda tier: tier.priority))
    for tier in tiers:
        _require(_NAME.fullmatch(tier.name) is not None, "tiers", tier.name, "is not a usable name")
        _require(0 <= tier.guaranteed_share <= 1, "tiers", tier.name, "has a guaranteed_share outside 0..1")
        _positive("tiers", tier.name, rate=tier.requests_per_second, burst=tier.burst, depth=tier.max_queue_depth)
        _positive("tiers", tier.name, wait=tier.max_queue_ms, concurrency=tier.max_concurrency)
    _require(bool(tiers), "tiers", "*", "has no rows")
    _require(len({tier.priority for tier in tiers}) == len(tiers), "tiers", "*", "has two rows of one priority")
    total = sum(tier.guaranteed_share for tier in tiers)
    _require(total <= 1 + _SHARE_SLACK, "tiers", "*", "guarantees more than the whole capacity")
    return tiers


def customers_from(
    rows: Iterable[Row], tiers: Mapping[str, Tier], held: Callable[[str, str], Held]
) -> Iterator[tuple[str, Customer]]:
    """The customers by id, tier's limits filled in; `held` tells the quotas of a customer and tier.

    One by one, so that a caller with very many can let others run in between. Raises BadCatalogRow.
    """
    for id_, name, tier_name, suspended, rate, burst, concurrency, tokens, queue_ms, hosts in rows:
        tier = tiers.get(tier_name)
        if tier is None:
            raise BadCatalogRow(f"customers row {name!r} has the unknown tier {tier_name!r}.")
        customer = Customer(
            id_,
            name,
            tier.name,  # Not the row's own text: one string for all.
            suspended,
            tier.requests_per_second if rate is None else rate,
            tier.burst if burst is None else burst,
            tier.max_concurrency if concurrency is None else concurrency,
            tier.tokens_per_minute if tokens is None else tokens,
            tier.max_queue_ms if queue_ms is None else queue_ms,
            held(id_, tier.name),
            tier.priority,
            hosts,
        )
        if not (0 < customer.requests_per_second < inf and 0 < customer.burst < inf):
            _positive("customers", name, rate=customer.requests_per_second, burst=customer.burst)
        if customer.max_queue_ms <= 0 or customer.max_concurrency <= 0:
            _positive("customers", name, wait=customer.max_queue_ms, concurrency=customer.max_concurrency)
        yield id_, customer


def keys_from(rows: Iterable[Row], customers: Mapping[str, Customer]) -> Iterator[tuple[str, Key]]:
    """The keys one by one, as `customers_from`. Raises BadCatalogRow."""
    for key_id, customer_id, secret_hash, expires_at, revoked, rate, burst in rows:
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
            customer.requests_per_second,
            customer.burst,
            customer.max_concurrency,
            customer.tokens_per_minute,
            customer.max_queue_ms,
            customer.quotas,
            rate or 0.0,
            burst or 0.0,
            customer.priority,
        )
        expiry = inf if expires_at is None else expires_at
        yield key_id, Key(identity, secret_hash, expiry, revoked, customer.suspended)


def models_from(rows: Iterable[Row]) -> dict[str, Model]:
    """The models by name. Raises BadCatalogRow."""
    models = {model.name: model for model in (Model(*row) for row in rows)}
    for name, model in models.items():
        _positive("models", name, batch=model.max_batch_size, timeout=model.gpu_timeout_ms, rate=model.rps_per_gpu)
        _require(0 < model.target_utilization <= 1, "models", name, "has a target_utilization outside 0..1")
        _require(model.max_wait_ms >= 0 and model.cache_ttl_s >= 0, "models", name, "has a negative time")
    return models


def _positive(table: str, key: str, **numbers: float) -> None:
    for what, number in numbers.items():
        if not (number > 0 and isfinite(number)):
            raise BadCatalogRow(f"{table} row {key!r} has a {what} of {number}, which is not above 0.")


def _require(condition: bool, table: str, key: str, fault: str) -> None:  # noqa: FBT001 - it is the condition
    if not condition:
        raise BadCatalogRow(f"{table} row {key!r} {fault}.")
