"""API keys that a customer manages with one of them. Plain SQL, since SQLAlchemy would cost each gateway 15 MB.

A new key has at most the rights of the calling key. Functions raise KeyRejected, and what asyncpg raises; each can be repeated.
Changes are recorded in config_changes under the name of the customer.
"""

from collections.abc import Sequence
from datetime import datetime
from math import inf
from typing import NamedTuple

from ledger.admin.transaction import as_actor
from ledger.catalog.api_key import NewKey
from ledger.catalog.quotas import key_quotas_problem, stored_quota
from ledger.catalog.snapshot import Identity, allowed_models
from ledger.postgres import Connection, statement
from ratelimit.limits import REQUEST_BUCKET, value_of
from scheduler.errors import TierlaneError

MOST_LIVE = 100
"""Keys of a customer that are neither revoked nor expired, beyond which it cannot create more."""

MOST_A_DAY = 100
"""Keys that are created for a customer in 24 hours: revoked ones stay in the catalog of all gateways."""


class KeyRejected(TierlaneError):
    """The call is not possible; the message is a sentence. `param`: the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class KeysNotManaged(KeyRejected):
    """The caller may not manage keys."""


class TooManyKeys(KeyRejected):
    """The customer has too many keys."""


class OwnKey(NamedTuple):
    """A key of a customer, without its secret."""

    id: str
    name: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    requests_per_second: float | None
    burst: float | None
    models: list[str] | None
    quotas: list[str] | None


class KeyTerms(NamedTuple):
    """What a key may do. None: not limited by the key itself."""

    models: Sequence[str] | None = None
    requests_per_second: float | None = None
    burst: float | None = None
    weight: float | None = None
    expires_at: datetime | None = None
    quotas: Sequence[str] | None = None


def narrowed(
    caller: KeyTerms, of_customer: Sequence[str] | None, account_rate: float, wanted: KeyTerms, now: datetime
) -> KeyTerms:
    """The terms of a new key: those that are wanted, else those of the calling key. Raises KeyRejected if they are wider.

    `of_customer`: the models of the customer; None: all. `account_rate`: its requests/s.
    """
    shared = None if of_customer is None else tuple(of_customer)
    allowed = shared if caller.models is None else allowed_models(caller.models, shared)
    for name in wanted.models or ():
        if allowed is not None and name not in allowed:
            raise KeyRejected(f"This key may not use the model `{name}`, nor can a key that it creates.", "models")
    rate, burst = caller.requests_per_second, caller.burst
    if wanted.requests_per_second is not None:
        if rate is not None and wanted.requests_per_second > rate:
            raise KeyRejected(
                f"`requests_per_second` must not exceed that of this key, {rate:g}.", "requests_per_second"
            )
        if wanted.requests_per_second > account_rate:
            raise KeyRejected(
                f"`requests_per_second` must not exceed that of your account, {account_rate:g}, which all of its keys share.",
                "requests_per_second",
            )
        rate = wanted.requests_per_second
        burst = max(1.0, rate) if burst is None else min(burst, max(1.0, rate))
    if wanted.burst is not None:
        if rate is None:
            raise KeyRejected("`burst` needs `requests_per_second`.", "burst")
        if caller.burst is not None and wanted.burst > caller.burst:
            raise KeyRejected(f"`burst` must not exceed that of this key, {caller.burst:g}.", "burst")
        burst = wanted.burst
    expires_at = wanted.expires_at or caller.expires_at
    if expires_at is not None and expires_at <= now:
        raise KeyRejected("`expires_at` must be in the future.", "expires_at")
    if caller.expires_at is not None and expires_at is not None and expires_at > caller.expires_at:
        end = f"{caller.expires_at:%Y-%m-%d %H:%M:%S} UTC"
        raise KeyRejected(f"`expires_at` must not be after the end of this key, {end}.", "expires_at")
    models = caller.models if wanted.models is None else wanted.models
    return KeyTerms(models, rate, burst, caller.weight, expires_at, _narrowed_quotas(caller.quotas, wanted.quotas))


def _narrowed_quotas(of_caller: Sequence[str] | None, wanted: Sequence[str] | None) -> Sequence[str] | None:
    """The quotas of a new key: those of the calling key, which both use up together, else those that are wanted."""
    if of_caller and wanted is not None:
        raise KeyRejected("`quotas` cannot be set: the new key shares the quotas of this key.", "quotas")
    quotas = None if wanted is None else [stored_quota(text) for text in wanted]
    problem = key_quotas_problem(quotas or ())
    if problem is not None:
        raise KeyRejected(f"`quotas`: {problem}.", "quotas")
    return of_caller or quotas


async def create_own_key(connection: Connection, caller: Identity, key: NewKey, name: str, wanted: KeyTerms) -> OwnKey:
    """Create a key of the caller's customer, with at most the rights of the calling key. Raises KeyRejected."""
    async with as_actor(connection, actor(caller)):
        check_manages_keys(await connection.fetchval(statement("lock_key_owner"), caller.customer_id))
        row = await connection.fetchrow(statement("key_rights"), caller.customer_id, caller.key_id, key.id)
        if row is None or row["id"] is None:  # A JWT, which ends soon, or a key that was revoked in this second.
            raise KeysNotManaged("Keys are created with an API key that is valid.")
        if not row["created"]:  # By a first attempt whose connection was lost.
            if row["live"] >= MOST_LIVE:
                raise TooManyKeys(f"There are {MOST_LIVE} keys that are valid: revoke one first.")
            if row["recent"] >= MOST_A_DAY:
                raise TooManyKeys(f"{MOST_A_DAY} keys were created in the last 24 hours: use one of them, or wait.")
            own = KeyTerms(*(row[field] for field in KeyTerms._fields))
            rate = value_of(caller.limits, REQUEST_BUCKET.rate) or inf
            terms = narrowed(own, row["customer_models"], rate, wanted, row["now"])
            await connection.execute(
                statement("insert_key"),
                *(key.id, caller.customer_id, name, key.secret_hash, terms.expires_at),
                *(terms.requests_per_second, terms.burst, terms.weight),
                *(None if names is None else list(names) for names in (terms.models, terms.quotas)),
                row["quota_key"] if own.quotas else None,
            )
        (created,) = await _keys(connection, caller.customer_id, key.id)
    return created


async def list_own_keys(connection: Connection, caller: Identity, after: str, limit: int) -> list[OwnKey]:
    """The newest keys of the caller's customer, from behind the key `after` ("": from the first). Raises KeysNotManaged."""
    check_manages_keys(await connection.fetchval(statement("manages_keys"), caller.customer_id))
    return await _keys(connection, caller.customer_id, None, after, limit)


async def revoke_own_key(connection: Connection, caller: Identity, key_id: str) -> OwnKey | None:
    """Revoke a key of the caller's customer; None if it has no such key. Raises KeysNotManaged."""
    async with as_actor(connection, actor(caller)):
        check_manages_keys(await connection.fetchval(statement("manages_keys"), caller.customer_id))
        await connection.execute(statement("revoke_key"), caller.customer_id, key_id)
        found = await _keys(connection, caller.customer_id, key_id)
    return found[0] if found else None


def actor(caller: Identity) -> str:
    """The name under which config_changes records the changes of a customer."""
    return f"customer {caller.customer_name}"


def check_manages_keys(manages_keys: bool | None) -> None:  # noqa: FBT001 - a column
    """Raises KeysNotManaged unless the customer manages its keys. None: there is no such customer."""
    if not manages_keys:
        raise KeysNotManaged("This account does not manage its own keys: ask the administrator.")


async def _keys(
    connection: Connection, customer_id: str, key_id: str | None, after: str = "", limit: int = 1
) -> list[OwnKey]:
    rows = await connection.fetch(statement("list_keys"), customer_id, key_id, after, limit)
    return [OwnKey._make(row) for row in rows]
