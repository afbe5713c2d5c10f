"""Cordoned workers in an operator's hands: who is, and the two verbs. Schedulers hear of a change as of any in the catalog."""

from sqlalchemy import select

from ledger.admin.changes import Change, add, alter, remove
from ledger.admin.query import Row, fetch, fetch_one
from ledger.postgres import Connection
from ledger.schema.catalog import cordons


async def list_cordons(connection: Connection) -> list[Row]:
    """All of them, by worker."""
    return await fetch(connection, select(cordons).order_by(cordons.c.worker))


async def cordon(connection: Connection, worker: str, reason: str) -> Change:
    """Cordon a worker; one that is so already gets the new reason, if there is one. Raises Refused."""
    old = await _find(connection, worker)
    if old is None:
        return await add(connection, cordons, {"worker": worker, "reason": reason}, worker)
    return await alter(connection, cordons, old, {"reason": reason or old["reason"]}, worker)


async def uncordon(connection: Connection, worker: str) -> Change | None:
    """Undo it; None where the worker is not cordoned. Raises Refused."""
    old = await _find(connection, worker)
    return None if old is None else await remove(connection, cordons, old, worker)


async def _find(connection: Connection, worker: str) -> Row | None:
    return await fetch_one(connection, select(cordons).where(cordons.c.worker == worker).with_for_update())
