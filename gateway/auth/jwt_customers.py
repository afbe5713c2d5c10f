"""From what a token says to the customer's row as it is now, with its limits: nothing of the row is kept in a token.

A claim names a customer by id or by name. The catalog goes by id; the index by name is made here, in small steps by a
task, since a hundred thousand rows at once would hold up every request. An old index is only a hint: what it says is
compared with the row, so that a changed, suspended or deleted customer is seen at once.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

from gateway.auth.jwt_verifier import not_now
from gateway.jwt_claims import Claims, bad_token
from ledger.catalog.snapshot import Customer, Identity, Snapshot
from scheduler.errors import ErrorCode, RequestError

STEP = 2000
"""Rows indexed before others get a turn: about 0.2 ms. A catalog that is no larger is indexed where it is needed."""
LOOK_S = 0.1
MAX_IDENTITIES = 10_000


class CustomersView(Protocol):
    """The catalog, as far as tokens need it: `ledger.catalog.follower.Catalog`."""

    @property
    def snapshot(self) -> Snapshot | None: ...
    @property
    def usable(self) -> bool: ...

    def knows_all(self, now: float) -> bool: ...


class CustomerNames:
    """Customers by id or name."""

    def __init__(self) -> None:
        self._ids: Mapping[str, str] = {}
        self._of: Snapshot | None = None

    def find(self, snapshot: Snapshot, name: str) -> Customer | None:
        """The row. Raises RequestError `catalog_unavailable` for a name that a newer snapshot may have."""
        customers = snapshot.customers
        if (row := customers.get(name)) or (row := self._named(snapshot, name)):
            return row
        if self._of is snapshot:
            return None
        if len(customers) > STEP:
            raise not_now()
        self._ids = {row.name: row.id for row in customers.values()}
        self._of = snapshot
        return self._named(snapshot, name)

    def _named(self, snapshot: Snapshot, name: str) -> Customer | None:
        row = snapshot.customers.get(self._ids.get(name, ""))
        return row if row is not None and row.name == name else None

    async def index(self, snapshot: Snapshot) -> None:
        """Catch up with a snapshot, if there is need to."""
        if self._of is snapshot:
            return
        ids: dict[str, str] = {}
        rows = iter(snapshot.customers.values())
        while step := {row.name: row.id for row in islice(rows, STEP)}:
            ids.update(step)
            await asyncio.sleep(0)
        self._ids, self._of = ids, snapshot


class Known(NamedTuple):
    """What was made of a row, and for which row."""

    row: Customer
    identity: Identity


class JwtCustomers:
    """Who the tokens' customers are. `clock` is monotonic seconds, the catalog's."""

    def __init__(self, catalog: CustomersView, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._clock = clock
        self._names = CustomerNames()
        self._known: dict[Claims, Known] = {}

    def identity(self, claims: Claims) -> Identity:
        """The customer's limits as they are now.

        Raises RequestError: `account_suspended`; `invalid_api_key` for an unknown customer, and `catalog_unavailable`
        where it may only be newer than what we know, or nothing can be known.
        """
        snapshot = self._catalog.snapshot
        if snapshot is None or not self._catalog.usable:
            raise not_now()
        known = self._known.get(claims)
        if known is not None and snapshot.customers.get(known.row.id) is known.row:  # An unchanged row is the same one.
            return known.identity
        row = self._row(snapshot, claims.customer)
        identity = _identity(row, claims.key_id)
        if known is None and len(self._known) >= MAX_IDENTITIES:
            del self._known[next(iter(self._known))]
        self._known[claims] = Known(row, identity)
        return identity

    def _row(self, snapshot: Snapshot, name: str) -> Customer:
        row = self._names.find(snapshot, name)
        if row is None:
            if not self._catalog.knows_all(self._clock()):
                raise not_now()
            raise bad_token("The token's customer is not known here.")
        if row.suspended:
            raise RequestError(ErrorCode.ACCOUNT_SUSPENDED)
        return row

    async def run(self) -> None:
        """Keep the index by name up to date, for ever."""
        while True:
            if (snapshot := self._catalog.snapshot) is not None:
                await self._names.index(snapshot)
            await asyncio.sleep(LOOK_S)


def _identity(row: Customer, key_id: str) -> Identity:
    return Identity(
        key_id,
        row.id,
        row.name,
        row.tier,
        row.requests_per_second,
        row.burst,
        row.max_concurrency,
        row.tokens_per_minute,
        row.max_queue_ms,
        row.quotas,
        priority=row.priority,
    )
