"""Quotas in an admin's hands: one of each period for a customer or a tier, so that a new amount replaces the old one."""

import re
from typing import Any

from sqlalchemy import select

from ledger.admin.changes import Change, Row, add, alter, fetch, find, remove
from ledger.admin.errors import BadValue, ChangeRejected
from ledger.admin.rows import find_customer
from ledger.catalog.quotas import BadCatalogRow, parse_quota, period_of
from ledger.catalog.snapshot import Quota
from ledger.postgres import Connection
from ledger.schema.catalog import quotas, tiers

_PERIOD_ALONE = re.compile(r"([1-9][0-9]* ?)?(second|minute|hour|day|month|year)s?")


async def set_quota(connection: Connection, customer: str | None, tier: str | None, text: str) -> list[Change]:
    """Let a customer, by name or id, or each customer of a tier have this quota. Raises Refused, BadValue."""
    period = _period(text)
    owner, name = await _owner(connection, customer, tier)
    same = [row for row in await _quotas_of(connection, owner) if _period(row["quota"]) == period]
    if not same:
        return [await add(connection, quotas, {**owner, "quota": text}, _named(text, name))]
    # More than one row of a period can only have come by SQL; the smallest held, and now there is one.
    kept = next((row for row in same if row["quota"] == text), same[0])
    surplus = [await remove(connection, quotas, row, _named(row["quota"], name)) for row in same if row is not kept]
    return [await alter(connection, quotas, kept, {"quota": text}, _named(kept["quota"], name)), *surplus]


async def remove_quota(connection: Connection, customer: str | None, tier: str | None, text: str) -> list[Change]:
    """Take away the quota of this text, or with a period alone (`day`) that of the period. Raises Refused, BadValue."""
    alone = _PERIOD_ALONE.fullmatch(text) is not None
    period = _period(f"1/{text}" if alone else text)
    owner, name = await _owner(connection, customer, tier)
    have = await _quotas_of(connection, owner)
    gone = [row for row in have if _period(row["quota"]) == period and (alone or _same(row["quota"], text))]
    if not gone:
        others = ", ".join(row["quota"] for row in have) or "none"
        raise ChangeRejected(f"There is no quota {text} of {name}; it has {others}.")
    return [await remove(connection, quotas, row, _named(row["quota"], name)) for row in gone]


async def _owner(connection: Connection, customer: str | None, tier: str | None) -> tuple[Row, str]:
    """The columns that say whose quota it is, and the name. Its row is locked, so that two admins take turns."""
    if customer is not None:
        row = await find_customer(connection, customer, lock=True)
        return {"customer_id": row["id"], "tier": None}, row["name"]
    await find(connection, tiers, tier)
    return {"customer_id": None, "tier": tier}, f"tier {tier}"


async def _quotas_of(connection: Connection, owner: Row) -> list[Row]:
    conditions: list[Any] = [quotas.c[column].is_not_distinct_from(value) for column, value in owner.items()]
    return await fetch(connection, select(quotas).where(*conditions).order_by(quotas.c.id).with_for_update())


def _period(text: str) -> str:
    return period_of(_parsed(text))


def _same(one: str, other: str) -> bool:
    return _parsed(one).amount == _parsed(other).amount


def _parsed(text: str) -> Quota:
    try:
        return parse_quota(None, "any", text)
    except BadCatalogRow:
        raise BadValue(
            f"quota must be a number of requests and a period, not {text!r} (for example 10000/day or 500/hour)."
        ) from None


def _named(text: str, owner: str) -> str:
    return f"{text} of {owner}"
