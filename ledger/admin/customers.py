"""Customers, their keys and their quotas: create and change customers; issue, rotate and revoke keys; set and remove quotas.

The secret of a key is created here and never sent to PostgreSQL. A customer or tier has one quota for each period and unit, so a
new amount replaces the old one. Functions raise ChangeRejected if the change is not possible, and BadValue for an invalid quota.
"""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from ledger.admin.changes import Change, Row, add, alter, fetch, find, remove, transaction_time
from ledger.admin.columns import settable
from ledger.admin.errors import QUOTA_FORMS, BadValue, ChangeRejected
from ledger.admin.rows import check_models, check_tier, find_customer
from ledger.catalog.api_key import NewKey, mint
from ledger.catalog.quotas import BadCatalogRow, key_quotas_problem, name_of, parse_quota
from ledger.catalog.snapshot import Quota
from ledger.catalog.webhook_secret import LEAST_GRACE, MOST_GRACE, TooManySecrets, WebhookSecrets
from ledger.postgres import Connection
from ledger.schema.catalog import api_keys, customers, quotas, tiers
from ratelimit.alerts import has_alerts
from ratelimit.periods import zone_of
from ratelimit.quotas import NOTATIONS, PERIOD_S

_PERIOD_ALONE = re.compile(rf"(({'|'.join(NOTATIONS)}) ?(/|per) ?)?([1-9][0-9]* ?)?({'|'.join(PERIOD_S)})s?")


async def create_customer(connection: Connection, name: str, values: Row) -> Change:
    """Add a customer; `values` has its tier."""
    await check_tier(connection, values["tier"])
    await check_models(connection, values.get("models"))
    check_zone(values.get("time_zone"))
    return await add(connection, customers, {"name": name, **values})


async def alter_customer(connection: Connection, name_or_id: str, values: Row) -> Change:
    """Set columns of a customer."""
    if "tier" in values:
        await check_tier(connection, values["tier"])
    await check_models(connection, values.get("models"))
    check_zone(values.get("time_zone"))
    return await alter(connection, customers, await find_customer(connection, name_or_id, lock=True), values)


def check_zone(name: str | None) -> None:
    """Raises BadValue for a time zone that does not exist."""
    try:
        if name is not None:
            zone_of(name)
    except ValueError as error:
        raise BadValue(f"time_zone: {error}.", "time_zone") from None


async def rotate_webhook_secret(connection: Connection, name_or_id: str, grace: timedelta) -> Change:
    """Add a webhook secret to a customer; those that are valid stay valid for `grace`."""
    if not LEAST_GRACE <= grace <= MOST_GRACE:
        raise BadValue("grace must be 1h to 7d.", "grace")
    old = await find_customer(connection, name_or_id, lock=True)
    secrets = WebhookSecrets(*(old[name] for name in WebhookSecrets._fields))
    try:
        new = secrets.rotated(grace, await transaction_time(connection))
    except TooManySecrets as error:
        raise ChangeRejected(str(error)) from None
    return await alter(connection, customers, old, new._asdict())


def key_limit(values: Row) -> Row:
    """The limit of a new key: a rate without a burst gets a burst of one second."""
    rate = values.get("requests_per_second")
    return values if rate is None or values.get("burst") is not None else values | {"burst": max(1.0, rate)}


async def create_key(
    connection: Connection, customer: str, name: str, lifetime: timedelta | None, limit: Row
) -> tuple[NewKey, Change]:
    """Issue a key to a customer, by name or id, with a limit of `key_limit`."""
    owner = await find_customer(connection, customer)
    _check_key_quotas(limit)
    await check_models(connection, limit.get("models"), owner)
    return await _issue(connection, owner, name, lifetime, limit)


async def alter_key(connection: Connection, key_id: str, values: Row) -> Change:
    """Change the limit, the weight, the models or the quotas of a key."""
    _check_key_quotas(values)
    old = await find(connection, api_keys, key_id)
    await check_models(connection, values.get("models"), await find(connection, customers, old["customer_id"]))
    return await alter(connection, api_keys, old, values)


async def rotate_key(
    connection: Connection, key_id: str, grace: timedelta, lifetime: timedelta | None
) -> tuple[NewKey, list[Change]]:
    """Issue a second key with the same name, limit, weight, models and quotas, which both keys use up together. The old one
    expires after `grace`, if not before.

    Without `lifetime` the new key gets the lifetime of the old one.
    """
    old = await find(connection, api_keys, key_id)
    now = await transaction_time(connection)
    for ended, how in ((old["revoked_at"], "revoked"), (old["expires_at"], "expired")):
        if ended is not None and ended <= now:
            since = f"{ended:%Y-%m-%d %H:%M:%S} UTC"
            raise ChangeRejected(f"Key {old['id']} cannot be rotated: it is {how} since {since}; create a new one.")
    meant = old["expires_at"] and old["expires_at"] - old["created_at"]
    owner = await find(connection, customers, old["customer_id"])
    limit = {column.name: old[column.name] for column in settable(api_keys)}
    if old["quotas"]:
        limit["quota_key"] = old["quota_key"] or old["id"]
    new, issued = await _issue(connection, owner, old["name"], lifetime or meant, limit)
    end = min(now + grace, old["expires_at"] or datetime.max.replace(tzinfo=now.tzinfo))
    return new, [issued, await alter(connection, api_keys, old, {"expires_at": end})]


async def revoke_key(connection: Connection, key_id: str) -> Change:
    """Revoke a key, if it is not revoked yet."""
    old = await find(connection, api_keys, key_id)
    return await alter(
        connection, api_keys, old, {"revoked_at": old["revoked_at"] or await transaction_time(connection)}
    )


def _check_key_quotas(values: Row) -> None:
    """Raises BadValue for quotas of a key that are invalid, or two of one period and unit."""
    problem = key_quotas_problem(values.get("quotas") or ())
    if problem is not None:
        raise BadValue(f"quotas: {problem}.", "quotas")


async def _issue(
    connection: Connection, owner: Row, name: str, lifetime: timedelta | None, limit: Row
) -> tuple[NewKey, Change]:
    key = mint()
    values = {
        "id": key.id,
        "customer_id": owner["id"],
        "name": name,
        "secret_hash": key.secret_hash,
        "expires_at": lifetime and await transaction_time(connection) + lifetime,
        **limit,
    }
    return key, await add(connection, api_keys, values)


async def set_quota(
    connection: Connection, customer: str | None, tier: str | None, text: str, values: Row | None = None
) -> list[Change]:
    """Set a quota of a customer, by name or id, or of each customer of a tier. `values`: other columns, which else stay."""
    period, values = _period(text), values or {}
    check_alerts(text, values.get("alert_shares"))
    owner, name = await _owner(connection, customer, tier)
    same = [row for row in await _quotas_of(connection, owner) if _period(row["quota"]) == period]
    if not same:
        return [await add(connection, quotas, {**owner, "quota": text, **values}, _named(text, name))]
    # Several rows of one period can only be created in SQL. The smallest applied; now one is kept.
    kept = next((row for row in same if row["quota"] == text), same[0])
    surplus = [await remove(connection, quotas, row, _named(row["quota"], name)) for row in same if row is not kept]
    return [await alter(connection, quotas, kept, {"quota": text, **values}, _named(kept["quota"], name)), *surplus]


def check_alerts(text: str, shares: Sequence[float] | None) -> None:
    """Raises BadValue for alerts of a quota whose periods are too short for them."""
    if shares and not has_alerts(_period(text)):
        raise BadValue(
            f"alert_shares: quota {text} has no alerts: its periods are shorter than an hour.", "alert_shares"
        )


async def remove_quota(connection: Connection, customer: str | None, tier: str | None, text: str) -> list[Change]:
    """Remove the quota with this text, or with a period only (`day`, `usd/month`) that of the period."""
    owner, name = await _owner(connection, customer, tier)
    gone = quotas_named(await _quotas_of(connection, owner), text, name)
    return [await remove(connection, quotas, row, _named(row["quota"], name)) for row in gone]


def quotas_named(have: Sequence[Row], text: str, name: str) -> list[Row]:
    """Those of the quotas of an owner, called `name`, that a text names. Raises ChangeRejected if there is none."""
    alone = _PERIOD_ALONE.fullmatch(text)
    period = _period(text if alone is None else f"1 {text}" if alone[2] else f"1/{text}")
    gone = [
        row
        for row in have
        if _period(row["quota"]) == period
        and (alone is not None or parsed_quota(row["quota"]).amount == parsed_quota(text).amount)
    ]
    if not gone:
        others = ", ".join(row["quota"] for row in have) or "none"
        raise ChangeRejected(f"There is no quota {text} of {name}; it has {others}.")
    return gone


async def _owner(connection: Connection, customer: str | None, tier: str | None) -> tuple[Row, str]:
    """The columns that identify the owner, and its name. Its row is locked, so that concurrent changes wait."""
    if customer is not None:
        row = await find_customer(connection, customer, lock=True)
        return {"customer_id": row["id"], "tier": None}, row["name"]
    await find(connection, tiers, tier)
    return {"customer_id": None, "tier": tier}, f"tier {tier}"


async def _quotas_of(connection: Connection, owner: Row) -> list[Row]:
    conditions: list[Any] = [quotas.c[column].is_not_distinct_from(value) for column, value in owner.items()]
    return await fetch(connection, select(quotas).where(*conditions).order_by(quotas.c.id).with_for_update())


def _period(text: str) -> str:
    return name_of(parsed_quota(text))


def parsed_quota(text: str) -> Quota:
    """The quota of a text. Raises BadValue."""
    try:
        return parse_quota(None, "any", text)
    except BadCatalogRow:
        raise BadValue(
            f"quota must be an amount and a period, not {text!r} (such as {QUOTA_FORMS}).", "quota"
        ) from None


def _named(text: str, owner: str) -> str:
    return f"{text} of {owner}"
