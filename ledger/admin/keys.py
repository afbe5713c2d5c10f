"""API keys in an admin's hands: issued, rotated, revoked. The secret is made here and never sent to PostgreSQL."""

from datetime import datetime, timedelta

from sqlalchemy import func, select

from ledger.admin.changes import Change, Row, add, alter, fetch_one, find
from ledger.admin.errors import ChangeRejected
from ledger.admin.rows import find_customer
from ledger.catalog.api_key import NewKey, mint
from ledger.postgres import Connection
from ledger.schema.catalog import api_keys, customers


async def create_key(
    connection: Connection, customer: str, name: str, lifetime: timedelta | None, limit: Row
) -> tuple[NewKey, Change]:
    """A new key of a customer, by name or id. Raises Refused."""
    owner = await find_customer(connection, customer)
    return await _issue(connection, owner, name, lifetime, limit)


async def rotate_key(
    connection: Connection, key_id: str, grace: timedelta, lifetime: timedelta | None
) -> tuple[NewKey, list[Change]]:
    """A second key of the same name and limit; the old one lives on for `grace`, or less where it ends before.

    Without a `lifetime` the new key lives as long as the old one was meant to. Raises Refused.
    """
    old = await find(connection, api_keys, key_id)
    now = await _now(connection)
    _check_lives(old, now)
    meant = old["expires_at"] and old["expires_at"] - old["created_at"]
    owner = await find(connection, customers, old["customer_id"])
    limit = {name: old[name] for name in ("requests_per_second", "burst")}
    new, issued = await _issue(connection, owner, old["name"], lifetime or meant, limit)
    end = min(now + grace, old["expires_at"] or datetime.max.replace(tzinfo=now.tzinfo))
    return new, [issued, await alter(connection, api_keys, old, {"expires_at": end})]


async def revoke_key(connection: Connection, key_id: str) -> Change:
    """Refuse the key from now on; one that is revoked stays as it is. Raises Refused."""
    old = await find(connection, api_keys, key_id)
    return await alter(connection, api_keys, old, {"revoked_at": old["revoked_at"] or await _now(connection)})


async def _issue(
    connection: Connection, owner: Row, name: str, lifetime: timedelta | None, limit: Row
) -> tuple[NewKey, Change]:
    key = mint()
    values = {
        "id": key.id,
        "customer_id": owner["id"],
        "name": name,
        "secret_hash": key.secret_hash,
        "expires_at": lifetime and await _now(connection) + lifetime,
        **limit,
    }
    return key, await add(connection, api_keys, values)


async def _now(connection: Connection) -> datetime:
    """PostgreSQL's clock; all of a transaction are of one moment."""
    row = await fetch_one(connection, select(func.now().label("now")))
    moment: datetime = (row or {})["now"]
    return moment


def _check_lives(key: Row, now: datetime) -> None:
    for ended, how in ((key["revoked_at"], "revoked"), (key["expires_at"], "expired")):
        if ended is not None and ended <= now:
            raise ChangeRejected(
                f"Key {key['id']} cannot be rotated: it is {how} since {ended:%Y-%m-%d %H:%M:%S} UTC; create a new one."
            )
