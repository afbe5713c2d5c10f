"""The demand of each tier at this gateway: rates over two seconds.

Demand is the part of the arrivals that the customers' base limits accept or would accept: each request counts once, so it
is never above what arrived. It is reported, shared out and scaled for.

Clients that obey Retry-After send less under a reduced limit. If their factor followed from demand alone, it would rise,
they would send more, and the limits would open and close forever. So there is a second figure, only for the factor: the
highest demand without reduced limits. An accepted request that leaves a nearly empty bucket counts as 1 / factor
requests in it; one that finds its bucket well filled counts as one.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from gateway.limits.gpu_time import GpuTimeMeter
from gateway.limits.latency_window import LatencyWindow
from gateway.limits.outcomes import OutcomeMeter
from gateway.limits.refusals import RefusalMeter
from gateway.limits.top_customers import TopCustomers
from scheduler.protocol.pool_view import GatewayStats, TierStats

WINDOW_BEATS = 8  # Heartbeats that a rate is averaged over.
RECENT_BEATS = 2  # Those of the recent demand.
PERCENTILES = (0.5, 0.95, 0.99)  # Of the response time, as published.
LEAST_FACTOR = 0.01  # Below it, single requests would count as hundreds.
WELL_FILLED = 0.75  # A bucket this full does not limit its customer.


class DemandCounts(NamedTuple):
    """The counts of one heartbeat."""

    arrived: float = 0
    demand: float = 0
    unreduced: float = 0
    shed: float = 0
    answered: float = 0
    retries: float = 0
    shadowed: float = 0
    failed: float = 0


class TierMeter:
    """One tier's counters since the last heartbeat, those of the heartbeats before it, and its response times."""

    __slots__ = (*DemandCounts._fields, "latency", "window")

    def __init__(self) -> None:
        self.latency = LatencyWindow()
        self.window: deque[DemandCounts] = deque([DemandCounts()] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._begin()

    def _begin(self) -> None:
        self.arrived, self.shed, self.answered, self.retries, self.shadowed = 0, 0, 0, 0, 0
        self.demand, self.unreduced, self.failed = 0, 0.0, 0

    def close(self) -> DemandCounts:
        """Close the heartbeat; returns the counts of the whole window."""
        self.window.append(DemandCounts(*(getattr(self, name) for name in DemandCounts._fields)))
        self._begin()
        return DemandCounts(*(sum(column) for column in zip(*self.window, strict=True)))


def bucket_fill(remaining: float, burst: float) -> float:
    """How full, 0..1, a bucket of `burst` was that has `remaining` left after a request; 0 for a burst under 2.

    A bucket of one is empty after every request, so its level says nothing.
    """
    return min(1.0, (max(0.0, remaining) + 1) / burst) if burst >= 2 else 0.0


class DemandMeter:
    """Counters of all tiers; `heartbeat` turns them into published rates.

    `batches` returns the number of batches so far, and the number of full batches with as many requests.
    """

    def __init__(
        self, gateway_id: str, now: float, batches: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    ) -> None:
        self._gateway_id = gateway_id
        self._batches = batches
        self._batches_were: deque[tuple[float, float]] = deque([(0.0, 0.0)] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._busiest = TopCustomers()
        self.outcomes = OutcomeMeter()
        self.gpu_time = GpuTimeMeter()
        self.refusals = RefusalMeter()
        self._tiers: defaultdict[str, TierMeter] = defaultdict(TierMeter)
        self._spans: deque[float] = deque([0.0] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._beat_at = now

    def arrived(self, tier: str, customer: str) -> None:
        """Count a valid request of a customer, by name."""
        self._tiers[tier].arrived += 1
        self._busiest.count(customer, tier)

    def retried(self, tier: str) -> None:
        """Count a request that its client marked as a retry."""
        self._tiers[tier].retries += 1

    def passed(self, tier: str, factor: float = 1.0, filled: float = 1.0) -> None:
        """Count a request that its customer's limits accepted, which are at `factor` of the base limits.

        `filled`, 0..1: how full the emptiest of the customer's buckets was that the factor reduces. Of requests rejected
        for capacity, count only what the base limits have room for, at factor 1: nothing is charged, so a customer may
        retry forever.
        """
        demand_meter = self._tiers[tier]
        demand_meter.demand += 1
        demand_meter.unreduced += 1.0 if filled >= WELL_FILLED else 1 / max(factor, LEAST_FACTOR)

    def held_back(self, tier: str) -> None:
        """Count a request that only the reduced limits rejected. `unreduced` has it already, in the weights of `passed`."""
        self._tiers[tier].demand += 1

    def shed(self, tier: str) -> None:
        """Count a request that was rejected for capacity."""
        self._tiers[tier].shed += 1

    def failed(self, tier: str) -> None:
        """Count a failure that the client did not cause; rejections for capacity are counted here as well."""
        self._tiers[tier].failed += 1

    def shadowed(self, tier: str) -> None:
        """Count an accepted request that the limits of a tier in shadow would have rejected."""
        self._tiers[tier].shadowed += 1

    def answered(self, tier: str, latency_ms: float, now: float) -> None:
        """Count a completed request."""
        demand_meter = self._tiers[tier]
        demand_meter.answered += 1
        demand_meter.latency.add(latency_ms, now)

    def heartbeat(self, tiers: list[str], now: float) -> GatewayStats:
        """Close the heartbeat and return its rates. Tiers that are not in `tiers` any more are removed."""
        self._tiers = defaultdict(TierMeter, {name: self._tiers[name] for name in tiers})
        elapsed_s = max(0.0, now - self._beat_at)
        self._spans.append(elapsed_s)
        self._beat_at = now
        span_s = max(sum(self._spans), 0.001)
        recent_s = max(sum(list(self._spans)[-RECENT_BEATS:]), 0.001)
        stats = {name: _rates(demand_meter, span_s, recent_s, now) for name, demand_meter in self._tiers.items()}
        total = sum(each.arrived_rps for each in stats.values())
        (batches_were, filled_were), (batches, filled) = self._batches_were[0], self._batches()
        self._batches_were.append((batches, filled))
        gpu_ms, gpu_times = self.gpu_time.heartbeat(now)
        refused, served, failed = self.refusals.heartbeat(now)
        return GatewayStats(
            self._gateway_id,
            round(total, 3),
            stats,
            # The full size may change in the model's row, and with it the earlier count.
            batches_per_second=round(max(0.0, batches - batches_were) / span_s, 3),
            filled_per_second=round(max(0.0, filled - filled_were) / span_s, 3),
            busiest=self._busiest.heartbeat(elapsed_s),
            outcomes=self.outcomes.heartbeat(tiers, now),
            gpu_ms=gpu_ms,
            gpu_times=gpu_times,
            refused=refused,
            served=served,
            failed=failed,
        )


def _rates(demand_meter: TierMeter, span_s: float, recent_s: float, now: float) -> TierStats:
    """A tier's counts as rates a second."""
    rates = DemandCounts(*(round(count / span_s, 3) for count in demand_meter.close()))
    recent = list(demand_meter.window)[-RECENT_BEATS:]
    recent_demand = min(sum(each.demand for each in recent), sum(each.arrived for each in recent))
    p50_ms, p95_ms, p99_ms = demand_meter.latency.percentiles_ms(PERCENTILES, now)
    return TierStats(
        # A request may be counted as demand in a later heartbeat than its arrival.
        demand_rps=min(rates.demand, rates.arrived),
        shed_per_second=rates.shed,
        p95_ms=p95_ms,
        answered_rps=rates.answered,
        arrived_rps=rates.arrived,
        retries_rps=rates.retries,
        shadowed_rps=rates.shadowed,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        failed_rps=rates.failed,
        unreduced_rps=rates.unreduced,
        recent_rps=round(recent_demand / recent_s, 3),
    )
