"""Tiers in an admin's hands: what the tables cannot refuse in words, because it is about rows elsewhere."""

from sqlalchemy import func, select

from ledger.admin.changes import Change, find, remove
from ledger.admin.errors import Refused
from ledger.admin.query import fetch, fetch_one
from ledger.postgres import Connection
from ledger.schema.catalog import customers, quotas, tiers


async def delete_tier(connection: Connection, name: str) -> list[Change]:
    """Delete a tier without customers, and its quotas. Raises Refused where it has some, or is the last one."""
    old = await find(connection, tiers, name)
    owned = await fetch_one(connection, select(func.count().label("n")).where(customers.c.tier == name))
    count = (owned or {"n": 0})["n"]
    if count:
        raise Refused(f"Tier {name} cannot be deleted: it has {_counted(count)}; move them to another tier first.")
    if len(await fetch(connection, select(tiers.c.name))) == 1:
        raise Refused(f"Tier {name} cannot be deleted: it is the last one, and every customer needs a tier.")
    held = await fetch(connection, select(quotas).where(quotas.c.tier == name))
    gone = [await remove(connection, quotas, row, f"{row['quota']} of tier {name}") for row in held]
    return [*gone, await remove(connection, tiers, old)]


async def check_tier(connection: Connection, name: str) -> None:
    """Raises Refused, naming those that there are, for a tier that is not there."""
    names = [row["name"] for row in await fetch(connection, select(tiers.c.name).order_by(tiers.c.priority))]
    if name not in names:
        raise Refused(f"There is no tier named {name}; there are {', '.join(names)}.")


def _counted(count: int) -> str:
    return "1 customer" if count == 1 else f"{count:,} customers"
