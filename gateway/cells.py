"""The cells of customers, as one gateway sees them, and the choice of one for each request."""

from typing import NamedTuple

from gateway.catalog import CatalogView, CustomerRow, IdentityView, SnapshotView
from scheduler.cells.places import cell_urls, cells_of, former_homes
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Home
from scheduler.redis_client.keys import DEFAULT_CELL

MOST_KNOWN = 200_000
"""Customers whose cells are kept; then all are computed again."""

NO_CELL = "No cell is open. Open one with `tierlane cell open`."


class _Place(NamedTuple):
    """What the catalog says of a customer's cells."""

    cell: str | None = None
    spread: int = 1


class Homes:
    """The cells of customers. They are computed once for each customer, and again when the table `cells` has changed."""

    def __init__(self, catalog: CatalogView) -> None:
        self._catalog = catalog
        self._rows: object = ()
        self._known: dict[tuple[str, str | None, int], tuple[str, ...]] = {}
        self._next = 0

    @property
    def single(self) -> bool:
        """Whether the default cell is the only one."""
        snapshot = self._catalog.snapshot
        return snapshot is None or not snapshot.cells

    def of(self, identity: IdentityView) -> str:
        """The cell of the next request of a customer. Raises RequestError `no_capacity` if no cell is open."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not snapshot.cells:
            return DEFAULT_CELL
        cells = self._cells(identity.customer_id, snapshot, _place(identity.customer_id, snapshot, identity))
        if len(cells) == 1:
            return cells[0]
        if not cells:
            raise RequestError(ErrorCode.NO_CAPACITY, NO_CELL)
        self._next += 1
        return cells[self._next % len(cells)]

    def residence(self, identity: IdentityView) -> Home:
        """What admission checks for a request of this customer."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not snapshot.cells:
            return Home.ONLY
        return _residence(_place(identity.customer_id, snapshot, identity))

    def now(self, customer_id: str) -> tuple[Home, tuple[str, ...]]:
        """What admission checks for a customer, and all its cells, the best first."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not snapshot.cells:
            return Home.ONLY, (DEFAULT_CELL,)
        place = _place(customer_id, snapshot)
        return _residence(place), self._cells(customer_id, snapshot, place)

    def former(self, customer_id: str, home: str) -> frozenset[str]:
        """The cells that probably were the home of a customer before `home`."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not snapshot.cells:
            return frozenset()
        return former_homes(customer_id, snapshot.cells, home, _place(customer_id, snapshot).cell)

    def _cells(
        self, customer_id: str, snapshot: SnapshotView, place: _Place | IdentityView | CustomerRow
    ) -> tuple[str, ...]:
        if snapshot.cells is not self._rows:
            self._rows, self._known = snapshot.cells, {}
        customer = (customer_id, place.cell, place.spread)
        found = self._known.get(customer)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[customer] = cells_of(customer_id, snapshot.cells, place.cell, place.spread)
        return found

    def urls(self, base_url: str) -> dict[str, str]:
        """The URLs of all cells that are served, by name."""
        snapshot = self._catalog.snapshot
        return cell_urls(base_url, snapshot.cells if snapshot is not None else ())


def _place(
    customer_id: str, snapshot: SnapshotView, identity: IdentityView | None = None
) -> _Place | IdentityView | CustomerRow:
    """The row of a customer: the identity of a request that has waited may be older."""
    return snapshot.customers.get(customer_id) or identity or _Place()


def _residence(place: _Place | IdentityView | CustomerRow) -> Home:
    return Home.SPREAD if place.spread > 1 else Home.HERE
