"""What this gateway counts, in bounded structures: rates over the last two seconds, p95 over the last ten."""

import math
from collections import deque

from scheduler.observation import GatewayStats, TierStats

WINDOW_BEATS = 8  # Rates are taken over so many beats.
LATENCY_SLOTS = 10
LATENCY_SLOT_S = 1.0
_BUCKETS_PER_DOUBLING = 6  # An answer time is known to 12 %.
_BUCKETS = 14 * _BUCKETS_PER_DOUBLING  # Up to 16 s.


class LatencyWindow:
    """Answer times of the last ten seconds, as counts in logarithmic buckets, one row a second."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = [[0] * _BUCKETS for _ in range(LATENCY_SLOTS)]
        self._slot = 0

    def add(self, latency_ms: float, now: float) -> None:
        """Count one answer; `now` is monotonic seconds."""
        self._turn(now)
        bucket = int(math.log2(max(latency_ms, 1.0)) * _BUCKETS_PER_DOUBLING)
        self._rows[self._slot % LATENCY_SLOTS][min(bucket, _BUCKETS - 1)] += 1

    def p95_ms(self, now: float) -> float:
        """The 95th percentile in ms, rounded up to its bucket's end; 0 when there was no answer."""
        self._turn(now)
        counts = [sum(column) for column in zip(*self._rows, strict=True)]
        rank = math.ceil(0.95 * sum(counts))
        seen = 0
        for bucket, count in enumerate(counts):
            seen += count
            if count and seen >= rank:
                return float(round(2 ** ((bucket + 1) / _BUCKETS_PER_DOUBLING), 1))
        return 0.0

    def _turn(self, now: float) -> None:
        slot = int(now / LATENCY_SLOT_S)
        for passed in range(max(self._slot + 1, slot - LATENCY_SLOTS + 1), slot + 1):
            self._rows[passed % LATENCY_SLOTS] = [0] * _BUCKETS
        self._slot = max(self._slot, slot)


class TierMeter:
    """One tier's counters since the last beat, and its latencies."""

    __slots__ = ("arrived", "latency", "passed", "shed", "window")

    def __init__(self) -> None:
        self.arrived = 0
        self.passed = 0.0  # Let through by the key limits, scaled up to what the base limits would have let through.
        self.shed = 0
        self.latency = LatencyWindow()
        self.window: deque[tuple[int, float, int]] = deque([(0, 0.0, 0)] * WINDOW_BEATS, maxlen=WINDOW_BEATS)


class Meter:
    """Counters of all tiers; `beat` turns them into what is published."""

    def __init__(self, gateway_id: str, now: float) -> None:
        self._gateway_id = gateway_id
        self._tiers: dict[str, TierMeter] = {}
        self._spans: deque[float] = deque([0.0] * WINDOW_BEATS, maxlen=WINDOW_BEATS)
        self._beat_at = now

    def _tier(self, name: str) -> TierMeter:
        meter = self._tiers.get(name)
        if meter is None:
            meter = self._tiers[name] = TierMeter()
        return meter

    def arrived(self, tier: str) -> None:
        """A valid request of a known key came in."""
        self._tier(tier).arrived += 1

    def passed(self, tier: str, factor: float) -> None:
        """It was not stopped by its key's limit, which now stands at `factor` of the base limit."""
        self._tier(tier).passed += 1 / max(factor, 0.01)

    def shed(self, tier: str) -> None:
        """It was refused for want of capacity."""
        self._tier(tier).shed += 1

    def answered(self, tier: str, latency_ms: float, now: float) -> None:
        """It got its output."""
        self._tier(tier).latency.add(latency_ms, now)

    def beat(self, tiers: list[str], now: float) -> GatewayStats:
        """Close the beat and give the rates. Tiers that are not in `tiers` any more are forgotten."""
        self._tiers = {name: self._tier(name) for name in tiers}
        self._spans.append(max(0.0, now - self._beat_at))
        self._beat_at = now
        span_s = max(sum(self._spans), 0.001)
        stats: dict[str, TierStats] = {}
        total = 0.0
        for name, meter in self._tiers.items():
            meter.window.append((meter.arrived, meter.passed, meter.shed))
            meter.arrived, meter.passed, meter.shed = 0, 0.0, 0
            arrived, passed, shed = (sum(column) / span_s for column in zip(*meter.window, strict=True))
            # Demand is what the base limits would let through; it can be no more than what came.
            demand = min(arrived, passed)
            stats[name] = TierStats(round(demand, 3), round(shed, 3), meter.latency.p95_ms(now))
            total += arrived
        return GatewayStats(self._gateway_id, round(total, 3), stats)
