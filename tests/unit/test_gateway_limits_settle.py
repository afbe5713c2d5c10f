"""Limits under constant load settle and stay there: customers, buckets and two gateways, played on a literal clock.

Each gateway has the real meter and the real limits. What Redis would do is played here, and so are the clients: some
send at their pace whatever they are told, some come back when they are told to.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import pytest

from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import DemandMeter, fill
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ratelimit.capacity import RELAX_PER_SECOND
from scheduler.protocol.pool_view import GatewayStats, Observation, WorkerView

BEAT_S = 0.25
LATENCY_S = 0.3  # Who enters is counted when it is answered, at the factor that it entered with.
TINY = Model("tiny", "default", 32, None, 40, 3000, 100.0, 1.0, 0, True)
TIERS = (
    Tier("enterprise", 1, 0.05, (100.0, 200.0, 8, None), 500, 2000, None, None),
    Tier("paid", 2, 0.25, (50.0, 100.0, 8, None), 500, 2000, None, None),
    Tier("free", 3, 0.10, (10.0, 20.0, 8, None), 500, 2000, None, None),
)
BASE = {tier.name: (tier.limits[0] or 0.0, tier.limits[1] or 0.0) for tier in TIERS}
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())


@dataclass
class Bucket:
    """As in Redis: since the last look it was filled at the lower of the rates then and now."""

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
    """Sends `rps` in all from `clients` clients, which `wait` as they are told, or do not."""

    tier: str
    rps: float
    waits: bool = False
    clients: int = 1
    begins: float = 0.0
    ends: float = float("inf")
    bucket: Bucket = field(init=False)
    base: tuple[Bucket, ...] = field(init=False)  # What each gateway knows of the base limit.

    def __post_init__(self) -> None:
        _, burst = BASE[self.tier]
        self.bucket, self.base = Bucket(burst), (Bucket(burst), Bucket(burst))


class Play:
    """A pool of `gpus` healthy GPUs that do 100 requests/s each, behind two gateways."""

    def __init__(self, gpus: int, customers: Iterable[Customer]) -> None:
        self.gpus = gpus
        self.now = 0.0
        self.gateways = [LiveLimits("default"), LiveLimits("default")]
        self.passed = dict.fromkeys(BASE, 0)
        self.seen: list[tuple[float, int, dict[str, float]]] = []  # When, at which gateway, the factors.
        self._meters = [DemandMeter("g0", 0.0), DemandMeter("g1", 0.0)]
        self._published: dict[str, GatewayStats] = {}
        self._tiers = {name: Bucket(1.0) for name in BASE}
        self._random = random.Random(4)
        self._turns = itertools.count()
        self._events: list[tuple[float, int, Customer | int | Callable[[], None]]] = []
        for number in (0, 1):
            self._at(number * BEAT_S / 2, number)
        for customer in customers:
            for _ in range(customer.clients):
                self._at(customer.begins + self._random.random() * customer.clients / customer.rps, customer)

    def run(self, seconds: float) -> None:
        """Go on for so long; what passes and what is seen is noted afresh."""
        until = self.now + seconds
        self.passed, self.seen = dict.fromkeys(BASE, 0), []
        while self._events[0][0] < until:
            self.now, _, who = heapq.heappop(self._events)
            if isinstance(who, int):
                self._beat(who)
            elif not isinstance(who, Customer):
                who()
            elif self.now < who.ends:
                self._send(who, self._random.randrange(2))
        self.now = until

    def band(self, tier: str) -> tuple[float, float]:
        """The lowest and the highest factor that was in force."""
        factors = [factors[tier] for _, _, factors in self.seen]
        return min(factors), max(factors)

    def _at(self, when: float, who: Customer | int | Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._turns), who))

    def _beat(self, number: int) -> None:
        limits = self.gateways[number]
        stats = limits.published(self._meters[number].heartbeat(list(BASE), self.now))
        self._published[stats.gateway_id] = stats
        workers = [WorkerView(f"w{n}", "busy", 0.9, 1, 10.0, True, 100.0, 50.0, "tiny", "1") for n in range(self.gpus)]
        limits.observe(Observation(0, {}, workers, list(self._published.values()), 0, 0, 0, 0), SNAPSHOT, self.now)
        self.seen.append((self.now, number, {name: limits.factor(name) for name in BASE}))
        self._at(self.now + BEAT_S, number)

    def _send(self, customer: Customer, number: int) -> None:
        refused_s = self._judge(customer, number)
        if customer.waits and refused_s:
            self._at(self.now + refused_s * (1 + 0.25 * self._random.random()), customer)
        else:
            self._at(self.now + customer.clients / customer.rps, customer)

    def _judge(self, customer: Customer, number: int) -> float:
        """Seconds until trying again pays; 0 where it entered."""
        tier, limits, demand_meter = customer.tier, self.gateways[number], self._meters[number]
        factor, (rate, burst) = limits.factor(tier), BASE[tier]
        demand_meter.arrived(tier, "acme")
        base_allows = customer.base[number].has(rate, burst, self.now)
        customer.base[number].tokens -= base_allows
        if not customer.bucket.has(rate * factor, max(1.0, burst * factor), self.now):
            return customer.bucket.retry_s()
        limit = next(limit for limit in limits.current(SNAPSHOT).tiers if limit.name == tier)
        if self._tiers[tier].has(limit.rate, limit.burst, self.now):
            customer.bucket.tokens -= 1
            self._tiers[tier].tokens -= 1
            self.passed[tier] += 1
            filled = fill(customer.bucket.tokens, max(1.0, burst * factor))
            self._at(self.now + LATENCY_S, partial(demand_meter.passed, tier, factor, filled))
            return 0.0
        if base_allows:
            demand_meter.passed(tier, 1.0, 1.0)
        return max(0.1, self._tiers[tier].retry_s())


CLIENTS = pytest.mark.parametrize(
    ("waits", "clients"), [(False, 1), (False, 8), (True, 1), (True, 8)], ids=["stubborn", "eight", "patient", "both"]
)


def twice_the_capacity(waits: bool, clients: int) -> list[Customer]:
    """800 requests/s within base limits, for 400: enterprise gets its 100, paid 260 of 300, free 40 of 400."""
    return [
        *(Customer("enterprise", 50.0, waits, clients) for _ in range(2)),
        *(Customer("paid", 60.0, waits, clients) for _ in range(6)),
        *(Customer("free", 40.0, waits, clients) for _ in range(40)),
    ]


@CLIENTS
def test_a_constant_overload_gives_constant_limits(waits: bool, clients: int) -> None:
    """No factor swings, whether clients wait as told or not, and each tier passes what it is allocated."""
    play = Play(4, twice_the_capacity(waits, clients))
    play.run(20.0)
    play.run(20.0)

    assert play.band("enterprise") == (1.0, 1.0)
    low, high = play.band("paid")
    assert 0.82 <= low <= high <= 0.98  # 260 / 300 = 0.87
    low, high = play.band("free")
    assert 0.08 <= low <= high <= 0.16  # 40 / 400 = 0.10
    assert {name: passed / 20 for name, passed in play.passed.items()} == {
        "enterprise": pytest.approx(100.0, rel=0.02),
        "paid": pytest.approx(260.0, rel=0.03),
        "free": pytest.approx(40.0, rel=0.1),
    }


@CLIENTS
def test_many_small_customers_use_all_that_their_tier_has(waits: bool, clients: int) -> None:
    """Nobody is near a base limit, and the tier's bucket decides: what there is is used, and nobody above loses."""
    customers = [Customer("free", 2.0, waits, clients) for _ in range(200)]
    play = Play(4, [*customers, *(Customer("paid", 10.0, waits, clients) for _ in range(30))])
    play.run(10.0)
    play.run(20.0)

    assert play.band("paid") == (1.0, 1.0)
    assert play.passed["paid"] / 20 == pytest.approx(300.0, rel=0.02)
    assert play.passed["free"] / 20 == pytest.approx(100.0, rel=0.05)


def test_gateways_come_to_the_same() -> None:
    """A customer is told the same limit by each, but for the eighth of a second between their looks."""
    play = Play(4, twice_the_capacity(waits=False, clients=1))
    play.run(10.0)
    play.run(10.0)

    for (_, one, before), (_, other, after) in itertools.pairwise(play.seen):
        assert one != other
        assert before == pytest.approx(after, abs=0.05)


def test_half_of_the_gpus_die() -> None:
    """Free falls with the first look, enterprise never; both come back, slowly, when the GPUs do."""
    load = [Customer("enterprise", 50.0), Customer("enterprise", 50.0), Customer("paid", 50.0), Customer("paid", 50.0)]
    play = Play(4, [*load, *(Customer("free", 10.0) for _ in range(10))])
    play.run(10.0)
    play.run(5.0)
    assert [play.band(tier) for tier in BASE] == [(1.0, 1.0)] * 3

    play.gpus = 2
    play.run(BEAT_S)
    assert play.band("enterprise") == (1.0, 1.0)
    assert play.band("free")[1] < 0.25
    play.run(10.0)
    assert play.band("enterprise") == (1.0, 1.0)
    assert play.passed["enterprise"] == pytest.approx(1000, rel=0.01)
    assert play.passed["free"] >= 200 * 0.9  # Its guarantee.

    play.gpus = 4
    play.run(2.0)
    assert play.band("free")[1] <= 0.3 + 2 * RELAX_PER_SECOND
    play.run(8.0)
    assert play.seen[-1][2] == {"enterprise": 1.0, "paid": 1.0, "free": 1.0}


def test_an_idle_tier_begins_at_once() -> None:
    """Free has all the capacity and wants ten times more; the first requests of enterprise pass all the same."""
    flood = [Customer("free", 100.0) for _ in range(40)]
    play = Play(4, [*flood, *(Customer("enterprise", 90.0, begins=10.0) for _ in range(3))])
    play.run(10.0)
    play.run(1.0)
    assert play.passed["enterprise"] == pytest.approx(270, abs=5)
    play.run(5.0)
    play.run(5.0)

    assert play.band("enterprise") == (1.0, 1.0)
    assert play.passed["enterprise"] / 5 == pytest.approx(270.0, rel=0.02)
    assert play.passed["free"] / 5 == pytest.approx(130.0, rel=0.05)


@CLIENTS
def test_limits_come_back_when_the_overload_ends(waits: bool, clients: int) -> None:
    """Two seconds until it is out of the window, four for the way back."""
    most = [Customer("free", 40.0, waits, clients, ends=10.0) for _ in range(60)]
    play = Play(4, [*most, *(Customer("free", 5.0, waits, clients) for _ in range(20))])
    play.run(9.0)
    assert play.seen[-1][2]["free"] < 0.8
    play.run(1.0 + 2.0 + 1 / RELAX_PER_SECOND + 2 * BEAT_S)

    assert play.seen[-1][2]["free"] == 1.0
