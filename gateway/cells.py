"""The cells of customers, as one gateway sees them, and the choice of one for each request."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from gateway.catalog import CatalogView, CellRow, IdentityView
from scheduler.cells.places import cell_urls, cells_of
from scheduler.errors import ErrorCode, RequestError
from scheduler.redis_client.keys import DEFAULT_CELL

MOST_KNOWN = 200_000
"""Customers whose cells are kept; then all are computed again."""

NO_CELL = "No cell is open. Open one with `tierlane cell open`."


class UsedCell(NamedTuple):
    """A cell as requests may use it."""

    name: str
    redis_url: str | None
    state: str
    weight: float


class Homes:
    """The cells of customers. They are computed once for each customer, and again when the table `cells` has changed.

    A change of the table counts from `adopt` on, when this gateway serves all its cells.
    """

    def __init__(self, catalog: CatalogView) -> None:
        self._catalog = catalog
        self._rows: Sequence[CellRow] = ()
        self._adopted = False
        self._known: dict[tuple[str, str | None, int], tuple[str, ...]] = {}
        self._next = 0

    def adopt(self, rows: Sequence[CellRow], unserved: Collection[str]) -> None:
        """Use these cells from now on, those that are not served yet as if they were draining."""
        used = [
            UsedCell(row.name, row.redis_url, "draining" if row.name in unserved else row.state, row.weight)
            for row in rows
        ]
        self._rows, self._adopted, self._known = used, True, {}

    def are_default(self, identity: IdentityView) -> bool:
        """Whether the default cell is the only one of a customer."""
        return self.all_of(identity) == (DEFAULT_CELL,)

    def of(self, identity: IdentityView) -> str:
        """The cell of the next request of a customer. Raises RequestError `no_capacity` if no cell is open."""
        cells = self.all_of(identity)
        if len(cells) == 1:
            return cells[0]
        if not cells:
            raise RequestError(ErrorCode.NO_CAPACITY, NO_CELL)
        self._next += 1
        return cells[self._next % len(cells)]

    def all_of(self, identity: IdentityView) -> tuple[str, ...]:
        """All cells of a customer, the best first."""
        if not self._adopted:
            snapshot = self._catalog.snapshot
            rows = snapshot.cells if snapshot is not None else ()
            if rows is not self._rows:
                self._rows, self._known = rows, {}
        if not self._rows:
            return (DEFAULT_CELL,)
        customer = (identity.customer_id, identity.cell, identity.spread)
        found = self._known.get(customer)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[customer] = cells_of(identity.customer_id, self._rows, identity.cell, identity.spread)
        return found

    def urls(self, base_url: str) -> dict[str, str]:
        """The URLs of all cells that are served, by name."""
        snapshot = self._catalog.snapshot
        return cell_urls(base_url, snapshot.cells if snapshot is not None else ())
