"""Database rows to the parts of a Snapshot: pure functions that refuse what no gateway should obey.

The table's CHECKs say the same; this is the second lock, for a constraint that was dropped or a newer schema. One bad
row refuses the whole picture: half a change is worse than an old one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

from ledger.snapshot import Customer, Identity, Key, Model, Quota, Tier
from scheduler.errors import TierlaneError

_QUOTA = re.compile(r"([1-9][0-9]*) ?(?:/|per) ?([1-9][0-9]*)? ?(second|minute|hour|day|month|year)s?")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_SHARE_SLACK = 1e-9  # What adding decimal fractions in binary may be off.

Row = Iterable[Any]


class BadCatalogRow(TierlaneError):
    """A row of the catalog makes no sense; the message names its table and key."""


class CatalogRows(NamedTuple):
    """The rows of one version, columns as in ledger/sql/catalog_*.sql."""

    version: int
    tiers: Sequence[Row]
    customers: Sequence[Row]
    keys: Sequence[Row]
    models: Sequence[Row]
    quotas: Sequence[Row]


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


def customers_from(rows: Iterable[Row], tiers: Sequence[Tier]) -> dict[str, Customer]:
    """The customers by id, tier's limits filled in. Raises BadCatalogRow."""
    by_name = {tier.name: tier for tier in tiers}
    customers: dict[str, Customer] = {}
    for id_, name, tier_name, suspended, rate, burst, concurrency, tokens, queue_ms in rows:
        tier = by_name.get(tier_name)
        if tier is None:
            raise BadCatalogRow(f"customers row {name!r} has the unknown tier {tier_name!r}.")
        customer = Customer(
            id_,
            name,
            tier_name,
            suspended,
            tier.requests_per_second if rate is None else rate,
            tier.burst if burst is None else burst,
            tier.max_concurrency if concurrency is None else concurrency,
            tier.tokens_per_minute if tokens is None else tokens,
            tier.max_queue_ms if queue_ms is None else queue_ms,
        )
        _positive("customers", name, rate=customer.requests_per_second, burst=customer.burst)
        _positive("customers", name, wait=customer.max_queue_ms, concurrency=customer.max_concurrency)
        customers[id_] = customer
    return customers


def keys_from(rows: Iterable[Row], customers: Mapping[str, Customer]) -> Iterator[tuple[str, Key]]:
    """The keys one by one, so that a caller with very many can let others run in between. Raises BadCatalogRow."""
    for key_id, customer_id, secret_hash, expires_at, revoked in rows:
        customer = customers.get(customer_id)
        if customer is None or len(secret_hash) != 32:
            raise BadCatalogRow(f"api_keys row {key_id!r} has no customer or no SHA-256.")
        identity = Identity(
            key_id,
            customer_id,
            customer.name,
            customer.tier,
            customer.requests_per_second,
            customer.burst,
            customer.max_concurrency,
            customer.tokens_per_minute,
            customer.max_queue_ms,
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


def quotas_from(rows: Iterable[Row]) -> tuple[Quota, ...]:
    """The quotas, taken apart. Raises BadCatalogRow."""
    return tuple(parse_quota(customer_id, tier, text) for customer_id, tier, text in rows)


def parse_quota(customer_id: str | None, tier: str | None, text: str) -> Quota:
    """`10000/day`, `10 per 2 hours`: the notation of the library `limits`. Raises BadCatalogRow."""
    form = _QUOTA.fullmatch(text)
    if form is None or (customer_id is None) == (tier is None):
        raise BadCatalogRow(f"quotas row {text!r} is not a quota of one customer or one tier, such as 10000/day.")
    amount, every, unit = form.groups()
    return Quota(customer_id, tier, int(amount), int(every or 1), unit, text)


def _positive(table: str, key: str, **numbers: float) -> None:
    for what, number in numbers.items():
        if not (number > 0 and isfinite(number)):
            raise BadCatalogRow(f"{table} row {key!r} has a {what} of {number}, which is not above 0.")


def _require(condition: bool, table: str, key: str, fault: str) -> None:  # noqa: FBT001 - it is the condition
    if not condition:
        raise BadCatalogRow(f"{table} row {key!r} {fault}.")
