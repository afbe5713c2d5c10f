"""The autoscaling policy: a pure function of observations over time that returns a number of workers and the reason.

Scaling up is immediate, scaling down is slow. A *need* is a number of workers: those that the demand requires at the target
utilization, or those that finish the backlog within the target wait. It applies after it has held for a while without
interruption. A *sign* (a long queue, busy workers) shows only that there are too few workers, so it adds a step to those
that are healthy. Scaling down requires a long calm period, removes a small part of the pool, and stays above the need.

A cooldown separates steps, so that the effect of a step is observed before the next one. Only a need may raise the number
again at once after a step up, since it does not depend on the present number. So the direction changes at most once per
cooldown.

Lost workers stay in the advice, because they are replaced; workers that an operator removed or added are accepted.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Direction = Literal["up", "down"]


class HeldFor:
    """How long a condition has held without interruption. Times are seconds of one clock."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s: float | None = None

    def update(self, holds: bool, now_s: float) -> None:  # noqa: FBT001
        """Record whether the condition holds now."""
        if not holds:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def lasted_s(self, now_s: float) -> float:
        """How long it has held, in seconds; -1 if it does not hold."""
        return -1.0 if self._since_s is None else now_s - self._since_s


class Extremes:
    """The lowest and the highest value of the last `span_s` seconds."""

    __slots__ = ("_began_s", "_span_s", "_values")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, int]] = deque()
        self._began_s: float | None = None

    def update(self, figure: int, now_s: float) -> None:
        """Record a value; drop values that are older than the span."""
        if self._began_s is None:
            self._began_s = now_s
        self._values.append((now_s, figure))
        while now_s - self._values[0][0] > self._span_s:
            self._values.popleft()

    def whole(self, now_s: float) -> bool:
        """Whether values were recorded for the whole span."""
        return self._began_s is not None and now_s - self._began_s >= self._span_s

    @property
    def lowest(self) -> int:
        """0 before the first observation."""
        return min((figure for _, figure in self._values), default=0)

    @property
    def highest(self) -> int:
        """0 before the first observation."""
        return max((figure for _, figure in self._values), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRules:
    """The bounds and the conditions of steps. Times in seconds, shares 0..1. Those without a default are settings."""

    least: int
    most: int
    target_wait_s: float  # The backlog should be finished within this time.
    need_s: float  # How long a need must hold; bursts are shorter.
    deep: int = 500  # This many queued requests
    deep_s: float  # for this long: three more workers.
    deep_step: int = 3
    long: int = 100
    long_s: float
    busy: float = 0.85
    busy_s: float
    calm: float = 0.40
    calm_s: float
    down_share: float = 0.2  # The largest share of the workers in one step down; at least one worker.
    cooldown_s: float
    settle_s: float = 10.0  # A worker that is missing for less was not removed: Redis may have been unavailable.
    gap_s: float = 5.0  # After a longer gap between observations, conditions count as interrupted.


class Sample(NamedTuple):
    """One observation. `known`: all workers; `healthy`: those that can receive work; rates in requests/s.

    `worker_rps`: the rate of one worker; `target_utilization`: the share of it that is planned; `utilization`: the share
    that is used, 0..1. `backlog`: queued requests by tier.
    """

    healthy: int
    known: int
    backlog: Mapping[str, int]
    demand_rps: float
    worker_rps: float
    target_utilization: float
    utilization: float

    @property
    def depth(self) -> int:
        """Queued requests of all tiers: the latest request waits for all of them."""
        return sum(self.backlog.values())


class ScaleStep(NamedTuple):
    """One change of the advice, at `at_s` of the clock."""

    direction: Direction
    before: int
    after: int
    reason: str
    at_s: float


class Advice(NamedTuple):
    """The recommendation. `recommended` changes only with the next step, whether or not the workers exist yet."""

    healthy: int
    recommended: int
    reason: str
    last: ScaleStep | None


class Need(NamedTuple):
    """A number of workers, and the reason."""

    workers: int
    reason: str


@dataclass(slots=True)
class ScaleSignals:
    """How long each sign has held."""

    deep: HeldFor = field(default_factory=HeldFor)
    long: HeldFor = field(default_factory=HeldFor)
    busy: HeldFor = field(default_factory=HeldFor)
    calm: HeldFor = field(default_factory=HeldFor)

    def update(self, sample: Sample, rules: ScaleRules, now_s: float) -> None:
        """Record one observation."""
        there = sample.healthy > 0
        self.deep.update(sample.depth >= rules.deep, now_s)
        self.long.update(sample.depth >= rules.long, now_s)
        self.busy.update(there and sample.utilization > rules.busy, now_s)
        self.calm.update(there and sample.utilization < rules.calm, now_s)


class Autoscaler:
    """The advice for one pool, from about one observation a second. Times are seconds of one monotonic clock."""

    def __init__(self, rules: ScaleRules) -> None:
        self._rules = rules
        self._target: int | None = None
        self._last: ScaleStep | None = None
        self._known = 0
        self._healthy = 0
        self._reached = True
        self._updated_s = -math.inf
        self._forget()

    def _forget(self) -> None:
        self._signs = ScaleSignals()
        self._needs, self._knowns = Extremes(self._rules.need_s), Extremes(self._rules.settle_s)

    def update(self, sample: Sample, now_s: float) -> Advice:
        """Record an observation. Returns the new advice."""
        rules, self._healthy = self._rules, sample.healthy
        if sample.known == 0:  # Redis lost its data, or no worker was started yet: not a reason for a step.
            return self._advice("no worker is known")
        if now_s - self._updated_s > rules.gap_s:
            self._forget()
        self._updated_s = now_s
        need = needed(sample, rules)
        self._signs.update(sample, rules, now_s)
        self._needs.update(need.workers, now_s)
        self._knowns.update(sample.known, now_s)
        # Workers that others added or removed are not undone.
        target, known = self._target if self._target is not None else sample.healthy, self._knowns.highest
        going = self._last is not None and self._last.direction == "down" and not self._cool(now_s)
        if sample.healthy > target and not going:
            target = sample.healthy
        elif self._knowns.whole(now_s) and known < self._known and target <= self._known:
            target = min(target, known)
        if self._knowns.whole(now_s) or known > self._known:
            self._known = known

        wanted, reason = self._wanted(sample, need, target, now_s)
        after = min(max(wanted, rules.least), rules.most)
        if after != wanted:
            reason += f"; limited to the {'minimum' if after == rules.least else 'maximum'}, {after}"
        first, self._target = self._target is None, after
        if after != target and not first:
            self._last = ScaleStep("up" if after > target else "down", target, after, reason, now_s)
            self._reached = False
        self._reached = self._reached or sample.healthy == after
        return self._advice(reason)

    def hold(self, reason: str) -> Advice | None:
        """The last advice, because no observation was possible. None if there was none."""
        return None if self._target is None else self._advice(f"{reason}: the last advice is kept")

    def _cool(self, now_s: float) -> bool:
        return self._last is None or now_s - self._last.at_s >= self._rules.cooldown_s

    def _wanted(self, sample: Sample, need: Need, target: int, now_s: float) -> tuple[int, str]:
        """The wanted number of workers, regardless of the bounds, and the reason."""
        rules, cool = self._rules, self._cool(now_s)
        sustained = self._needs.lowest if self._needs.whole(now_s) else 0
        raised = self._last is not None and self._last.direction == "up"
        wanted, reason = (
            target,
            f"no change needed: {need.reason}, {sample.utilization:.0%} used, {sample.depth} queued",
        )
        if sample.healthy < target:
            reason = f"{target - sample.healthy} of {target} workers are not healthy and are being replaced"
        if sustained > target and (cool or raised):
            wanted, reason = sustained, f"{need.reason}: {sustained} or more for {rules.need_s:g} s"
        if cool and (sign := self._sign(sample, now_s)) is not None and sign.workers > wanted:
            return sign
        if cool and wanted == target and self._signs.calm.lasted_s(now_s) >= rules.calm_s:
            step = max(1, int(sample.healthy * rules.down_share))
            wanted = min(target, max(sample.healthy - step, self._needs.highest, rules.least))
            share = f"{sample.utilization:.0%} used, under {rules.calm:.0%} for {rules.calm_s:g} s"
            fewer = f": {target - wanted} fewer" if wanted < target else ", but fewer are not sufficient"
            return wanted, share + fewer
        return wanted, reason

    def _sign(self, sample: Sample, now_s: float) -> Need | None:
        """A step up for a sign, which does not say how many workers are needed."""
        rules, signs = self._rules, self._signs
        if signs.deep.lasted_s(now_s) >= rules.deep_s:
            return Need(sample.healthy + rules.deep_step, _waits(sample, rules.deep, rules.deep_s, rules.deep_step))
        if signs.long.lasted_s(now_s) >= rules.long_s:
            return Need(sample.healthy + 1, _waits(sample, rules.long, rules.long_s, 1))
        if signs.busy.lasted_s(now_s) >= rules.busy_s:
            share = f"{sample.utilization:.0%} used, over {rules.busy:.0%} for {rules.busy_s:g} s"
            return Need(sample.healthy + 1, f"{share}: 1 more")
        return None

    def _advice(self, reason: str) -> Advice:
        """The advice. Until a step is complete, its reason is kept."""
        recommended = self._target if self._target is not None else self._rules.least
        why = reason if self._reached or self._last is None else self._last.reason
        return Advice(self._healthy, recommended, why, self._last)


def needed(sample: Sample, rules: ScaleRules) -> Need:
    """The workers that the demand or the backlog requires, whichever is more; 0 if the rate of a worker is not known."""
    rate = sample.worker_rps
    if rate <= 0:
        return Need(0, "the rate of a worker is not known")
    given = rate * sample.target_utilization
    by_demand = math.ceil(round(sample.demand_rps / given, 6)) if given > 0 else 0
    by_backlog = math.ceil(round(sample.depth / (rate * rules.target_wait_s), 6))
    if by_backlog > by_demand:
        wait = f"{sample.depth} queued, to be finished in {rules.target_wait_s:g} s at {rate:.0f}/s per worker"
        return Need(by_backlog, f"{wait}, require {by_backlog}")
    return Need(by_demand, f"a demand of {sample.demand_rps:.0f}/s requires {by_demand} at {given:.0f}/s per worker")


def _waits(sample: Sample, limit: int, for_s: float, step: int) -> str:
    return f"{sample.depth} queued, {limit} or more for {for_s:g} s: {step} more"
