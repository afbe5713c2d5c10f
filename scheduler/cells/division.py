"""The division of one customer's limits among its cells: what each may use at most, and the next orders. Pure.

Parts and grants are lowered first (`lowering`), and raised by what is free after these calls (`raising`). A call that was sent
counts as executed, and as not executed, until the cell has replied to a later one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ratelimit.limits import Bucket
from scheduler.cells.shares import (
    WHOLE,
    LeasedPart,
    even_parts,
    grants,
    least_part,
    parts_by_demand,
    raised,
    smoothed,
    steady,
)
from scheduler.protocol.limits import REMOVED, Grant, GrantState, Parts, PartsOrder, PartsState

Sums = tuple[int, int, int]
"""Of parts of rates, concurrency and quotas."""

KNOWN_MS = 3000
"""What a cell had spent is known for this long, but for its last requests."""

FORGET = 0.7
"""The part of its demand that a cell keeps in each round without an answer."""


class SharedCustomer(NamedTuple):
    """A customer of several `cells`, or one that has parts and uses only one cell again. The limits are its base limits."""

    id: str
    cells: tuple[str, ...]
    buckets: tuple[Bucket, ...] = ()
    concurrency: int = 0
    quotas: tuple[tuple[str, int], ...] = ()
    shared: bool = True
    zone: str = ""  # Of its quotas, as in EffectiveLimits.


class Ends(NamedTuple):
    """When a lease has ended for certain, and the requests that it admitted; monotonic seconds."""

    lease: float
    requests: float


OVER = Ends(0.0, 0.0)


@dataclass(slots=True)
class _Use:
    """One cell. `recorded`: it has parts. `promised`: the largest grant of each quota, by window."""

    rates: LeasedPart = field(default_factory=LeasedPart)
    concurrency: LeasedPart = field(default_factory=LeasedPart)
    quotas: LeasedPart = field(default_factory=lambda: LeasedPart(decays=False))
    recorded: bool = False
    open: int = 0
    asked: int = 0
    read_ms: int = 0
    demand: float = 0.0
    grants: dict[str, GrantState] = field(default_factory=dict)
    promised: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[LeasedPart, LeasedPart, LeasedPart]:
        return self.rates, self.concurrency, self.quotas


class _Window(NamedTuple):
    """The newest window of a quota. `known`: the cells that are in it and answer; `others`: what all others may spend in it."""

    number: int
    known: Mapping[str, GrantState]
    others: int
    targets: Mapping[str, int]


class Division:
    """One customer's. `reserved`: what cells may use that have not answered yet."""

    def __init__(self, customer: SharedCustomer) -> None:
        self.customer = customer
        self._uses: dict[str, _Use] = {}
        self._wanted: Mapping[str, int] = {}
        # By quota, with its window: units that were spent in cells that lost their data,
        self._lost: dict[str, tuple[int, int]] = {}
        # and what cells that have not answered were granted at most.
        self._unknown: dict[str, tuple[int, int]] = {}
        self.unaudited = True

    def held(self, now: float) -> Sums:
        """The sums of what may be in force in the cells that answered. Open requests count although a part was lowered."""
        rates = concurrency = quotas = 0
        limit = self.customer.concurrency
        for use in self._uses.values():
            occupied = min(WHOLE, -(-use.open * WHOLE // limit)) if limit > 0 else 0
            rates += use.rates.held(now)
            concurrency += max(use.concurrency.held(now), occupied)
            quotas += use.quotas.held(now)
        return rates, concurrency, quotas

    def forget(self, cell: str) -> None:
        """A closed cell uses nothing."""
        self._uses.pop(cell, None)

    def sent(self, cell: str, order: PartsOrder, now: float, ends: Ends) -> None:
        """An order is sent."""
        use = self._uses.setdefault(cell, _Use())
        if order.parts is None or (order.parts is REMOVED and not use.recorded):
            return
        parts = Parts(WHOLE, WHOLE, WHOLE) if order.parts is REMOVED else order.parts
        for part, share, end in zip(use.parts, parts, (*ends, ends.lease), strict=True):
            part.sent(share, now, end)
        for grant in order.grants:
            window, most = use.promised.get(grant.name, (-1, 0))
            if grant.window == window:
                use.promised[grant.name] = window, max(most, grant.grant)

    def learned(self, cell: str, order: PartsOrder, state: PartsState, now_ms: int, ends: Ends) -> None:
        """The reply to an order, at this TIME. `ends`: of the lease in force; OVER if it has ended."""
        use = self._uses.setdefault(cell, _Use())
        if state.parts is None:
            if use.recorded and order.parts is not REMOVED:
                # It lost its data. What it had spent counts, or all that it was granted if that was read too long ago.
                is_known = now_ms - use.read_ms <= KNOWN_MS
                for quota, (window, most) in use.promised.items():
                    lost_window, units = self._lost.get(quota, (-1, 0))
                    lost = use.grants[quota].spent if is_known and quota in use.grants else most
                    self._lost[quota] = window, lost + (units if lost_window == window else 0)
                self.unaudited = True
            use = self._uses[cell] = _Use()
        elif use.read_ms and state.asked >= use.asked:
            use.demand = smoothed(use.demand, state.asked - use.asked, (now_ms - use.read_ms) / 1000)
        use.recorded, use.open, use.asked, use.read_ms = state.parts is not None, state.open, state.asked, now_ms
        use.grants = {grant.name: found for grant, found in zip(order.grants, state.grants, strict=True)}
        use.promised = {quota: (found.window, found.grant) for quota, found in use.grants.items()}
        for part, share, end in zip(use.parts, state.parts or (), (*ends, ends.lease), strict=False):
            part.acknowledged(share, end)
            if part.decays and ends is OVER:
                part.share = share // 2

    def audited(self, spent: Mapping[str, tuple[int, int]]) -> None:
        """The units of each quota in a window, according to the audit. What no cell has counts as lost."""
        self.unaudited = False
        for quota, (window, units) in spent.items():
            known = [use.grants[quota] for use in self._uses.values() if quota in use.grants]
            missing = units - sum(state.spent for state in known if state.window == window)
            lost_window, lost = self._lost.get(quota, (-1, 0))
            if missing > (lost if lost_window == window else 0):
                self._lost[quota] = window, missing

    def reserve_grants(self) -> None:
        """From what the cells have that answered: the others may have the rest of each quota in this window."""
        uses = [use for use in self._uses.values() if use.recorded]
        for quota, amount in self.customer.quotas:
            known = [use.grants[quota] for use in uses if quota in use.grants]
            window = max((state.window for state in known), default=-1)
            self._unknown[quota] = window, amount - sum(state.grant for state in known if state.window == window)

    def all_known(self) -> None:
        """Every cell has answered."""
        self._unknown = {}

    def read_order(self) -> PartsOrder:
        """Changes nothing."""
        return PartsOrder(self.customer.id, self.customer.buckets, None, self._quotas(), self.customer.zone)

    def _quotas(self) -> list[Grant]:
        return [Grant(name, amount) for name, amount in self.customer.quotas]

    def plan(self, readable: Collection[str]) -> None:
        """Compute what each cell should have, once in each round. Without an answer the demand of a cell is forgotten."""
        customer = self.customer
        if not customer.shared or not customer.cells:
            self._wanted = dict.fromkeys(customer.cells, WHOLE)
            return
        uses = self._uses
        for cell in uses.keys() - readable:
            uses[cell].demand *= FORGET
        demand = {cell: uses[cell].demand if cell in uses else 0.0 for cell in customer.cells}
        least = least_part(len(demand), customer.buckets[0].size, customer.concurrency)
        self._wanted = steady(self._wanted, parts_by_demand(demand, least))

    def _wanted_in(self, cell: str) -> Parts:
        part = self._wanted.get(cell, 0)
        return Parts(part, part, even_parts(self._wanted).get(cell, 0))

    def lowering(self, cell: str, now: float, reserved: Sums, readable: Collection[str]) -> PartsOrder | None:
        """The order for a cell that answers, which renews and lowers its parts; None if it has and needs none."""
        customer, use = self.customer, self._uses.get(cell, _Use())
        if not use.recorded and (cell not in customer.cells or not customer.shared):
            return None
        if not customer.shared and self._is_over(now, reserved):
            return PartsOrder(customer.id, customer.buckets, REMOVED, self._quotas(), customer.zone)
        parts = Parts(*[min(part.share, want) for part, want in zip(use.parts, self._wanted_in(cell), strict=True)])
        found = self._grants(cell, self._windows(reserved, readable), {})
        return PartsOrder(customer.id, customer.buckets, parts, found, customer.zone)

    def _is_over(self, now: float, reserved: Sums) -> bool:
        """Whether a customer of one cell has everything there and nothing in any other, or does not exist any more."""
        if not self.customer.cells:
            return True
        home = self._uses.get(self.customer.cells[0], _Use())
        whole = WHOLE if home.recorded else 0
        return all(part.share == whole for part in home.parts) and self.held(now) == (whole,) * 3 and not any(reserved)

    def raising(self, now: float, reserved: Sums, readable: Collection[str]) -> dict[str, PartsOrder]:
        """The orders that raise parts and grants of the cells that answer, by what is free."""
        uses = {
            cell: use
            for cell, use in self._uses.items()
            if use.recorded and cell in readable and cell in self.customer.cells and now < use.rates.ends
        }
        wanted = {cell: self._wanted_in(cell) for cell in uses}
        free = [WHOLE - held - kept for held, kept in zip(self.held(now), reserved, strict=True)]
        added = [
            raised(free[kind], {cell: max(0, wanted[cell][kind] - use.parts[kind].share) for cell, use in uses.items()})
            for kind in range(3)
        ]
        windows = self._windows(reserved, readable)
        grown: dict[str, dict[str, int]] = {}  # The grants that grow, by quota and cell.
        for quota, amount in self.customer.quotas:
            of = windows[quota]
            spare = amount - of.others - sum(state.grant for state in of.known.values())
            lacking = {cell: max(0, of.targets[cell] - of.known[cell].grant) for cell in uses if cell in of.known}
            grown[quota] = {cell: of.known[cell].grant + more for cell, more in raised(spare, lacking).items()}
        orders: dict[str, PartsOrder] = {}
        for cell, use in uses.items():
            of_cell = {quota: by_cell[cell] for quota, by_cell in grown.items() if cell in by_cell}
            if of_cell or any(cell in add for add in added):
                parts = Parts(*[part.share + add.get(cell, 0) for part, add in zip(use.parts, added, strict=True)])
                found = self._grants(cell, windows, of_cell)
                orders[cell] = PartsOrder(self.customer.id, self.customer.buckets, parts, found, self.customer.zone)
        return orders

    def _windows(self, reserved: Sums, readable: Collection[str]) -> dict[str, _Window]:
        windows: dict[str, _Window] = {}
        uses = {cell: use for cell, use in self._uses.items() if use.recorded}
        for quota, amount in self.customer.quotas:
            number = max((use.grants[quota].window for use in uses.values() if quota in use.grants), default=-1)
            lost_window, lost = self._lost.get(quota, (-1, 0))
            unknown_window, unknown = self._unknown.get(quota, (-1, 0))
            others = unknown if unknown_window == number else amount * reserved[2] // WHOLE
            others += lost if lost_window == number else 0
            known: dict[str, GrantState] = {}
            for cell, use in uses.items():
                state, promised = use.grants.get(quota), use.promised.get(quota, (-1, 0))
                if state is not None and state.window == number and cell in readable:
                    known[cell] = state
                elif promised[0] == number:
                    others += promised[1]
                else:  # It has not begun the window, and will have its part of it.
                    others += amount * use.quotas.most // WHOLE
            targets = grants(amount, {cell: state.spent for cell, state in known.items()}, others, self._wanted)
            windows[quota] = _Window(number, known, others, targets)
        return windows

    def _grants(self, cell: str, windows: Mapping[str, _Window], grown: Mapping[str, int]) -> Sequence[Grant]:
        """The grants of one cell: those of `grown`, and others as they are, or lowered to their targets."""
        found: list[Grant] = []
        for quota, amount in self.customer.quotas:
            of = windows[quota]
            state = of.known.get(cell)
            if state is None:
                found.append(Grant(quota, amount))
                continue
            grant = grown.get(quota, min(state.grant, of.targets[cell]))
            rest = amount - sum(each.spent for each in of.known.values()) - (grant - state.spent)
            found.append(Grant(quota, amount, of.number, grant, others=rest > 0 and len(self._uses) > 1))
        return found
