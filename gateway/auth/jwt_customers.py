"""From the claims of a token to the customer's present row, and the assembly of JWT authentication.

A claim names a customer by id or by name. The catalog is indexed by id; the index by name is built here by a task in
small steps, since a hundred thousand rows at once would block every request. The index is only a hint: its result is
compared with the row, so that a changed, suspended or deleted customer is seen at once. This module is imported only
where JWTs are configured.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_verifier import Claims, JwtVerifier, bad_token, not_now
from gateway.config import JwtConfig
from ledger.catalog.snapshot import Customer, Identity, Snapshot
from scheduler.errors import ErrorCode, RequestError
from scheduler.tasks import Loop

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
        row.limits,
        row.max_queue_ms,
        row.quotas,
        priority=row.priority,
    )


class JwtIdentities:
    """Identifies customers by tokens that a trusted issuer signed. `clock` is monotonic seconds."""

    def __init__(
        self,
        catalog: CustomersView,
        config: JwtConfig,
        *,
        source: JwksSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source or JwksSource(config, clock=clock)
        self._config = config
        self._verifier = JwtVerifier(config, self.source)
        self._customers = JwtCustomers(catalog, clock)

    @property
    def max_bytes(self) -> int:
        """Bytes that a token may have."""
        return self._config.max_token_bytes

    @property
    def problem(self) -> str | None:
        """Why the key set may be old or missing; None while all is well."""
        return self.source.problem

    def identify(self, presented: str, wall_now: float) -> Identity:
        """Who presents this token; `wall_now` is seconds since the epoch. Raises RequestError."""
        return self._customers.identity(self._verifier.verify(presented, wall_now))

    def loops(self) -> Mapping[str, Loop]:
        """What has to run beside the requests, by name."""
        return {"jwks": self.source.run, "customer names": self._customers.run}
