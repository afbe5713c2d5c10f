"""Random histories of the fair queue: customers of different weights and costs send many requests or few, and leave; batches of
all sizes run, some of them later than the next, and some of their requests are cancelled.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import combinations
from typing import NamedTuple, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import TierLimit
from scheduler.protocol.batches import ClaimedBatch
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission

T = TypeVar("T")
LIMITS = [TierLimit("free", 1e6, 1e6, 100_000, TIERS, places=4)]
LONG_MS = 600_000


class Customer(NamedTuple):
    """The weight of a customer, and the GPU time of each of its requests."""

    weight: float
    cost: float


PAIRS = ((1.0, 1.0), (1.0, 10.0), (4.0, 10.0), (0.5, 3.0), (2.0, 3.0))
CUSTOMERS = {f"c{n}": Customer(*pair) for n, pair in enumerate(PAIRS)}
LARGEST = 4
QUANTUM = LARGEST * max(customer.cost for customer in CUSTOMERS.values())
"""The GPU time of the largest batch of the most expensive requests."""

NAMES = st.sampled_from(sorted(CUSTOMERS))
SIZES = st.integers(1, LARGEST)
ANY = st.integers(0, 1000)  # An index, modulo the number of elements.


class FairShare(RuleBasedStateMachine):
    """One tier. `waiting` has the ids in the backlog of each customer, `served` the GPU time of those that left it."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = command_client(self.url, 10.0)
        self.run(self.client.flushall())
        self.pool = Pool(self.client, Keys())
        self.run(self.pool.gateway_stays("g1"))
        self.owner: dict[str, str] = {}
        self.waiting: dict[str, list[str]] = {name: [] for name in CUSTOMERS}
        self.first: list[str] = []  # In the tier queue: they leave first, at no charge.
        self.dead = 0  # Entries of requests that ended while they waited.
        self.served = dict.fromkeys(CUSTOMERS, 0.0)
        self.since: dict[tuple[str, str], tuple[float, float]] = {}
        self.charged: set[str] = set()
        self.open: list[ClaimedBatch] = []
        self.number = 0

    def run(self, call: Awaitable[T]) -> T:
        async def called() -> T:
            return await call

        return self.runner.run(called())

    @precondition(lambda self: sum(map(len, self.waiting.values())) < 200)
    @rule(names=st.lists(NAMES, min_size=1, max_size=4, unique=True), count=st.sampled_from((2, 40, 40)))
    def arrive(self, names: Sequence[str], count: int) -> None:
        fresh = [
            self.pool.submission(customer_id=name, weight=CUSTOMERS[name].weight, total_ms=LONG_MS, queue_ms=LONG_MS)
            for _ in range(count)
            for name in names
        ]
        verdicts = self.run(self.pool.admit(fresh, LIMITS))
        assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
        ahead = {i.decode() for i in self.run(self.client.lrange(self.pool.keys.queue("free"), 0, -1))}
        for s in fresh:
            self.owner[s.id] = s.customer_id
            (self.first if s.id in ahead else self.waiting[s.customer_id]).append(s.id)

    @precondition(lambda self: len(self.open) < 2)
    @rule(size=SIZES)
    def start(self, size: int) -> None:
        """A batch of requests that wait starts; of each customer the oldest leave."""
        self.number += 1
        formed = self.run(self.pool.batches.form(f"b{self.number}", [("free", size)], 100, TIERS))
        alive = len(self.first) + sum(map(len, self.waiting.values()))
        assert formed.size or not alive or self.dead > 3 * size, "a customer with work and a free worker is idle"
        if self.dead:
            length = self.run(self.pool.depth("free"))
            self.dead = length - (alive - formed.size)
        if not formed.size:
            return
        batch = self.run(self.pool.claim_next())
        self.open.append(batch)
        for request in batch.requests:
            name = self.owner[request.id]
            own = self.first if request.id in self.first else self.waiting[name]
            assert own.pop(0) == request.id, "a customer's requests leave in their order, once"
            if own is self.waiting[name]:
                self.charged.add(request.id)
                self.served[name] += CUSTOMERS[name].cost

    @precondition(lambda self: self.open)
    @rule(some=ANY)
    def end(self, some: int) -> None:
        batch = self.open.pop(some % len(self.open))
        outcomes = [done(r.id)._replace(cost_ms=CUSTOMERS[self.owner[r.id]].cost) for r in batch.requests]
        self.run(self.pool.batches.finish(batch.batch_id, batch.token, outcomes))

    @rule(count=st.integers(4, 16), size=SIZES)
    def serve(self, count: int, size: int) -> None:
        """Batches run, each while the next is formed."""
        for _ in range(count):
            if len(self.open) > 1:
                self.end(0)
            self.start(size)
            self.shares_are_fair()
        while self.open:
            self.end(0)

    @rule(
        name=NAMES, count=st.integers(4, 16), code=st.sampled_from((ErrorCode.NO_CAPACITY, ErrorCode.DEADLINE_EXCEEDED))
    )
    def fail(self, name: str, count: int, code: ErrorCode) -> None:
        """Running requests of a customer end by a fault of the service: they are not charged."""
        while self.open:
            self.end(0)
        for _ in range(count):
            self.start(LARGEST)
            gone = [r.id for batch in self.open for r in batch.requests if self.owner[r.id] == name]
            self.run(self.pool.terminations.cancel([(i, code) for i in gone]))
            self.served[name] -= CUSTOMERS[name].cost * len(self.charged.intersection(gone))
            self.shares_are_fair()
            while self.open:
                self.end(0)

    @rule(name=NAMES, keep=st.integers(0, 3))
    def leave(self, name: str, keep: int) -> None:
        """A customer cancels what waits, except for its oldest requests."""
        gone = self.waiting[name][keep:]
        if gone:
            self.run(self.pool.terminations.cancel([(i, ErrorCode.CANCELLED) for i in gone]))
            self.dead += len(gone)
            del self.waiting[name][keep:]

    @invariant()
    def shares_are_fair(self) -> None:
        """While two customers have a backlog, their GPU time by weight differs by at most a quantum of each."""
        busy = [name for name, ids in self.waiting.items() if ids]
        now = {(a, b): (self.served[a], self.served[b]) for a, b in combinations(busy, 2)}
        self.since = {pair: self.since.get(pair, served) for pair, served in now.items()}
        for (a, b), (served_a, served_b) in now.items():
            before_a, before_b = self.since[a, b]
            one, other = CUSTOMERS[a].weight, CUSTOMERS[b].weight
            difference = abs((served_a - before_a) / one - (served_b - before_b) / other)
            assert difference <= QUANTUM / one + QUANTUM / other, ("unfair", a, b, difference, self.served)

    def teardown(self) -> None:
        """Nothing is left where all requests have ended."""
        try:
            self.serve(1, LARGEST)
            for name in CUSTOMERS:
                self.leave(name, 0)
            while self.run(self.pool.depth("free")):
                self.start(64)
            assert [*self.first, *(i for ids in self.waiting.values() for i in ids)] == [], "a request was lost"
            assert self.run(self.client.exists("waiting:free", "backlogs:free")) == 0
        finally:
            self.run(self.client.aclose())
            self.runner.close()
