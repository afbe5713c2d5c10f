"""Authentication by JWT: from the claims of a token to the customer's current row.

A claim has the id or the name of a customer. The catalog is indexed by id; a task builds the index by name in small steps,
since a hundred thousand rows at once would block all requests. The result of the index is compared with the row, so
that a change takes effect at once. This module is imported only if JWTs are configured.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_verifier import Claims, JwtVerifier, bad_token, not_now
from gateway.config import JwtConfig
from ledger.catalog.api_key import KnownCallerError
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Customer, Identity, Snapshot
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import ErrorCode
from scheduler.tasks import Loop

STEP = 2000
"""Rows that are indexed without a pause (about 0.2 ms). A catalog of at most this size is indexed on demand."""
INDEX_EVERY_S = 0.1
MAX_IDENTITIES = 10_000


class CustomerNames:
    """Customers by id or name."""

    def __init__(self) -> None:
        self._ids: Mapping[str, str] = {}
        self._snapshot: Snapshot | None = None  # The indexed one.

    def find(self, snapshot: Snapshot, name: str) -> Customer | None:
        """The row. Raises RequestError `catalog_unavailable` for a name that may be in a snapshot not indexed yet."""
        customers = snapshot.customers
        if (row := customers.get(name)) or (row := self._named(snapshot, name)):
            return row
        if self._snapshot is snapshot:
            return None
        if len(customers) > STEP:
            raise not_now()
        self._ids = {row.name: row.id for row in customers.values()}
        self._snapshot = snapshot
        return self._named(snapshot, name)

    def _named(self, snapshot: Snapshot, name: str) -> Customer | None:
        row = snapshot.customers.get(self._ids.get(name, ""))
        return row if row is not None and row.name == name else None

    async def index(self, snapshot: Snapshot) -> None:
        """Index a snapshot in steps, unless it is indexed already."""
        if self._snapshot is snapshot:
            return
        ids: dict[str, str] = {}
        rows = iter(snapshot.customers.values())
        while step := {row.name: row.id for row in islice(rows, STEP)}:
            ids.update(step)
            await asyncio.sleep(0)
        self._ids, self._snapshot = ids, snapshot


class CachedIdentity(NamedTuple):
    """An identity, and the row from which it was built."""

    row: Customer
    identity: Identity


class JwtCustomers:
    """The customers of tokens. `clock` is the catalog's monotonic clock."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._clock = clock
        self._names = CustomerNames()
        self._cached: BoundedDict[Claims, CachedIdentity] = BoundedDict(MAX_IDENTITIES)

    def identity(self, claims: Claims) -> Identity:
        """The identity with the customer's current limits.

        Raises RequestError: `account_suspended`; `invalid_api_key` for an unknown customer; `catalog_unavailable` if the
        customer may be newer than the catalog in memory, or if that is missing or too old.
        """
        snapshot = self._catalog.snapshot
        if snapshot is None or not self._catalog.usable:
            raise not_now()
        cached = self._cached.get(claims)
        if cached is not None and snapshot.customers.get(cached.row.id) is cached.row:  # Unchanged rows stay the same.
            return cached.identity
        row = self._names.find(snapshot, claims.customer)
        if row is None:
            if not self._catalog.knows_all(self._clock()):
                raise not_now()
            raise bad_token("The token's customer is unknown.")
        if row.suspended:
            raise KnownCallerError(ErrorCode.ACCOUNT_SUSPENDED, row.identity(claims.key_id))
        identity = row.identity(claims.key_id)
        self._cached[claims] = CachedIdentity(row, identity)
        return identity

    async def run(self) -> None:
        """Keep the index by name up to date, forever."""
        while True:
            if (snapshot := self._catalog.snapshot) is not None:
                await self._names.index(snapshot)
            await asyncio.sleep(INDEX_EVERY_S)


class JwtIdentities:
    """Identifies customers by tokens of a trusted issuer."""

    def __init__(self, catalog: Catalog, config: JwtConfig, *, source: JwksSource | None = None) -> None:
        self.source = source or JwksSource(config)
        self.max_bytes = config.max_token_bytes
        self._verifier = JwtVerifier(config, self.source)
        self._customers = JwtCustomers(catalog)

    @property
    def problem(self) -> str | None:
        """Why the key set may be outdated or missing; None while there is no problem."""
        return self.source.problem

    def identify(self, presented: str, wall_now: float) -> Identity:
        """The identity for a token. `wall_now` is seconds since the epoch. Raises RequestError."""
        return self._customers.identity(self._verifier.verify(presented, wall_now))

    def loops(self) -> Mapping[str, Loop]:
        """Background loops, by name."""
        return {"jwks": self.source.run, "customer names": self._customers.run}
