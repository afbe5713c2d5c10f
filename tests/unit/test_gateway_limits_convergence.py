"""Limits converge under constant load: a simulation of customers, buckets and two gateways on a virtual clock.

Each gateway has the real meter and the real limits. Redis and the clients are simulated: some clients keep their rate
when they are rejected, some wait as the response says.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import pytest

from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter, bucket_fill
from ledger.catalog.snapshot import Model, Snapshot, Tier
from scheduler.protocol.pool_view import GatewayStats, Observation, TierStats, WorkerView

BEAT_S = 0.25
LATENCY_S = 0.3  # A request counts as demand when it is answered, at the factor of its admission.
GPUS = [WorkerView(f"w{n}", "busy", 0.9, 1, 100.0, 50.0, "tiny", "1", age_ms=10.0, healthy=True) for n in range(4)]
TINY = Model("tiny", "default", 32, None, 40, 100.0, 1.0, 0, True)
TIERS = (
    Tier("enterprise", 1, 0.05, (100.0, 200.0, 8, None), 500, 2000, None, None),
    Tier("paid", 2, 0.25, (50.0, 100.0, 8, None), 500, 2000, None, None),
    Tier("free", 3, 0.10, (10.0, 20.0, 8, None), 500, 2000, None, None),
)
BASE = {tier.name: (tier.limits[0] or 0.0, tier.limits[1] or 0.0) for tier in TIERS}
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())


@dataclass
class Bucket:
    """A token bucket as in Redis: refilled at the lower of the rates at the last call and now."""

    tokens: float
    at: float = 0.0
    rate: float = 0.0

    def has(self, rate: float, burst: float, now: float) -> bool:
        self.tokens = min(burst, self.tokens + (now - self.at) * min(rate, self.rate or rate))
        self.at, self.rate = now, rate
        return self.tokens >= 1

    def retry_s(self) -> float:
        return (1 - self.tokens) / max(self.rate, 0.001)


@dataclass
class Customer:
    """Sends `rps` from `clients` clients, which wait after a rejection if `waits` is set."""

    tier: str
    rps: float
    waits: bool
    clients: int
    bucket: Bucket = field(init=False)
    base: tuple[Bucket, ...] = field(init=False)  # The base limit as each gateway estimates it.

    def __post_init__(self) -> None:
        _, burst = BASE[self.tier]
        self.bucket, self.base = Bucket(burst), (Bucket(burst), Bucket(burst))


class Simulation:
    """A pool of four GPUs of 100 requests/s each, behind two gateways."""

    def __init__(self, customers: Iterable[Customer]) -> None:
        self.now = 0.0
        self.gateways = [LiveLimits("default"), LiveLimits("default")]
        self.admitted = dict.fromkeys(BASE, 0)
        self.factors: list[dict[str, float]] = []
        self.reported: list[list[TierStats]] = []
        self._meters = [DemandMeter("g0", 0.0), DemandMeter("g1", 0.0)]
        self._published: dict[str, GatewayStats] = {}
        self._tiers = {name: Bucket(1.0) for name in BASE}
        self._random = random.Random(4)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for number in (0, 1):
            self._at(number * BEAT_S / 2, partial(self._heartbeat, number))
        for customer in customers:
            for _ in range(customer.clients):
                self._at(self._random.random() * customer.clients / customer.rps, partial(self._send, customer))

    def run(self, seconds: float) -> None:
        """Continue for so long; counts and factors start anew."""
        until = self.now + seconds
        self.admitted, self.factors, self.reported = dict.fromkeys(BASE, 0), [], []
        while self._events[0][0] < until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def range(self, tier: str) -> tuple[float, float]:
        """The lowest and the highest factor."""
        values = [factors[tier] for factors in self.factors]
        return min(values), max(values)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _heartbeat(self, number: int) -> None:
        limits = self.gateways[number]
        stats = limits.published(self._meters[number].heartbeat(list(BASE), self.now))
        self._published[stats.gateway_id] = stats
        self.reported.append([each.tiers["free"] for each in self._published.values()])
        limits.observe(Observation(0, {}, GPUS, list(self._published.values()), 0, 0, 0, 0), SNAPSHOT, self.now)
        self.factors.append({name: limits.factor(name) for name in BASE})
        self._at(self.now + BEAT_S, partial(self._heartbeat, number))

    def _send(self, customer: Customer) -> None:
        retry_s = self._admit(customer, self._random.randrange(2))
        pause_s = customer.clients / customer.rps
        if customer.waits and retry_s:
            pause_s = retry_s * (1 + 0.25 * self._random.random())
        self._at(self.now + pause_s, partial(self._send, customer))

    def _admit(self, customer: Customer, number: int) -> float:
        """The wait of the rejection (seconds); 0 if the request is admitted."""
        tier, limits, meter = customer.tier, self.gateways[number], self._meters[number]
        factor, (rate, burst) = limits.factor(tier), BASE[tier]
        meter.arrived(tier, "acme")
        base_allows = customer.base[number].has(rate, burst, self.now)
        customer.base[number].tokens -= base_allows
        if not customer.bucket.has(rate * factor, max(1.0, burst * factor), self.now):
            if base_allows and factor < 1:
                meter.held_back(tier)
            return customer.bucket.retry_s()
        limit = next(limit for limit in limits.current(SNAPSHOT).tiers if limit.name == tier)
        if self._tiers[tier].has(limit.rate, limit.burst, self.now):
            customer.bucket.tokens -= 1
            self._tiers[tier].tokens -= 1
            self.admitted[tier] += 1
            filled = bucket_fill(customer.bucket.tokens, max(1.0, burst * factor))
            self._at(self.now + LATENCY_S, partial(meter.passed, tier, factor, filled))
            return 0.0
        if base_allows:
            meter.passed(tier)
        return max(0.1, self._tiers[tier].retry_s())


@pytest.mark.parametrize(("waits", "clients"), [(False, 1), (False, 8), (True, 1), (True, 8)])
def test_constant_overload_gives_constant_limits(waits: bool, clients: int) -> None:
    """Demand is 800/s within base limits for 400/s: enterprise gets its 100, paid 260 of 300, free 40 of 400.

    No factor oscillates, each tier admits what it is allocated, and both gateways have the same limits.
    """
    load = [("enterprise", 50.0)] * 2 + [("paid", 60.0)] * 6 + [("free", 40.0)] * 40
    simulation = Simulation(Customer(tier, rps, waits, clients) for tier, rps in load)
    simulation.run(20.0)
    simulation.run(20.0)

    assert simulation.range("enterprise") == (1.0, 1.0)
    low, high = simulation.range("paid")
    assert 0.82 <= low <= high <= 0.98  # 260 / 300 = 0.87
    low, high = simulation.range("free")
    assert 0.08 <= low <= high <= 0.16  # 40 / 400 = 0.10
    assert {name: admitted / 20 for name, admitted in simulation.admitted.items()} == {
        "enterprise": pytest.approx(100.0, rel=0.02),
        "paid": pytest.approx(260.0, rel=0.03),
        "free": pytest.approx(40.0, rel=0.1),
    }
    if not waits and clients == 1:
        for before, after in itertools.pairwise(simulation.factors):
            assert before == pytest.approx(after, abs=0.05)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.1])
def test_a_flood_is_reported_as_it_arrives(factor: float, waits: bool) -> None:
    """Enterprise and paid use 340/s of 400/s. Free customers send at half of their base limit, which is all demand.

    The reported demand is what arrives, and the factor is the rest, 60/s, divided by the demand: also where clients wait
    as the responses say, for five minutes.
    """
    higher = [Customer("enterprise", 50.0, False, 1) for _ in range(2)] + [
        Customer("paid", 40.0, False, 4) for _ in range(6)
    ]
    simulation = Simulation(higher + [Customer("free", 5.0, waits, 1) for _ in range(round(12 / factor))])
    simulation.run(300.0 if waits else 20.0)
    simulation.run(20.0)

    reported = [stats for stats in simulation.reported if len(stats) == 2]
    demand_rps = statistics.fmean(sum(each.demand_rps for each in stats) for stats in reported)
    arrived_rps = statistics.fmean(sum(each.arrived_rps for each in stats) for stats in reported)
    assert 0.95 * arrived_rps <= demand_rps <= arrived_rps
    assert statistics.fmean(each["free"] for each in simulation.factors) == pytest.approx(60 / demand_rps, rel=0.1)
    assert simulation.range("paid") == (1.0, 1.0)
    assert simulation.admitted["free"] / 20 == pytest.approx(60.0, rel=0.1)
