"""Rows of the catalog that are valid and have no effect, or another one than their names promise. Pure.

Each finding is of one row. The verbs report those of the rows that they write, `tierlane check` all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ledger.admin.changes import Row
from ledger.catalog.quotas import BadCatalogRow, name_of, parse_quota
from ratelimit.limits import AUXILIARY_COLUMNS, LIMIT_COLUMNS, REQUEST_BUCKET, usable_spread
from ratelimit.quotas import unit_of

MONEY = "money"
UNNAMED = "default model"
"""Kinds of findings that depend on models and prices."""

COLUMNS = {
    "objective": {"slo_ms", "shed_depth", "shed_wait_ms", "max_queue_ms"},
    "shedding": {"shed_depth", "max_queue_depth"},
    "auxiliary limit": {"requests_per_second", "burst", *(column.name for column in AUXILIARY_COLUMNS)},
    UNNAMED: {"pool", "enabled"},
    "cache": {"cache_scope", "cache_ttl_s"},
    "callbacks": {"callback_hosts"},
    "alerts": {"alert_url", "callback_hosts"},
    "spread": {"spread", "tier", "burst", "max_concurrency"},
    "key limit": {"requests_per_second", "burst"},
    MONEY: {"quota", "quotas", "enabled", "usd_per_gpu_s", "usd_per_1000_tokens"},
    "larger quota": {"quota"},
}
"""The columns that each kind of finding is about. A verb that changes none of them has no note of this kind."""

UNSIGNED = "TIERLANE_CALLBACK_SECRET is not set in this shell"
SET_SECRET = "Set the same one, whsec_..., for all gateways, the auditor and this command: docs/limits.md#alerts."  # noqa: S105


class CatalogRows(NamedTuple):
    """Rows to judge, with those that they depend on: tiers, models and prices are complete.

    `prices` have their `state` and `quotas` the name of their customer, as lists show them; `keys` are live.
    """

    tiers: Sequence[Row]
    models: Sequence[Row]
    prices: Sequence[Row]
    customers: Sequence[Row]
    keys: Sequence[Row]
    quotas: Sequence[Row]


class Deployment(NamedTuple):
    """What rows depend on beside each other: whether callbacks can be signed, the pool and default model of the gateways.

    All of it is what the environment of the command has. `alert_problem`: why alerts are not sent to a URL, by the own
    callback hosts of the customer; None if they are. `private_hosts`: those of a list of callback hosts to which none are
    sent, because their addresses are private.
    """

    can_sign: bool
    pool: str
    default_model: str | None
    alert_problem: Callable[[str, str | None], str | None] = lambda _url, _own_hosts: None
    private_hosts: Callable[[str], Sequence[str]] = lambda _hosts: ()


class Finding(NamedTuple):
    """A row without effect: `kind` groups equal faults, `table` and `key` (the primary key's first column) name the row."""

    kind: str
    table: str
    key: object
    said: str
    advice: str

    @property
    def note(self) -> str:
        return f"{self.said} {self.advice}"


def rows_without_effect(rows: CatalogRows, deployment: Deployment) -> list[Finding]:
    """The findings about all rows, in the order of tables."""
    return list(
        chain(
            _of_tiers(rows),
            _of_models(rows, deployment),
            _of_customers(rows, deployment),
            _of_keys(rows),
            _of_quotas(rows),
        )
    )


def _of_tiers(rows: CatalogRows) -> Iterator[Finding]:
    for tier in rows.tiers:
        name, slo_ms, depth = tier["name"], tier["slo_ms"], tier["max_queue_depth"]
        waits = [tier[column] for column in ("shed_wait_ms", "max_queue_ms") if tier[column] is not None]
        if slo_ms is not None and tier["shed_depth"] is None and min(waits, default=slo_ms) >= slo_ms:
            yield Finding(
                "objective",
                "tiers",
                name,
                f"slo_ms {slo_ms:,} of tier {name} rejects nothing: slower responses only degrade health and fire alerts.",
                f"To bound the wait: `tierlane tier set {name} --shed-wait-ms`, below slo_ms.",
            )
        if tier["shed_depth"] is not None and tier["shed_depth"] > depth:
            yield Finding(
                "shedding",
                "tiers",
                name,
                f"shed_depth {tier['shed_depth']:,} of tier {name} is above its max_queue_depth {depth:,}: its queue is full before.",
                "Set shed_depth to at most max_queue_depth.",
            )
        for column, limit in zip(AUXILIARY_COLUMNS, (REQUEST_BUCKET.rate, REQUEST_BUCKET.size), strict=True):
            if limit and tier[column.name] is not None and tier[column.name] >= tier[limit.name]:
                yield Finding(
                    "auxiliary limit",
                    "tiers",
                    name,
                    f"{column.name} {tier[column.name]:,g} of tier {name} is not below its {limit.name} {tier[limit.name]:,g}, "
                    "which applies instead.",
                    f"Set it below {limit.name}, or to none.",
                )


def _of_models(rows: CatalogRows, deployment: Deployment) -> Iterator[Finding]:
    served = sorted(row["name"] for row in rows.models if row["enabled"] and row["pool"] == deployment.pool)
    if len(served) > 1 and deployment.default_model not in served:
        default = deployment.default_model
        why = f"TIERLANE_DEFAULT_MODEL is {default or 'not set'} here"
        for name in served:
            yield Finding(
                UNNAMED,
                "models",
                name,
                f"Requests without `model` are rejected: pool {deployment.pool} has {len(served)} enabled models, and {why}.",
                f"Set TIERLANE_DEFAULT_MODEL of the gateways to one of {', '.join(served)}, or disable all but one.",
            )
    for row in rows.models:
        if row["cache_scope"] == "global" and row["cache_ttl_s"] == 0:
            yield Finding(
                "cache",
                "models",
                row["name"],
                f"cache_scope global of model {row['name']} shares nothing: cache_ttl_s is 0.",
                f"Set the time: `tierlane model set {row['name']} --cache-ttl-s`.",
            )


def _of_customers(rows: CatalogRows, deployment: Deployment) -> Iterator[Finding]:
    tiers = {tier["name"]: tier for tier in rows.tiers}
    for customer in rows.customers:
        name, spread = customer["name"], customer["spread"]
        if customer["callback_hosts"] and not deployment.can_sign:
            yield Finding(
                "callbacks",
                "customers",
                customer["id"],
                f"{UNSIGNED}: gateways that have it send callbacks of {name}, others reject its callback_url.",
                SET_SECRET,
            )
        elif private := deployment.private_hosts(customer["callback_hosts"] or ""):
            yield Finding(
                "callbacks",
                "customers",
                customer["id"],
                f"By the settings of this shell, callbacks of {name} are not sent to {', '.join(private)}: their addresses are private.",
                "Set TIERLANE_CALLBACK_PRIVATE_ADDRESSES=true for the gateways and this command.",
            )
        if url := customer["alert_url"]:
            said, advice = [], []
            if not deployment.can_sign:
                said.append(f"{UNSIGNED}: gateways that have it send alerts of {name}, others do not.")
                advice.append(SET_SECRET)
            if problem := deployment.alert_problem(url, customer["callback_hosts"]):
                said.append(f"By the settings of this shell, alerts of {name} are not sent to its alert_url.")
                advice.append(problem)
            if said:
                yield Finding("alerts", "customers", customer["id"], " ".join(said), " ".join(advice))
        if spread == 1:
            continue
        usable = usable_spread(tuple(_limit(customer, tiers, column.name) for column in LIMIT_COLUMNS), spread)
        if usable < spread:
            yield Finding(
                "spread",
                "customers",
                customer["id"],
                f"spread {spread} of {name} uses {usable} of its cells: at most a third of its burst and of its max_concurrency.",
                "Lower spread, or raise the two.",
            )


def _of_keys(rows: CatalogRows) -> Iterator[Finding]:
    tiers = {tier["name"]: tier for tier in rows.tiers}
    owners = {customer["id"]: customer for customer in rows.customers}
    for key in rows.keys:
        owner = owners.get(key["customer_id"])
        if key["requests_per_second"] is None or owner is None:
            continue
        rate, burst = (_limit(owner, tiers, column) for column in ("requests_per_second", "burst"))
        if key["requests_per_second"] >= (rate or 0) and key["burst"] >= (burst or 0):
            yield Finding(
                "key limit",
                "api_keys",
                key["id"],
                f"The limit of key {key['id']}, {key['requests_per_second']:,g} requests/s (burst {key['burst']:,g}), is not below "
                f"that of {owner['name']}, {rate:,g} (burst {burst:,g}), which applies first.",
                "Lower the key's limit, or remove it.",
            )


def _of_quotas(rows: CatalogRows) -> Iterator[Finding]:
    enabled = {row["name"] for row in rows.models if row["enabled"]}
    model = min(enabled, default="MODEL")
    priced = any(
        row["model"] in enabled
        and row["state"] != "past"
        and (row["usd_per_gpu_s"] > 0 or row["usd_per_1000_tokens"] > 0)
        for row in rows.prices
    )
    of_tier = {customer["id"]: customer["tier"] for customer in rows.customers}
    least: dict[tuple[object, str], tuple[int, str, Any]] = {}
    parsed = []
    for row in rows.quotas:
        try:
            quota = parse_quota(None, "any", row["quota"])
        except BadCatalogRow:
            continue  # Reported as an invalid row.
        name = name_of(quota)
        owner = row["customer_id"] or row["tier"]
        parsed.append((row, name, quota.amount))
        entry = quota.amount, row["quota"], row["id"]
        least[owner, name] = min(entry, least.get((owner, name), entry))
    for key in rows.keys:
        for text in key["quotas"] or () if not priced else ():
            if unit_of(name_of(parse_quota(None, "any", text))).mark == "usd":
                yield Finding(
                    MONEY,
                    "api_keys",
                    key["id"],
                    f"Quota {text} of key {key['id']} counts nothing: no enabled model has a price.",
                    f"Set one: `tierlane price set {model} --usd-per-gpu-s 0.002`.",
                )
    for row, name, amount in parsed:
        whose = f"tier {row['tier']}" if row["tier"] else row["customer"]
        if unit_of(name).mark == "usd" and not priced:
            yield Finding(
                MONEY,
                "quotas",
                row["id"],
                f"Quota {row['quota']} of {whose} counts nothing: no enabled model has a price.",
                f"Set one: `tierlane price set {model} --usd-per-gpu-s 0.002`.",
            )
        tier = of_tier.get(row["customer_id"])
        holders = {row["customer_id"] or row["tier"]: whose, tier: f"tier {tier}"}
        for owner, holder in holders.items():
            other, text, key = least.get((owner, name), (amount, "", row["id"]))
            if key != row["id"] and other <= amount:
                yield Finding(
                    "larger quota",
                    "quotas",
                    row["id"],
                    f"Quota {row['quota']} of {whose} limits nothing: {text} of {holder} is for the same period and not larger.",
                    "Of one period and unit the smallest counts: remove one of the two.",
                )
                break


def _limit(customer: Row, tiers: dict[str, Row], column: str) -> float | None:
    """A base limit of a customer: its own, else its tier's."""
    own: float | None = customer[column]
    of_tier: float | None = tiers[customer["tier"]][column]
    return of_tier if own is None else own
