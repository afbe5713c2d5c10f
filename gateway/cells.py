"""The cells of customers, as one gateway sees them, the choice of one for each request, and what was seen in other cells."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import CellRow, Customer, Identity, Snapshot
from scheduler.cells.places import cell_urls, cells_of, former_homes
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Residence
from scheduler.protocol.pool_view import Observation
from scheduler.redis_client.keys import DEFAULT_CELL

MOST_KNOWN = 200_000
"""Customers whose cells are kept; then all are computed again."""

SEEN_S = 2.0
"""An older observation of a cell does not count: its workers may have moved."""


class _Place(NamedTuple):
    """What the catalog says of a customer's cells."""

    cell: str | None = None
    spread: int = 1


class AdoptedCells(NamedTuple):
    """The cells that requests use, of a table in a version of the catalog."""

    rows: Sequence[CellRow]
    table: Sequence[CellRow]
    version: int


class Homes:
    """The cells of customers. They are computed once for each customer, and again when the table `cells` has changed.

    A change of the table counts from `adopt` on, when this gateway serves all its cells.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._adopted: AdoptedCells | None = None
        self._rows: object = ()
        self._known: dict[tuple[str, str | None, int], tuple[str, ...]] = {}
        self._turns: dict[str, int] = {}  # By key, because each cell has an even part of a key's own limit.

    @property
    def rows(self) -> Sequence[CellRow]:
        """The cells that requests use; empty: only the default one."""
        if self._adopted is not None:
            return self._adopted.rows
        snapshot = self._catalog.snapshot
        return () if snapshot is None else snapshot.cells

    @property
    def version(self) -> int:
        """The version of the catalog by which homes are decided."""
        snapshot = self._catalog.snapshot
        if snapshot is None:
            return 0
        adopted = self._adopted
        return snapshot.version if adopted is None or adopted.table == snapshot.cells else adopted.version

    def adopt(self, snapshot: Snapshot, unserved: Collection[str]) -> None:
        """Use these cells from now on, those that are not served yet as if they were draining."""
        rows = [replace(row, state="draining") if row.name in unserved else row for row in snapshot.cells]
        self._adopted = AdoptedCells(rows, snapshot.cells, snapshot.version)

    def is_single(self) -> bool:
        """Whether the default cell is the only one."""
        return not self.rows

    def of(self, identity: Identity) -> str:
        """The cell of the next request of a customer. Raises RequestError `no_capacity` if no cell is open."""
        _, cells = self.now(identity.customer_id, identity)
        if len(cells) == 1:
            return cells[0]
        if not cells:
            raise RequestError(ErrorCode.NO_CAPACITY)
        if len(self._turns) >= MOST_KNOWN:
            self._turns.clear()
        turn = self._turns[identity.key_id] = self._turns.get(identity.key_id, -1) + 1
        return cells[turn % len(cells)]

    def best(self, identity: Identity) -> str:
        """The cell that is shown as the customer's; the default one if no cell is open."""
        _, cells = self.now(identity.customer_id, identity)
        return cells[0] if cells else DEFAULT_CELL

    def residence(self, identity: Identity) -> Residence:
        """What admission checks for a request of this customer."""
        snapshot, adopted = self._catalog.snapshot, self._adopted
        if snapshot is None or not (snapshot.cells if adopted is None else adopted.rows):
            return Residence.ONLY
        return _residence(_place(identity.customer_id, snapshot, identity))

    def now(self, customer_id: str, identity: Identity | None = None) -> tuple[Residence, tuple[str, ...]]:
        """What admission checks for a customer, and all its cells, the best first."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not self.rows:
            return Residence.ONLY, (DEFAULT_CELL,)
        place = _place(customer_id, snapshot, identity)
        return _residence(place), self._cells(customer_id, place)

    def former(self, customer_id: str, home: str) -> frozenset[str]:
        """The cells that probably were the home of a customer before `home`."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not self.rows:
            return frozenset()
        return former_homes(customer_id, self.rows, home, _place(customer_id, snapshot).cell)

    def _cells(self, customer_id: str, place: _Place | Identity | Customer) -> tuple[str, ...]:
        rows = self.rows
        if rows is not self._rows:
            self._rows, self._known = rows, {}
        customer = (customer_id, place.cell, place.spread)
        found = self._known.get(customer)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[customer] = cells_of(customer_id, rows, place.cell, place.spread)
        return found

    def urls(self, base_url: str) -> dict[str, str]:
        """The URLs of all cells that are served, by name."""
        snapshot = self._catalog.snapshot
        return cell_urls(base_url, snapshot.cells if snapshot is not None else ())


def _place(customer_id: str, snapshot: Snapshot, identity: Identity | None = None) -> _Place | Identity | Customer:
    """The row of a customer: the identity of a request that has waited may be older."""
    return snapshot.customers.get(customer_id) or identity or _Place()


def _residence(place: _Place | Identity | Customer) -> Residence:
    return Residence.SPREAD if place.spread > 1 else Residence.HERE


class CellObservations:
    """The last observation of each pool in each cell. Workers move between the cells of a pool, so limits follow from all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, dict[str, tuple[float, Observation]]] = {}  # By pool and cell.

    def record(self, pool: str, cell: str, observation: Observation) -> None:
        """Keep an observation."""
        self._seen.setdefault(pool, {})[cell] = (self._clock(), observation)

    def others(self, pool: str, cell: str) -> list[Observation]:
        """The recent observations of a pool in all cells but this one."""
        now = self._clock()
        cells = self._seen.get(pool, {})
        return [seen for name, (at, seen) in cells.items() if name != cell and now - at < SEEN_S]
