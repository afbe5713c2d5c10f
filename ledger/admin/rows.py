"""What an admin looks at: rows of the catalog with what people ask for beside them. All raise what asyncpg raises."""

from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Select, String, Text, and_, case, cast, func, or_, select

from ledger.admin.changes import missing, seen
from ledger.admin.query import Row, fetch, fetch_one
from ledger.postgres import Connection
from ledger.schema.catalog import api_keys, customers, models, quotas, tiers

_live = and_(api_keys.c.revoked_at.is_(None), or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > func.now()))
_state = case(
    (api_keys.c.revoked_at.is_not(None), "revoked"),
    (api_keys.c.expires_at <= func.now(), "expired"),
    (customers.c.status == "suspended", "suspended"),
    else_="live",
).label("state")


def _count(table: Any, *conditions: Any) -> Any:
    return select(func.count()).select_from(table).where(*conditions).scalar_subquery()


async def list_tiers(connection: Connection, name: str | None = None) -> list[Row]:
    """In order of service, each with its quotas and the number of its customers; with `name` that one alone."""
    owned = _count(customers, customers.c.tier == tiers.c.name).label("customers")
    texts = select(func.array_agg(quotas.c.quota)).where(quotas.c.tier == tiers.c.name).scalar_subquery()
    held = func.coalesce(texts, cast([], ARRAY(Text))).label("quotas")
    wanted = [] if name is None else [tiers.c.name == name]
    return await fetch(connection, select(*seen(tiers), held, owned).where(*wanted).order_by(tiers.c.priority))


async def list_models(connection: Connection, name: str | None = None) -> list[Row]:
    """By name; with `name` that one alone."""
    wanted = [] if name is None else [models.c.name == name]
    return await fetch(connection, select(models).where(*wanted).order_by(models.c.name))


async def list_customers(
    connection: Connection, limit: int, tier: str | None, status: str | None
) -> tuple[list[Row], int]:
    """The first `limit` by name, each with the number of its live keys; and how many there are in all."""
    wanted = [customers.c.tier == tier] if tier else []
    wanted += [customers.c.status == status] if status else []
    keys = _count(api_keys, api_keys.c.customer_id == customers.c.id, _live).label("live_keys")
    query = select(*seen(customers), keys).where(*wanted).order_by(customers.c.name).limit(limit)
    return await fetch(connection, query), await _total(connection, select(customers.c.id).where(*wanted))


async def list_keys(connection: Connection, limit: int, customer_id: UUID | None = None) -> tuple[list[Row], int]:
    """The newest `limit`, each with its customer's name and its state; and how many there are in all."""
    wanted = [] if customer_id is None else [api_keys.c.customer_id == customer_id]
    query = _keys().where(*wanted).order_by(api_keys.c.created_at.desc(), api_keys.c.id).limit(limit)
    return await fetch(connection, query), await _total(connection, select(api_keys.c.id).where(*wanted))


async def find_key(connection: Connection, key_id: str) -> Row:
    """One key as `list_keys` has it. Raises Refused where there is none."""
    row = await fetch_one(connection, _keys().where(api_keys.c.id == key_id))
    if row is None:
        raise missing(api_keys, key_id)
    return row


async def list_quotas(connection: Connection, customer: Row | None = None, tier: str | None = None) -> list[Row]:
    """All quotas, or those that hold for a customer, or those of a tier; each with the name of whom it is of."""
    query = select(quotas.c.id, customers.c.name.label("customer"), quotas.c.tier, quotas.c.quota)
    query = query.select_from(quotas.outerjoin(customers, customers.c.id == quotas.c.customer_id))
    if customer is not None:
        query = query.where(or_(quotas.c.customer_id == customer["id"], quotas.c.tier == customer["tier"]))
    if tier is not None:
        query = query.where(quotas.c.tier == tier)
    return await fetch(connection, query.order_by(quotas.c.tier.nulls_last(), customers.c.name, quotas.c.id))


async def find_customer(connection: Connection, name_or_id: str, *, lock: bool = False) -> Row:
    """A customer by name or id; a name goes before an id. Raises Refused where there is none."""
    named = customers.c.name == name_or_id
    wanted = or_(named, cast(customers.c.id, String) == name_or_id.lower())
    query = select(*seen(customers)).where(wanted).order_by(named.desc()).limit(1)
    row = await fetch_one(connection, query.with_for_update() if lock else query)
    if row is None:
        raise missing(customers, name_or_id)
    return row


async def count_of(connection: Connection, customer: Row) -> tuple[int, int]:
    """How many keys and quotas of its own a customer has: they go where it goes."""
    of_it = (api_keys.c.customer_id == customer["id"], quotas.c.customer_id == customer["id"])
    row = await fetch_one(connection, select(_count(api_keys, of_it[0]), _count(quotas, of_it[1])))
    keys, own_quotas = (row or {}).values()
    return keys, own_quotas


def _keys() -> Select[Any]:
    joined = api_keys.join(customers, customers.c.id == api_keys.c.customer_id)
    return select(*seen(api_keys), customers.c.name.label("customer"), _state).select_from(joined)


async def _total(connection: Connection, query: Select[Any]) -> int:
    row = await fetch_one(connection, select(func.count().label("total")).select_from(query.subquery()))
    return int((row or {"total": 0})["total"])
