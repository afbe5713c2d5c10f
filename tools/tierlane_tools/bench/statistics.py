"""Statistics of a run: histograms of times, counts by tier, and objectives.

Buckets of a histogram are a geometric series, 1 % apart, and a quantile is the geometric middle of its bucket, so it is
off by at most half a per cent; memory does not grow with the number of samples. Mean, deviation,
least and largest are exact. The tally is the only state that the load writes and the report reads.

Objectives: `enterprise.p99=250ms,enterprise.success=99.9%`. `all` stands for every tier together.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

LOWEST_S = 1e-6
HIGHEST_S = 3600.0
BUCKET_RATIO = 1.01

_PER_LOG = 1 / math.log(BUCKET_RATIO)
_PER_LOWEST = 1 / LOWEST_S
_LAST = int(math.log(HIGHEST_S * _PER_LOWEST) * _PER_LOG)


class Histogram:
    """Counts times in seconds from a microsecond to an hour; what is outside counts at the edge."""

    __slots__ = ("count", "counts", "largest", "least", "square_sum", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (_LAST + 1)
        self.sum = 0.0
        self.square_sum = 0.0
        self.count = 0
        self.least = math.inf
        self.largest = 0.0

    def record(self, seconds: float) -> None:
        """Count one time; called once a request, so everything that can wait is left to the reader."""
        bucket = int(math.log(seconds * _PER_LOWEST) * _PER_LOG) if seconds > LOWEST_S else 0
        self.counts[bucket if bucket < _LAST else _LAST] += 1  # noqa: FURB136  # min() costs a call on the hot path
        self.count += 1
        self.sum += seconds
        self.square_sum += seconds * seconds
        if seconds > self.largest:  # noqa: PLR1730  # as above
            self.largest = seconds
        if seconds < self.least:  # noqa: PLR1730  # as above
            self.least = seconds

    def quantile(self, share: float) -> float | None:
        """The time that `share` (0..1) of the samples do not exceed, by nearest rank; None without samples."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        if rank >= self.count:
            return self.largest
        return self._bounded(self._bucket_of(rank))

    def _bucket_of(self, rank: int) -> int:
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= rank:
                return bucket
        raise RuntimeError("This is a bug: the buckets hold fewer samples than were counted.")

    def _bounded(self, bucket: int) -> float:
        middle = LOWEST_S * math.exp((bucket + 0.5) / _PER_LOG)
        return min(max(middle, self.least), self.largest)

    def steps(self, width: float = 1.03) -> list[tuple[float, int]]:
        """The samples in fewer buckets, each about `width` times the one before: (upper end in seconds, count)."""
        merge = max(1, round(math.log(width) * _PER_LOG))
        parts = [(start, sum(self.counts[start : start + merge])) for start in range(0, _LAST + 1, merge)]
        return [(LOWEST_S * math.exp((start + merge) / _PER_LOG), count) for start, count in parts if count]

    def since(self, before: "Histogram") -> "Histogram":
        """What was counted after `before`, which is this one at an earlier time; largest and least as buckets tell."""
        new = Histogram()
        new.counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        new.sum, new.square_sum = self.sum - before.sum, self.square_sum - before.square_sum
        new.count = self.count - before.count
        used = [bucket for bucket, count in enumerate(new.counts) if count]
        if used:
            new.least, new.largest = self._bounded(used[0]), self._bounded(used[-1])
        return new

    @property
    def mean(self) -> float | None:
        """The mean in seconds; None without samples."""
        return self.sum / self.count if self.count else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation in seconds; None without samples."""
        if not self.count:
            return None
        mean = self.sum / self.count
        return math.sqrt(max(0.0, self.square_sum / self.count - mean * mean))

    @classmethod
    def merged(cls, parts: Iterable["Histogram"]) -> "Histogram":
        """One histogram with the samples of all."""
        whole = cls()
        for part in parts:
            whole.counts = [mine + theirs for mine, theirs in zip(whole.counts, part.counts, strict=True)]
            whole.sum += part.sum
            whole.square_sum += part.square_sum
            whole.count += part.count
            whole.least = min(whole.least, part.least)
            whole.largest = max(whole.largest, part.largest)
        return whole


class UnansweredCause(StrEnum):
    """Why a request has no answer."""

    TIMEOUT = "timeout"
    """Sent, and nothing came within the timeout."""
    CLOSED = "closed"
    """The server closed the connection first."""
    CONNECT = "connect"
    """No connection could be opened."""
    NOT_SENT = "not_sent"
    """All connections stayed busy for the whole timeout."""
    MALFORMED = "malformed"
    """What came is not an answer."""
    STOPPED = "stopped"
    """The run was interrupted."""


class TierStatistics:
    """The counts of one tier. `good_s`: the latency up to which a 200 is good, in seconds."""

    __slots__ = ("error_latency", "errors", "good", "good_s", "latency", "name", "scheduled", "sent", "silent")

    def __init__(self, name: str, good_s: float = math.inf) -> None:
        self.name = name
        self.good_s = good_s
        self.scheduled = 0
        self.sent = 0
        self.good = 0
        self.latency = Histogram()  # Of 200 answers, from the due time.
        self.error_latency = Histogram()  # Of all other answers.
        self.errors: Counter[tuple[int, str]] = Counter()  # By HTTP status and error code.
        self.silent: Counter[UnansweredCause] = Counter()

    def completed(self, latency_s: float) -> None:
        """Count a 200."""
        self.latency.record(latency_s)
        if latency_s <= self.good_s:
            self.good += 1

    def failed(self, status: int, code: str, latency_s: float) -> None:
        """Count any other answer."""
        self.errors[status, code] += 1
        self.error_latency.record(latency_s)

    def unanswered(self, why: UnansweredCause) -> None:
        """Count a request that got no answer."""
        self.silent[why] += 1

    @property
    def ok(self) -> int:
        """200 answers."""
        return self.latency.count

    @property
    def failures(self) -> int:
        """Answers other than 200."""
        return self.error_latency.count

    @property
    def answered(self) -> int:
        """Answers of any kind."""
        return self.ok + self.failures

    @property
    def missing(self) -> int:
        """Requests without an answer."""
        return self.silent.total()

    @classmethod
    def merged(cls, name: str, parts: Iterable["TierStatistics"]) -> "TierStatistics":
        """The sum of several tallies."""
        whole, tallies = cls(name), list(parts)
        for part in tallies:
            whole.scheduled += part.scheduled
            whole.sent += part.sent
            whole.good += part.good
            whole.errors += part.errors
            whole.silent += part.silent
        whole.latency = Histogram.merged(part.latency for part in tallies)
        whole.error_latency = Histogram.merged(part.error_latency for part in tallies)
        return whole


def new_tallies(tiers: Sequence[str], good_s: Mapping[str, float]) -> list[TierStatistics]:
    """One empty tally a tier."""
    return [TierStatistics(tier, good_s.get(tier, math.inf)) for tier in tiers]


ALL = "all"
SUCCESS = "success"
ROUNDING = 1e-9
"""Seconds or shares by which a bound may be passed: 999 of 1,000 is 99.9 %, whatever floating point says."""

_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


class SloError(ValueError):
    """An objective that cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class Objective:
    """One demand. `bound` is seconds for a time, and a share of 0..1 for `success`."""

    tier: str
    metric: str
    bound: float
    text: str

    @property
    def quantile(self) -> float | None:
        """The share whose latency is bounded: 0.99 for p99, 1 for max; None for mean and success."""
        if self.metric == "max":
            return 1.0
        match = _QUANTILE.fullmatch(self.metric)
        return float(match[1]) / 100 if match else None


@dataclass(frozen=True)
class Judgement:
    """An objective beside what was measured; `actual` in the unit of the bound, None where there is no sample."""

    objective: Objective
    actual: float | None
    met: bool


def parse_slo(text: str, tiers: Sequence[str]) -> tuple[Objective, ...]:
    """Read objectives for these tiers. Raises SloError, which names the part at fault."""
    return tuple(_objective(part.strip(), tiers) for part in text.split(",")) if text.strip() else ()


def parse_share(text: str) -> float:
    """Read `1%` or `0.01`. Raises SloError."""
    match = _PERCENT.fullmatch(text)
    try:
        share = float(match[1]) / 100 if match else float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise SloError(f"must be a share such as 1% or 0.01, got {text!r}")
    return share


def good_bounds(objectives: Sequence[Objective], tiers: Sequence[str]) -> dict[str, float]:
    """Up to which latency (seconds) an answer is good, by tier: the bound of its highest quantile, its own before all's."""
    bounds = {}
    for tier in tiers:
        for name in (tier, ALL):
            own = [(o.quantile, o.bound) for o in objectives if o.tier == name and o.quantile is not None]
            if own:
                bounds[tier] = max(own)[1]
                break
    return bounds


def judge(objectives: Sequence[Objective], tallies: Mapping[str, TierStatistics]) -> list[Judgement]:
    """Compare each objective with what was counted; `tallies` holds every tier and `all`."""
    return [_judged(objective, tallies[objective.tier]) for objective in objectives]


def _judged(objective: Objective, counters: TierStatistics) -> Judgement:
    if objective.metric == SUCCESS:
        actual = counters.ok / counters.scheduled if counters.scheduled else None
        return Judgement(objective, actual, actual is not None and actual >= objective.bound - ROUNDING)
    quantile = objective.quantile
    actual = counters.latency.mean if quantile is None else counters.latency.quantile(quantile)
    return Judgement(objective, actual, actual is not None and actual <= objective.bound + ROUNDING)


def _objective(part: str, tiers: Sequence[str]) -> Objective:
    left, equals, value = (piece.strip() for piece in part.partition("="))
    tier, dot, metric = left.partition(".")
    if not equals or not dot:
        raise SloError(f"each part must be TIER.METRIC=BOUND, got {part!r}")
    if tier not in tiers and tier != ALL:
        raise SloError(f"{part!r} names a tier that is not in the mix; use {', '.join(tiers)} or {ALL}")
    if metric == SUCCESS:
        return Objective(tier, metric, _success_bound(part, value), part)
    if metric not in ("mean", "max") and not _QUANTILE.fullmatch(metric):
        raise SloError(f"{part!r} has an unknown metric {metric!r}; use p50, p95, p99.9, mean, max or success")
    time = _TIME.fullmatch(value)
    if time is None:
        raise SloError(f"{part!r} needs a time with its unit (us, ms or s), such as 250ms")
    return Objective(tier, metric, float(time[1]) * _UNITS[time[2]], part)


def _success_bound(part: str, value: str) -> float:
    match = _PERCENT.fullmatch(value)
    if match is None or float(match[1]) > 100:
        raise SloError(f"{part!r} needs a percentage such as 99.9%")
    return float(match[1]) / 100
