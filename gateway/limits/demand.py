"""What this gateway counts of its tiers, and the rates over the last two seconds that it publishes.

Demand is what the customers' base limits would let through. Under a lowered limit it cannot be seen: whoever is held
back is refused, or, told when to come back, sends less. So who gets through and leaves a bucket that is being emptied
stands for 1 / factor requests, which is what the base limit would let through of that customer; who finds the bucket
well filled uses less than the lowered limit, and stands for one. Were only what comes counted, the demand of clients
that wait as told would vanish with their retries, the limits would open, and close again, for ever.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gateway.busiest import Busiest
from gateway.latency_window import LatencyWindow
from scheduler.protocol.pool_view import GatewayStats, TierStats

WINDOW_BEATS = 8  # Rates are taken over so many beats.
TOLD = (0.5, 0.95, 0.99)  # The percentiles of the answer time that are published.
LEAST_FACTOR = 0.01  # Under a lower one, single requests would count as hundreds.
WELL_FILLED = 0.75  # A bucket this full is not what holds its customer back.


class Counts(NamedTuple):
    """What was counted in one beat."""

    arrived: float = 0
    demand: float = 0
    guessed: float = 0
    shed: float = 0
    answered: float = 0
    retries: float = 0
    shadowed: float = 0
    failed: float = 0


class TierMeter:
    """One tier's counters since the last beat, those of the beats before it, and its latencies."""

    __slots__ = (
        "answered",
        "arrived",
        "demand",
        "failed",
        "guessed",
        "latency",
        "retries",
        "shadowed",
        "shed",
        "window",
    )

    def __init__(self) -> None:
        self.latency = LatencyWindow()
        self.window: deque[Counts] = deque([Counts()] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._begin()

    def _begin(self) -> None:
        self.arrived, self.shed, self.answered, self.retries, self.shadowed = 0, 0, 0, 0, 0
        self.demand, self.guessed, self.failed = 0.0, 0.0, 0

    def close(self) -> Counts:
        """End the beat; what was counted in the whole window."""
        self.window.append(
            Counts(
                arrived=self.arrived,
                demand=self.demand,
                guessed=self.guessed,
                shed=self.shed,
                answered=self.answered,
                retries=self.retries,
                shadowed=self.shadowed,
                failed=self.failed,
            )
        )
        self._begin()
        return Counts(*(sum(column) for column in zip(*self.window, strict=True)))


def fill(remaining: float, burst: float) -> float:
    """How full, 0..1, a bucket of `burst` was that has `remaining` left after a request; 0 where that says nothing.

    A bucket of one is empty after every request, whoever sends it.
    """
    return min(1.0, (max(0.0, remaining) + 1) / burst) if burst >= 2 else 0.0


class Meter:
    """Counters of all tiers; `beat` turns them into what is published.

    `batches` gives what was counted of batches so far: how many, and how many full ones they come to.
    """

    def __init__(
        self, gateway_id: str, now: float, batches: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    ) -> None:
        self._gateway_id = gateway_id
        self._batches = batches
        self._batches_were: deque[tuple[float, float]] = deque([(0.0, 0.0)] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._busiest = Busiest()
        self._tiers: dict[str, TierMeter] = {}
        self._spans: deque[float] = deque([0.0] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._beat_at = now

    def _tier(self, name: str) -> TierMeter:
        meter = self._tiers.get(name)
        if meter is None:
            meter = self._tiers[name] = TierMeter()
        return meter

    def arrived(self, tier: str, customer: str) -> None:
        """A valid request of a known key of this customer, by name, came in."""
        self._tier(tier).arrived += 1
        self._busiest.asked(customer, tier)

    def retried(self, tier: str) -> None:
        """It says that it was tried before."""
        self._tier(tier).retries += 1

    def passed(self, tier: str, factor: float, filled: float | None = None) -> None:
        """It was not stopped by its customer's limits, which now stand at `factor` of the base limits.

        `filled`, 0..1: how full the emptiest of the customer's buckets was that the factor lowers; None where that is not
        known, and demand is then held to be no more than what came. Of what is refused for want of capacity, only what
        the base limits have room for is to be counted, and at factor 1: nothing is spent, so a customer may try forever.
        """
        meter = self._tier(tier)
        weight = 1 / max(factor, LEAST_FACTOR)
        if filled is None:
            meter.guessed += weight
        else:
            meter.demand += 1.0 if filled >= WELL_FILLED else weight

    def shed(self, tier: str) -> None:
        """It was refused for want of capacity."""
        self._tier(tier).shed += 1

    def failed(self, tier: str) -> None:
        """It ended badly by our fault; one that was shed is told so as well."""
        self._tier(tier).failed += 1

    def shadowed(self, tier: str) -> None:
        """It entered, and would have been refused were its tier's limits in force."""
        self._tier(tier).shadowed += 1

    def answered(self, tier: str, latency_ms: float, now: float) -> None:
        """It got its output."""
        meter = self._tier(tier)
        meter.answered += 1
        meter.latency.add(latency_ms, now)

    def beat(self, tiers: list[str], now: float) -> GatewayStats:
        """Close the beat and give the rates. Tiers that are not in `tiers` any more are forgotten."""
        self._tiers = {name: self._tier(name) for name in tiers}
        elapsed_s = max(0.0, now - self._beat_at)
        self._spans.append(elapsed_s)
        self._beat_at = now
        span_s = max(sum(self._spans), 0.001)
        stats = {name: _rates(meter, span_s, now) for name, meter in self._tiers.items()}
        total = sum(each.arrived_rps for each in stats.values())
        batches, filled = self._batch_rates(span_s)
        return GatewayStats(
            self._gateway_id,
            round(total, 3),
            stats,
            batches_per_second=batches,
            filled_per_second=filled,
            busiest=self._busiest.beat(elapsed_s),
        )

    def _batch_rates(self, span_s: float) -> tuple[float, float]:
        """Of the window, as all other rates."""
        before, now = self._batches_were[0], self._batches()
        self._batches_were.append(now)
        # What the model's row says a full batch is may change: then what was counted before counts otherwise.
        return round(max(0.0, now[0] - before[0]) / span_s, 3), round(max(0.0, now[1] - before[1]) / span_s, 3)


def _rates(meter: TierMeter, span_s: float, now: float) -> TierStats:
    """A tier's counts as rates a second."""
    rates = Counts(*(round(count / span_s, 3) for count in meter.close()))
    p50_ms, p95_ms, p99_ms = meter.latency.percentiles_ms(TOLD, now)
    return TierStats(
        demand_rps=round(rates.demand + min(rates.guessed, rates.arrived), 3),
        shed_per_second=rates.shed,
        p95_ms=p95_ms,
        answered_rps=rates.answered,
        arrived_rps=rates.arrived,
        retries_rps=rates.retries,
        shadowed_rps=rates.shadowed,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        failed_rps=rates.failed,
    )
