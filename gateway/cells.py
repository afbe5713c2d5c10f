"""The cells of customers, as one gateway sees them, the choice of one for each request, and what was seen in other cells."""

import time
from collections.abc import Callable, Sequence

from gateway.catalog import CatalogView, IdentityView
from scheduler.cells.places import CellView, cell_urls, cells_of
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.pool_view import Observation
from scheduler.redis_client.keys import DEFAULT_CELL

MOST_KNOWN = 200_000
"""Customers whose cells are kept; then all are computed again."""

SEEN_S = 2.0
"""An older observation of a cell does not count: its workers may have moved."""

NO_CELL = "No cell is open. Open one with `tierlane cell open`."


class Homes:
    """The cells of customers. They are computed once for each customer, and again when the table `cells` has changed."""

    def __init__(self, catalog: CatalogView) -> None:
        self._catalog = catalog
        self._rows: Sequence[CellView] = ()
        self._known: dict[tuple[str, str | None, int], tuple[str, ...]] = {}
        self._turns: dict[str, int] = {}  # By key, because each cell has an even part of a key's own limit.

    def is_single(self) -> bool:
        """Whether the default cell is the only one."""
        snapshot = self._catalog.snapshot
        return snapshot is None or not snapshot.cells

    def of(self, identity: IdentityView) -> str:
        """The cell of the next request of a customer. Raises RequestError `no_capacity` if no cell is open."""
        snapshot = self._catalog.snapshot
        if snapshot is None or not snapshot.cells:
            return DEFAULT_CELL
        cells = self.all_of(identity, snapshot.cells)
        if len(cells) == 1:
            return cells[0]
        if not cells:
            raise RequestError(ErrorCode.NO_CAPACITY, NO_CELL)
        if len(self._turns) >= MOST_KNOWN:
            self._turns.clear()
        turn = self._turns[identity.key_id] = self._turns.get(identity.key_id, -1) + 1
        return cells[turn % len(cells)]

    def best(self, identity: IdentityView) -> str:
        """The cell that is shown as the customer's; the default one if no cell is open."""
        snapshot = self._catalog.snapshot
        cells = self.all_of(identity, snapshot.cells) if snapshot is not None and snapshot.cells else ()
        return cells[0] if cells else DEFAULT_CELL

    def all_of(self, identity: IdentityView, rows: Sequence[CellView]) -> tuple[str, ...]:
        """All cells of a customer, the best first."""
        if rows is not self._rows:
            self._rows, self._known = rows, {}
        customer = (identity.customer_id, identity.cell, identity.spread)
        found = self._known.get(customer)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[customer] = cells_of(identity.customer_id, rows, identity.cell, identity.spread)
        return found

    def urls(self, base_url: str) -> dict[str, str]:
        """The URLs of all cells that are served, by name."""
        snapshot = self._catalog.snapshot
        return cell_urls(base_url, snapshot.cells if snapshot is not None else ())


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
