"""Rows of the catalog for administrators: lists, tiers, prices, cordoned workers and cells. All functions raise what asyncpg raises.

Functions that need or change one row raise ChangeRejected if it does not exist or the change is not possible.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Interval, Select, String, Text, Uuid, and_, case, cast, func, or_, select, tuple_

from ledger.admin.changes import (
    Change,
    Row,
    add,
    alter,
    fetch,
    fetch_one,
    find,
    missing,
    remove,
    seen,
    transaction_time,
)
from ledger.admin.effects import CatalogRows
from ledger.admin.errors import THINGS, ChangeRejected
from ledger.catalog.snapshot import CellRow
from ledger.postgres import Connection, statement
from ledger.schema.audit import quota_alerts
from ledger.schema.catalog import api_keys, cells, config_changes, cordons, customers, models, prices, quotas, tiers
from ratelimit.quotas import key_of, period_of, quota_name, shown_amount, unit_of
from scheduler.cells.places import cells_of, login_options
from scheduler.redis_client.keys import DEFAULT_CELL, place_name

DEFAULT_ROW: Row = {"name": DEFAULT_CELL, "redis_url": None, "state": "open", "weight": 1.0}
"""The default cell while it has no row."""

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
    """All tiers by priority, or the one named `name`, with their quotas and the number of their customers."""
    owned = _count(customers, customers.c.tier == tiers.c.name).label("customers")
    texts = select(func.array_agg(quotas.c.quota)).where(quotas.c.tier == tiers.c.name).scalar_subquery()
    held = func.coalesce(texts, cast([], ARRAY(Text))).label("quotas")
    wanted = [] if name is None else [tiers.c.name == name]
    return await fetch(connection, select(*seen(tiers), held, owned).where(*wanted).order_by(tiers.c.priority))


async def list_models(connection: Connection, name: str | None = None) -> list[Row]:
    """All models by name, or the one named `name`."""
    wanted = [] if name is None else [models.c.name == name]
    return await fetch(connection, select(models).where(*wanted).order_by(models.c.name))


async def list_customers(
    connection: Connection,
    limit: int,
    tier: str | None,
    status: str | None,
    *,
    after: str | None = None,
    search: str | None = None,
) -> tuple[list[Row], int]:
    """The first `limit` customers by name, with the number of their live keys; and how many there are in all.

    `after`: those with a later name. `search`: those whose name has this part, in either case.
    """
    wanted = [customers.c.tier == tier] if tier else []
    wanted += [customers.c.status == status] if status else []
    wanted += [customers.c.name.icontains(search, autoescape=True)] if search else []
    keys = _count(api_keys, api_keys.c.customer_id == customers.c.id, _live).label("live_keys")
    later = [] if after is None else [customers.c.name > after]
    query = select(*seen(customers), keys).where(*wanted, *later).order_by(customers.c.name).limit(limit)
    return await fetch(connection, query), await _total(connection, select(customers.c.id).where(*wanted))


async def list_keys(
    connection: Connection, limit: int, customer_id: UUID | None = None, *, after: str | None = None
) -> tuple[list[Row], int]:
    """The newest `limit` keys, with the name of the customer and the state; and how many there are in all.

    `after`: those that follow the key with this id in the order of the list.
    """
    wanted = [] if customer_id is None else [api_keys.c.customer_id == customer_id]
    later: list[Any] = []
    if after is not None:
        then = (await find_key(connection, after))["created_at"]
        same = and_(api_keys.c.created_at == then, api_keys.c.id > after)
        later = [or_(api_keys.c.created_at < then, same)]
    query = _keys().where(*wanted, *later).order_by(api_keys.c.created_at.desc(), api_keys.c.id).limit(limit)
    return await fetch(connection, query), await _total(connection, select(api_keys.c.id).where(*wanted))


async def find_key(connection: Connection, key_id: str) -> Row:
    """One key, as in `list_keys`."""
    row = await fetch_one(connection, _keys().where(api_keys.c.id == key_id))
    if row is None:
        raise missing(api_keys, key_id)
    return row


async def list_quotas(connection: Connection, customer: Row | None = None, tier: str | None = None) -> list[Row]:
    """All quotas, those that apply to a customer, or those of a tier; each with the name of its customer."""
    query = select(*seen(quotas), customers.c.name.label("customer"))
    query = query.select_from(quotas.outerjoin(customers, customers.c.id == quotas.c.customer_id))
    if customer is not None:
        query = query.where(or_(quotas.c.customer_id == customer["id"], quotas.c.tier == customer["tier"]))
    if tier is not None:
        query = query.where(quotas.c.tier == tier)
    return await fetch(connection, query.order_by(quotas.c.tier.nulls_last(), customers.c.name, quotas.c.id))


async def list_alerts(
    connection: Connection, limit: int, customer_id: UUID | None = None, *, after: str | None = None
) -> list[Row]:
    """The newest `limit` alerts, with the name of the customer. `after`: those that follow the alert with this id."""
    wanted = [] if customer_id is None else [quota_alerts.c.customer_id == customer_id]
    if after is not None:
        then = select(quota_alerts.c.reached_at, quota_alerts.c.id).where(quota_alerts.c.id == after).scalar_subquery()
        wanted.append(tuple_(quota_alerts.c.reached_at, quota_alerts.c.id) < then)
    query = select(*quota_alerts.c, customers.c.name.label("customer")).where(*wanted)
    query = query.select_from(quota_alerts.join(customers, customers.c.id == quota_alerts.c.customer_id))
    return await fetch(
        connection, query.order_by(quota_alerts.c.reached_at.desc(), quota_alerts.c.id.desc()).limit(limit)
    )


def shown_alert(row: Row) -> Row:
    """An alert for users: the name of its quota's period, and amounts in its unit."""
    name = row["quota"]
    amounts = {column: shown_amount(name, row[column]) for column in ("amount", "used")}
    words = {"quota": quota_name(period_of(name)), "unit": unit_of(name).word, "key_id": key_of(name) or None}
    return row | amounts | words


async def rows_to_judge(connection: Connection, customer_ids: Collection[UUID] | None = None) -> CatalogRows:
    """The rows for `rows_without_effect`: of these customers, and quotas in money of any, or of all customers with own settings."""
    if customer_ids is None:
        limited = or_(api_keys.c.requests_per_second.is_not(None), api_keys.c.quotas.is_not(None))
        condition = or_(
            customers.c.callback_hosts != "",
            customers.c.alert_url.is_not(None),
            customers.c.spread > 1,
            customers.c.id.in_(select(quotas.c.customer_id).correlate()),
            customers.c.id.in_(select(api_keys.c.customer_id).where(limited).correlate()),
        )
        quotas_wanted: list[Any] = []
    else:
        ids = cast(list(customer_ids), ARRAY(Uuid))
        condition = customers.c.id == func.any(ids)
        quotas_wanted = [or_(quotas.c.tier.is_not(None), condition, quotas.c.quota.like("%usd%"))]
    named = select(*quotas.c, customers.c.name.label("customer"))
    return CatalogRows(
        await fetch(connection, select(*seen(tiers)).order_by(tiers.c.priority)),
        await list_models(connection),
        await list_prices(connection),
        await fetch(connection, select(*seen(customers)).where(condition).order_by(customers.c.name)),
        await fetch(connection, _keys().where(condition, _live).order_by(customers.c.name, api_keys.c.id)),
        await fetch(
            connection,
            named.select_from(quotas.outerjoin(customers, customers.c.id == quotas.c.customer_id))
            .where(*quotas_wanted)
            .order_by(quotas.c.tier.nulls_last(), customers.c.name, quotas.c.id),
        ),
    )


async def find_customer(connection: Connection, name_or_id: str, *, lock: bool = False) -> Row:
    """A customer by name or id. A name has precedence."""
    named = customers.c.name == name_or_id
    wanted = or_(named, cast(customers.c.id, String) == name_or_id.lower())
    query = select(*seen(customers)).where(wanted).order_by(named.desc()).limit(1)
    row = await fetch_one(connection, query.with_for_update() if lock else query)
    if row is None:
        raise missing(customers, name_or_id)
    return row


async def count_of(connection: Connection, customer: Row) -> tuple[int, int]:
    """How many keys and quotas are deleted with a customer."""
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


async def delete_tier(connection: Connection, name: str) -> list[Change]:
    """Delete a tier and its quotas. Raises ChangeRejected if it has customers or is the last tier."""
    old = await find(connection, tiers, name)
    if count := await _total(connection, select(customers.c.id).where(customers.c.tier == name)):
        has = "1 customer" if count == 1 else f"{count:,} customers"
        raise ChangeRejected(f"Tier {name} cannot be deleted: it has {has}; move them to another tier first.")
    if len(await fetch(connection, select(tiers.c.name))) == 1:
        raise ChangeRejected(f"Tier {name} cannot be deleted: it is the last one, and every customer needs a tier.")
    held = await fetch(connection, select(quotas).where(quotas.c.tier == name))
    gone = [await remove(connection, quotas, row, f"{row['quota']} of tier {name}") for row in held]
    return [*gone, await remove(connection, tiers, old)]


async def check_tier(connection: Connection, name: str) -> None:
    """Raises ChangeRejected with the names of all tiers if this one does not exist."""
    names = [row["name"] for row in await fetch(connection, select(tiers.c.name).order_by(tiers.c.priority))]
    if name not in names:
        raise ChangeRejected(f"There is no tier named {name}; there are {', '.join(names)}.")


async def check_models(connection: Connection, names: Sequence[str] | None, owner: Row | None = None) -> None:
    """Raises ChangeRejected for a model that does not exist, or that the key of `owner` could not use anyway."""
    known = [row["name"] for row in await fetch(connection, select(models.c.name).order_by(models.c.name))]
    allowed = None if owner is None else owner["models"]
    for name in names or ():
        if name not in known:
            raise ChangeRejected(f"There is no model named {name}; there are {', '.join(known) or 'none'}.")
        if owner is not None and allowed is not None and name not in allowed:
            may = ", ".join(allowed)
            raise ChangeRejected(f"Customer {owner['name']} may not use the model {name}, only {may}.")


async def list_prices(connection: Connection, model: str | None = None) -> list[Row]:
    """The prices of all models or of one, the latest first, each with its state: past, now or later."""
    same = prices.alias()
    now = select(func.max(same.c.valid_from)).where(same.c.model == prices.c.model, same.c.valid_from <= func.now())
    later = prices.c.valid_from > func.now()
    state = case((later, "later"), (prices.c.valid_from == now.scalar_subquery(), "now"), else_="past").label("state")
    wanted = [] if model is None else [prices.c.model == model]
    query = select(*seen(prices), state).where(*wanted).order_by(prices.c.model, prices.c.valid_from.desc())
    return await fetch(connection, query)


async def set_price(connection: Connection, model: str, values: dict[str, float], since: datetime | None) -> Change:
    """Set prices of a model from a time on, in whole seconds: now, or `since`. Other prices stay as they are then."""
    if not await list_models(connection, model) and not await list_prices(connection, model):
        raise missing(models, model)
    start = (since or await transaction_time(connection)).replace(microsecond=0)
    until = prices.c.model == model, prices.c.valid_from <= start
    query = select(prices).where(*until).order_by(prices.c.valid_from.desc()).limit(1).with_for_update()
    old = await fetch_one(connection, query)
    new = {column: Decimal(str(value)) for column, value in values.items()}
    if old is not None and all(old[column] == value for column, value in new.items()):
        return Change(THINGS[prices.name], price_name(old), old, old)
    if old is not None and old["valid_from"] == start:
        return await alter(connection, prices, old, new, price_name(old))
    row = (old or {}) | new | {"model": model, "valid_from": start}
    return await add(connection, prices, row, price_name(row))


async def remove_price(connection: Connection, model: str, since: datetime) -> list[Change]:
    """Remove the price of a model from a time on; the one before it applies instead."""
    have = await list_prices(connection, model)
    gone = [row for row in have if row["valid_from"].replace(microsecond=0) == since]
    if not gone:
        others = ", ".join(_moment(row["valid_from"]) for row in have) or "none"
        raise ChangeRejected(f"There is no price of {model} from {_moment(since)} on; it has {others}.")
    for row in gone:
        del row["state"]
    return [await remove(connection, prices, row, price_name(row)) for row in gone]


def price_name(row: Row) -> str:
    """A price for users."""
    return f"of {row['model']} from {_moment(row['valid_from'])} on"


def _moment(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


async def list_config_changes(
    connection: Connection,
    limit: int,
    *,
    customer: str | None = None,
    since: timedelta | None = None,
    table: str | None = None,
    by: str | None = None,
    before: int | None = None,
) -> tuple[list[Row], int]:
    """The newest `limit` changes, with the name of the customer; and how many there are in all.

    `before`: only those with a lower number. `customer`: only those of customers that have or had this name or id, with their keys and quotas. Raises ChangeRejected
    if there is none.
    """
    record = config_changes.c
    wanted: list[Any] = []
    owner_id = func.coalesce(record.new, record.old)["customer_id"].astext
    if customer is not None:
        named = or_(customers.c.name == customer, cast(customers.c.id, String) == customer.lower())
        had = or_(
            record.row_key == customer.lower(), *(row["name"].astext == customer for row in (record.old, record.new))
        )
        now = select(cast(customers.c.id, String).label("id")).where(named)
        then = select(record.row_key.label("id")).where(record.table_name == "customers", had)
        found = await fetch(connection, now.union(then))
        if not found:
            raise missing(customers, customer)
        ids = cast([str(row["id"]) for row in found], ARRAY(Text))
        of_it = and_(record.table_name == "customers", record.row_key == func.any(ids))
        wanted.append(or_(of_it, owner_id == func.any(ids)))
    wanted += [] if since is None else [record.changed_at >= func.now() - cast(since, Interval)]
    wanted += [] if table is None else [record.table_name == table]
    wanted += [] if by is None else [or_(record.changed_by == by, record.changed_by == f"operator:{by}")]
    older = [] if before is None else [record.id < before]
    shown = [column for column in record if column.name != "xact"]
    name = select(customers.c.name).where(cast(customers.c.id, String) == owner_id).scalar_subquery().label("customer")
    rows = await fetch(connection, select(*shown, name).where(*wanted, *older).order_by(record.id.desc()).limit(limit))
    for row in rows:
        row |= {part: json.loads(row[part]) if row[part] else None for part in ("old", "new")}
    return rows, await _total(connection, select(record.id).where(*wanted))


async def list_cordons(connection: Connection) -> list[Row]:
    return await fetch(connection, select(cordons).order_by(cordons.c.worker))


async def cordon(connection: Connection, worker: str, reason: str) -> Change:
    """Cordon a worker. If it is cordoned already, a reason that is not empty replaces the old one."""
    old = await _find(connection, worker)
    if old is None:
        return await add(connection, cordons, {"worker": worker, "reason": reason}, worker)
    return await alter(connection, cordons, old, {"reason": reason or old["reason"]}, worker)


async def uncordon(connection: Connection, worker: str) -> Change | None:
    """Uncordon a worker; None if it is not cordoned."""
    old = await _find(connection, worker)
    return None if old is None else await remove(connection, cordons, old, worker)


async def _find(connection: Connection, worker: str) -> Row | None:
    return await fetch_one(connection, select(cordons).where(cordons.c.worker == worker).with_for_update())


async def list_cells(connection: Connection) -> list[Row]:
    """All cells, the default one first, also if it has no row."""
    rows = await fetch(connection, select(*seen(cells)).order_by(cells.c.name))
    if all(row["name"] != DEFAULT_CELL for row in rows):
        rows.append(dict(DEFAULT_ROW))
    return sorted(rows, key=lambda row: (row["name"] != DEFAULT_CELL, row["name"]))


async def count_residents(connection: Connection, rows: Sequence[Row]) -> Counter[str]:
    """The number of customers in each of the cells `rows`, of `list_cells`: those that name it, and those that are there by
    their id. One with a spread counts in each of its cells. Reads all customers.
    """
    views = [CellRow(row["name"], row["redis_url"], row["state"], row["weight"]) for row in rows]
    wanted = select(cast(customers.c.id, String).label("id"), customers.c.cell, customers.c.spread)
    living = (cells_of(row["id"], views, row["cell"], row["spread"]) for row in await fetch(connection, wanted))
    return Counter(chain.from_iterable(living))


async def cell_change_age_s(connection: Connection, name: str) -> float | None:
    """Seconds since the last change of a cell, from config_changes; None if none is recorded."""
    last = select(func.max(config_changes.c.changed_at)).where(
        config_changes.c.table_name == cells.name, config_changes.c.row_key == name
    )
    row = await fetch_one(connection, select(func.extract("epoch", func.now() - last.scalar_subquery()).label("age")))
    return None if row is None or row["age"] is None else float(row["age"])


async def open_cell(connection: Connection, name: str, values: Row) -> Change:
    """Add a cell, or open it again; `values` are those to set. Its server can only be changed while it is closed."""
    if named := login_options(values.get("redis_url") or ""):
        raise ChangeRejected(
            f"redis_url must not have {' and '.join(named)}: the Sentinels of all cells have the login in TIERLANE_REDIS_URL."
        )
    old = (await locked_cells(connection)).get(name)
    if old is None:
        return await add(connection, cells, {"name": name, **values})
    if old["state"] != "closed" and values.get("redis_url", old["redis_url"]) != old["redis_url"]:
        raise ChangeRejected(f"Cell {name} is {old['state']} at another server: drain and close it first.")
    return await alter(connection, cells, old, {"state": "open", **values})


async def drain_cell(connection: Connection, name: str) -> Change:
    """Give a cell no new requests. The default cell may have no row yet."""
    rows = await locked_cells(connection)
    old = rows.get(name)
    if old is not None and old["state"] == "closed":
        raise ChangeRejected(f"Cell {name} is closed; `tierlane cell open` opens it again.")
    if old is None and name != DEFAULT_CELL:
        raise missing(cells, name)
    _check_another_is_open(rows, name)
    if old is None:
        return await add(connection, cells, {"name": name, "state": "draining"})
    return await alter(connection, cells, old, {"state": "draining"})


async def close_cell(connection: Connection, name: str, *, forced: bool) -> tuple[Change, int]:
    """Stop serving a cell. Its jobs continue in another one. Returns the change, and the number of jobs.

    Unless `forced`, it must be draining, and no customer may name it.
    """
    rows = await locked_cells(connection)
    if name == DEFAULT_CELL:
        raise ChangeRejected("The cell default, at TIERLANE_REDIS_URL, cannot be closed; it can be drained.")
    if (old := rows.get(name)) is None:
        raise missing(cells, name)
    if not forced and old["state"] == "open":
        raise ChangeRejected(f"Cell {name} is open: `tierlane cell drain {name}` first.")
    count = await _total(connection, select(customers.c.id).where(customers.c.cell == name))
    if not forced and old["state"] != "closed" and count:
        name_it = "1 customer names it" if count == 1 else f"{count:,} customers name it"
        raise ChangeRejected(
            f"Cell {name} cannot be closed: {name_it}; give them another with `tierlane customer set`."
        )
    others = _check_another_is_open(rows, name)
    moved = await connection.execute(statement("move_jobs"), name, place_name("", others[0]))
    return await alter(connection, cells, old, {"state": "closed"}), int(moved.rpartition(" ")[2])


async def locked_cells(connection: Connection) -> dict[str, Row]:
    """All rows by name. The lock also prevents that another change adds one."""
    await connection.execute("LOCK TABLE cells IN SHARE ROW EXCLUSIVE MODE")
    return {row["name"]: row for row in await fetch(connection, select(*seen(cells)))}


def _check_another_is_open(rows: Mapping[str, Row], name: str) -> list[str]:
    """The other open cells, the default one first. Raises ChangeRejected if there is none."""
    states = {DEFAULT_CELL: "open"} | {each: row["state"] for each, row in rows.items()}
    others = [each for each, state in states.items() if state == "open" and each != name]
    if not others:
        raise ChangeRejected(f"Cell {name} is the only open one: open another first, for its customers.")
    return others
