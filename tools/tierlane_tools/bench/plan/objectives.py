"""Objectives: `enterprise.p99=250ms,enterprise.success=99.9%`. `all` applies to the sum of all tiers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierlane_tools.bench.measurement.statistics import TierStatistics

ALL = "all"
SUCCESS = "success"
ROUNDING = 1e-9
"""Seconds or shares by which a bound may be passed: 999 of 1,000 is 99.9 %, whatever floating point says."""

FIRST_TOKEN = "first_token_"  # noqa: S105 - no secret
"""Before a metric: of the time to the first token."""

_QUANTILE = re.compile(rf"(?:{FIRST_TOKEN})?p(\d{{1,2}}(?:\.\d+)?)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


class SloError(ValueError):
    """An objective that cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class Objective:
    """One demand. `bound` is seconds for a time, and a share of 0..1 for `success`. `metric`: of the response, or with FIRST_TOKEN."""

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

    @property
    def of_first_token(self) -> bool:
        """Whether the time to the first token is bounded."""
        return self.metric.startswith(FIRST_TOKEN)

    def judged(self, actual: float | None) -> "Judgement":
        """Compare it with what was measured."""
        if actual is None:
            return Judgement(self, None, met=False)
        is_met = actual >= self.bound - ROUNDING if self.metric == SUCCESS else actual <= self.bound + ROUNDING
        return Judgement(self, actual, is_met)


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
            whole = [each for each in objectives if each.tier == name and not each.of_first_token]
            own = [(each.quantile, each.bound) for each in whole if each.quantile is not None]
            if own:
                bounds[tier] = max(own)[1]
                break
    return bounds


def judge(objectives: Sequence[Objective], tallies: Mapping[str, TierStatistics]) -> list[Judgement]:
    """Compare each objective with what was counted; `tallies` holds every tier and `all`."""
    judgements = []
    for objective in objectives:
        counters, quantile = tallies[objective.tier], objective.quantile
        if objective.metric == SUCCESS:
            actual = counters.ok / counters.scheduled if counters.scheduled else None
        else:
            times = counters.first_token if objective.of_first_token else counters.latency
            actual = times.mean if quantile is None else times.quantile(quantile)
        judgements.append(objective.judged(actual))
    return judgements


def _objective(part: str, tiers: Sequence[str]) -> Objective:
    left, equals, value = (piece.strip() for piece in part.partition("="))
    tier, dot, metric = left.partition(".")
    if not equals or not dot:
        raise SloError(f"each part must be TIER.METRIC=BOUND, got {part!r}")
    if tier not in tiers and tier != ALL:
        raise SloError(f"{part!r} names a tier that is not in the mix; use {', '.join(tiers)} or {ALL}")
    if metric == SUCCESS:
        percent = _PERCENT.fullmatch(value)
        if percent is None or float(percent[1]) > 100:
            raise SloError(f"{part!r} needs a percentage such as 99.9%")
        return Objective(tier, metric, float(percent[1]) / 100, part)
    if metric not in ("mean", "max") and not _QUANTILE.fullmatch(metric):
        raise SloError(
            f"{part!r} has an unknown metric {metric!r}; use p50, p95, p99.9, first_token_p95, mean, max or success"
        )
    time = _TIME.fullmatch(value)
    if time is None:
        raise SloError(f"{part!r} needs a time with its unit (us, ms or s), such as 250ms")
    return Objective(tier, metric, float(time[1]) * _UNITS[time[2]], part)
