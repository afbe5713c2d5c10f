"""The allotter: divides the limits of each customer of several cells among these cells.

Every second it calls each cell (scheduler/lua/allot.lua): it renews and lowers parts, reads what was asked for, and then raises
parts by what is free (scheduler/cells/division.py). Any number of allotters may run. One of them is active: the one that has
claimed most cells (with an even number, half of them and the default cell is enough). A claim holds for 3 s and is renewed by
every call; only the allotter that has it can write. An allotter that could not renew most of its claims stops writing before
another one can have them.

A lease is given until a TIME of the cell that is computed before the call, so that a call that is executed late gives no
longer lease. A cell whose last call failed is only read, until it answers.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from scheduler.cells.division import OVER, Division, Ends, SharedCustomer, Sums
from scheduler.cells.shares import WHOLE
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.limits import Allotments, Allotted, PartsOrder
from scheduler.redis_client.connections import close_client, command_client, server_url
from scheduler.redis_client.keys import DEFAULT_CELL, Keys
from scheduler.redis_client.scripts import RedisFull

PERIOD_S = 1.0
LEASE_S = 5.0
"""Longer than a claim, so that another allotter can renew the leases of one that ended."""

MARGIN_S = 0.2
"""Clocks of two machines may differ by less in the time of a lease."""

LEAD_S = 2.0
"""Within this time of a renewal of most claims the allotter may write; a claim holds for longer."""

RAISE_S = 1.0
"""Later than this after the calls that lowered parts, none is raised."""

IDLE_S = 30.0
"""Between two looks for parts that are left, if no customer uses several cells."""

LOOK_S = 0.1
"""Between two looks at whether the catalog has changed."""

_Orders = Mapping[str, Sequence[PartsOrder]]


@dataclass(slots=True)
class _Cell:
    """`clock_ms`: TIME minus monotonic time, at most; None until it answered. `readable`: its parts are known exactly.
    `customers`: those with parts there.
    """

    url: str
    client: Redis | None = None
    clock_ms: float | None = None
    readable: bool = False
    customers: Sequence[str] = ()

    async def allot(self, *call: *tuple[str, int, int, int, Sequence[PartsOrder]]) -> Allotted:
        """Call it. Raises RedisUnavailable, RedisFull."""
        if self.client is None:
            self.url = await server_url(self.url)
            self.client = command_client(self.url)
        return await Allotments(self.client, Keys.at(self.url)).allot(*call)

    async def close(self) -> None:
        """Close its connection; the next call opens another one."""
        client, self.client = self.client, None
        if client is not None:
            await close_client(client)


def is_quorum(cells: Iterable[str], of: Iterable[str]) -> bool:
    """Whether these are most of all cells: two such sets have a cell in common."""
    every = set(of)
    own = every.intersection(cells)
    return 2 * len(own) > len(every) or (2 * len(own) == len(every) and DEFAULT_CELL in own)


class Allotter:
    """One allotter, with a `name` of its own. `urls`: of all cells that are not closed, by name; `customers`: those of several
    cells, by id, the same object until it changes. `find`: a customer that has parts but is not among them, None if it does not
    exist. `life_s`: the longest time of a request. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        urls: Callable[[], Mapping[str, str]],
        customers: Callable[[], Mapping[str, SharedCustomer]],
        find: Callable[[str], SharedCustomer | None] = lambda _customer_id: None,
        *,
        life_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._find_urls = urls
        self._find_customers = customers
        self._find = find
        self._life_s = life_s
        self._clock = clock
        self._epoch = self._number = 0
        self._led_at: float | None = None
        self._led_since = 0.0
        self._cells: dict[str, _Cell] = {}
        self._known_urls: dict[str, str] = {}
        self._divisions: dict[str, Division] = {}
        self._unknown: set[str] = set()  # Cells that have not answered since this allotter is active.
        self._reserved: dict[str, Sums] = {}  # What they may use, of each customer.

    @property
    def active(self) -> bool:
        """Whether this allotter may write."""
        return self._may_write(self._clock())

    def _may_write(self, now: float) -> bool:
        return self._led_at is not None and now - self._led_at <= LEAD_S

    async def run(self) -> None:
        """Divide for ever, and at once when the catalog has changed."""
        due, seen = self._clock(), self._find_customers()
        try:
            while True:
                now, found = self._clock(), self._find_customers()
                if now >= due or found is not seen:
                    seen = found
                    with LoggedFaults("dividing limits among cells failed"):
                        await self.turn()
                    pause_s = PERIOD_S if self.active else PERIOD_S * random.uniform(0.5, 1.0)
                    due = now + (pause_s if self._needed() else IDLE_S)
                await asyncio.sleep(min(LOOK_S, max(0.0, due - self._clock())))
        finally:
            for cell in self._cells.values():
                await cell.close()

    def _needed(self) -> bool:
        return bool(self._find_customers()) or any(cell.customers for cell in self._cells.values())

    async def turn(self) -> None:
        """One round in all cells, or an attempt to become active."""
        # A closed cell uses nothing. A cell with another URL is a new one, except for what it may use still.
        urls = self._find_urls()
        for name in [name for name in self._cells if name not in urls]:
            await self._cells.pop(name).close()
            self._now_known(name)
            for division in self._divisions.values():
                division.forget(name)
        for name, url in urls.items():
            if name in self._cells and self._known_urls[name] != url:
                await self._cells.pop(name).close()
            self._known_urls[name] = url
            self._cells.setdefault(name, _Cell(url))
        if not self._may_write(self._clock()) and not await self._take_over():
            return
        if self._needed():
            await self._round()
        else:
            self._led_at = None

    async def _take_over(self) -> bool:
        """Claim all cells, and read their parts, if most of them have no active allotter. Returns whether most are claimed."""
        self._led_at, self._divisions, self._reserved = None, {}, {}
        for cell in self._cells.values():
            cell.readable = False
        replies = await self._call({name: [] for name in self._cells}, 0, self._clock())
        free = [name for name, reply in replies.items() if reply.held_ms == 0]
        if not self._needed() or not is_quorum(free, self._cells):
            return False
        self._epoch = 1 + max(self._epoch, *(reply.epoch for reply in replies.values()))
        self._update_customers()
        began, orders = self._clock(), [division.read_order() for division in self._divisions.values()]
        accepted: set[str] = set()
        if DEFAULT_CELL in replies:  # It decides between allotters that claim at the same time.
            accepted = await self._send({DEFAULT_CELL: orders}, began)
            if not accepted:
                return False
        accepted |= await self._send(dict.fromkeys(self._cells.keys() - accepted, orders), began)
        if not is_quorum(accepted, self._cells):
            return False
        self._led_at = self._led_since = began
        self._unknown = self._cells.keys() - accepted
        if not self._unknown:
            return True
        for customer_id, division in self._divisions.items():
            rates, concurrency, quotas = division.held(self._clock())
            self._reserved[customer_id] = max(0, WHOLE - rates), max(0, WHOLE - concurrency), max(0, WHOLE - quotas)
            division.reserve_grants()
        return True

    def unaudited(self) -> list[str]:
        """The customers whose quotas are to be compared with the audit, because cells may have lost what was spent."""
        found = [i for i, division in self._divisions.items() if division.unaudited and division.customer.quotas]
        return found if self.active else []

    def audited(self, customer_id: str, spent: Mapping[str, tuple[int, int]]) -> None:
        """The window and the units of each quota of a customer that the audit has, as of a moment ago."""
        if customer_id in self._divisions:
            self._divisions[customer_id].audited(spent)

    def _update_customers(self) -> None:
        """Follow the catalog, and the parts that cells have."""
        customers = self._find_customers()
        ids = {*customers, *(i for cell in self._cells.values() for i in cell.customers)}
        for customer_id in self._divisions.keys() - ids:
            del self._divisions[customer_id]
        for customer_id in ids:
            found = customers.get(customer_id) or self._find(customer_id)
            customer = found or SharedCustomer(customer_id, (), shared=False)
            if customer_id in self._divisions:
                self._divisions[customer_id].customer = customer
            else:
                self._divisions[customer_id] = Division(customer)

    async def _round(self) -> None:
        began = self._clock()
        if not self._may_write(began):  # It was suspended a moment ago.
            return
        self._update_customers()
        readable = [name for name, cell in self._cells.items() if cell.readable]
        for division in self._divisions.values():
            division.plan(readable)
        lowering: dict[str, list[PartsOrder]] = {}
        for name, cell in self._cells.items():
            orders = lowering.setdefault(name, [])
            for customer_id, division in self._divisions.items():
                order: PartsOrder | None = division.read_order()
                if cell.readable:
                    order = division.lowering(name, began, self._unknown_parts(customer_id, began), readable)
                if order is not None:
                    orders.append(order)
        accepted = await self._send(lowering, began)
        if not is_quorum(accepted, self._cells):
            return
        self._led_at, now = began, self._clock()
        if now - began > RAISE_S:
            return
        raising: dict[str, list[PartsOrder]] = {}
        for customer_id, division in self._divisions.items():
            for name, order in division.raising(now, self._unknown_parts(customer_id, now), accepted).items():
                raising.setdefault(name, []).append(order)
        await self._send(raising, now)

    def _unknown_parts(self, customer_id: str, now: float) -> Sums:
        """What cells that have not answered yet may use: at most half of the limits once their leases are over."""
        if not self._unknown:
            return 0, 0, 0
        rates, concurrency, quotas = self._reserved.get(customer_id, (0, 0, 0))
        ends, half = self._ends(self._led_since), WHOLE // 2
        if now >= ends.lease:
            rates = min(rates, half)
        if now >= ends.requests:
            concurrency, quotas = min(concurrency, half), min(quotas, half)
        return rates, concurrency, quotas

    def _now_known(self, name: str) -> None:
        if name in self._unknown:
            self._unknown.discard(name)
            if not self._unknown:
                for division in self._divisions.values():
                    division.all_known()

    def _ends(self, began: float) -> Ends:
        """Of a lease that is sent at `began` or later in the same round."""
        return Ends(began + LEASE_S + MARGIN_S, began + LEASE_S + MARGIN_S + self._life_s)

    async def _send(self, orders: _Orders, began: float) -> set[str]:
        """Send the orders, and note their outcomes. Returns the cells that accepted them."""
        ends = self._ends(began)
        for name, of_cell in orders.items():
            for order in of_cell:
                self._divisions[order.customer_id].sent(name, order, began, ends)
        replies = await self._call(orders, self._epoch, began)
        now, accepted = self._clock(), set[str]()
        for name, of_cell in orders.items():
            reply = replies.get(name)
            if reply is None or not reply.accepted:
                # Perhaps another allotter claimed it while it could not be reached; with most of the others, it is claimed again.
                self._epoch = max(self._epoch, reply.epoch + 1 if reply is not None else 0)
                self._cells[name].readable = False
                continue
            accepted.add(name)
            self._cells[name].readable = True
            self._now_known(name)
            for order, state in zip(of_cell, reply.states, strict=True):
                found = ends
                if order.parts is None:
                    end = now + state.left_ms / 1000 + MARGIN_S
                    found = Ends(end, end + self._life_s) if state.left_ms > 0 else OVER
                self._divisions[order.customer_id].learned(name, order, state, reply.now_ms, found)
        return accepted

    async def _call(self, orders: _Orders, epoch: int, began: float) -> dict[str, Allotted]:
        """The replies of the cells that answer. Leases begin at `began`, however late the calls are sent."""
        calls = [self._call_cell(name, of_cell, epoch, began) for name, of_cell in orders.items()]
        replies = await asyncio.gather(*calls)
        return {name: reply for name, reply in zip(orders, replies, strict=True) if reply is not None}

    async def _call_cell(self, name: str, orders: Sequence[PartsOrder], epoch: int, began: float) -> Allotted | None:
        cell, ends_ms = self._cells[name], 0
        self._number += 1
        if cell.clock_ms is not None and any(order.parts is not None for order in orders):
            ends_ms = int((began + LEASE_S) * 1000 + cell.clock_ms)
        try:
            reply = await cell.allot(self._name, epoch, self._number, ends_ms, orders)
        except (RedisUnavailable, RedisFull):
            if cell.clock_ms is None:  # Perhaps its server is one of a cluster.
                await cell.close()
            return None
        cell.clock_ms, cell.customers = reply.now_ms - self._clock() * 1000, reply.customers
        return reply
