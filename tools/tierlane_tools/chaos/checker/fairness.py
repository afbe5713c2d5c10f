"""The invariant of fairness: a waiting customer gets its share of the GPU time of its tier.

It is checked in intervals without faults and direct mode in which a customer always has a request that waits. Of the GPU time that the tier
gets in the interval (`cost_ms` of the requests whose runs end in it), the customer must get its weight over the sum of the
weights of all customers that were served or waited, less a tolerance. Customers that use less than their shares only leave more
to the others.

A request waits from ADMITTED_S after it was sent until the longest run before its own run begins: it may be in a batch that is
ready in the meantime.

The tolerance: the fair order is that in which batches are formed, and a request is charged then, by estimate, until its end.
In between are at most

    B = 2 x workers (running, and claimed ahead) + ceil(workers / 4) + 1 (ready) + 1 (the tier queue, in order of arrival)

batches. In a fair order a customer has its share of each to within one request. So at the begin and at the end of the interval
its GPU time is uncertain by B x (share x longest run + most expensive request of the customer), together by twice as much. An
interval is not judged where the tolerance is more than half of the share.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierlane_tools.chaos.checker.allowances import SETTLE_S, STAMP_S
from tierlane_tools.chaos.checker.audit import DIRECT
from tierlane_tools.chaos.checker.case import Case, Try
from tierlane_tools.chaos.checker.evidence import AuditRow
from tierlane_tools.chaos.checker.results import InvariantFinding, Violation

ADMITTED_S = 0.1
WORKERS_OF_READY = 4  # The default of TIERLANE_BATCH_LOOKAHEAD_WORKERS.
LEAST_RUNS = 8  # Of an interval, because the tolerance is more than half of the share in shorter ones.
LARGEST_TOLERANCE = 0.5  # Of the share.
MS = 1000.0


class TimeSpan(NamedTuple):
    """An interval in monotonic seconds."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True)
class Served:
    """A request that ran in a model process. `ended`: the end of its run."""

    customer: str
    process: str
    ended: float
    cost_ms: float


@dataclass(frozen=True)
class Share:
    """The GPU time of one customer in one interval, in ms: what it got, its share, and the tolerance."""

    customer: str
    interval: TimeSpan
    got_ms: float
    share_ms: float
    tolerance_ms: float

    @property
    def judged(self) -> bool:
        """Whether the tolerance is small enough for the interval to show anything."""
        return 0 < self.tolerance_ms <= LARGEST_TOLERANCE * self.share_ms

    @property
    def unfair(self) -> bool:
        """Whether it got too little."""
        return self.got_ms < self.share_ms - self.tolerance_ms

    def __str__(self) -> str:
        """The sentence in the report."""
        return (
            f"Customer {self.customer} waited for {self.interval.seconds:.1f} s and got "
            f"{self.got_ms:.0f} ms of GPU time; its share is {self.share_ms:.0f} ms, the tolerance {self.tolerance_ms:.0f} ms."
        )


def fair_shares(case: Case) -> InvariantFinding:
    """Customers that waited and got less than their shares."""
    if not case.evidence.runs:
        return InvariantFinding(measured=False)
    longest_s = max(run.takes_s for run in case.evidence.runs)
    tiers: dict[str, _Tier] = {}
    for one in case.tries:
        tier = tiers.setdefault(one.invoked.tier, _Tier(case.evidence.weights, longest_s))
        for row in case.rows_of(one):
            tier.add(case, one, row)
    quiet = quiet_intervals(case)
    judged = [share for tier in tiers.values() for share in tier.shares(quiet) if share.judged]
    shown = ""
    if judged:
        least = min(judged, key=lambda share: share.got_ms / share.share_ms)
        customers, seconds = len({each.customer for each in judged}), max(each.interval.seconds for each in judged)
        shown = (
            f"{customers} customers over up to {seconds:.1f} s; the least got {least.got_ms / least.share_ms:.0%} of its "
            f"share, the tolerance is {least.tolerance_ms / least.share_ms:.0%}"
        )
    return InvariantFinding(
        [Violation(str(each)) for each in judged if each.unfair], measured=bool(judged), shown=shown
    )


class _Tier:
    """The requests of one tier. `weights` by customer; `longest_s`: the longest run."""

    def __init__(self, weights: Mapping[str, float], longest_s: float) -> None:
        self._weights = weights
        self._longest_s = longest_s
        self._waits: dict[str, list[TimeSpan]] = defaultdict(list)
        self._served: list[Served] = []

    def add(self, case: Case, one: Try, row: AuditRow) -> None:
        """Add a request; all are added before `shares`."""
        customer, runs = one.invoked.customer, case.runs.get(one.invoked.nonce, ())
        begins = runs[0].began if runs else one.ended
        wait = TimeSpan(one.sent + ADMITTED_S, begins - self._longest_s)
        if wait.end > wait.begin:
            self._waits[customer].append(wait)
        if runs and row.cost_ms:
            last = runs[-1]
            self._served.append(Served(customer, last.process, last.began + last.takes_s, row.cost_ms))

    def shares(self, quiet: Sequence[TimeSpan]) -> Iterator[Share]:
        """The share of each customer in each quiet interval in which it always waited."""
        self._served.sort(key=lambda each: each.ended)
        times = [each.ended for each in self._served]
        for customer, waits in self._waits.items():
            for interval in overlaps(union(waits), quiet):
                if interval.seconds < LEAST_RUNS * self._longest_s:
                    continue
                first, last = (bisect_right(times, at) for at in (interval.begin, interval.end))
                served = self._served[first:last]
                waiting = {other for other, spans in self._waits.items() if overlaps(spans, [interval])}
                weights = sum(self._weights.get(other, 1.0) for other in waiting | {each.customer for each in served})
                part = self._weights.get(customer, 1.0) / weights
                own = [each.cost_ms for each in served if each.customer == customer]
                in_between = batches_in_between(len({each.process for each in served}))
                at_one_end = in_between * (part * self._longest_s * MS + max(own, default=0.0))
                share_ms = part * sum(each.cost_ms for each in served)
                yield Share(customer, interval, sum(own), share_ms, 2 * at_one_end)


def batches_in_between(workers: int) -> int:
    """The largest number of batches whose requests were charged and have not ended."""
    return 2 * workers + math.ceil(workers / WORKERS_OF_READY) + 2


def quiet_intervals(case: Case) -> list[TimeSpan]:
    """The time without faults, without direct mode, and without their consequences."""
    busy = [TimeSpan(window.begin - STAMP_S, window.end + SETTLE_S) for window in case.allowances.windows]
    offset_s = case.evidence.wall_offset_s
    busy += [  # In direct mode each gateway has an order of its own, by requests.
        TimeSpan(row.created_ms / MS - offset_s, row.ended_ms / MS - offset_s + SETTLE_S)
        for row in case.evidence.rows
        if row.mode == DIRECT and row.ended_ms is not None
    ]
    joined = union(busy)
    begins, ends = [-math.inf, *(span.end for span in joined)], [*(span.begin for span in joined), math.inf]
    return [TimeSpan(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def union(intervals: Iterable[TimeSpan]) -> list[TimeSpan]:
    """The time in any of the intervals, in order."""
    found: list[TimeSpan] = []
    for interval in sorted(intervals):
        if found and interval.begin <= found[-1].end:
            found[-1] = TimeSpan(found[-1].begin, max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return found


def overlaps(some: Sequence[TimeSpan], others: Sequence[TimeSpan]) -> list[TimeSpan]:
    """The time in one of `some` and in one of `others`."""
    both = (TimeSpan(max(a.begin, b.begin), min(a.end, b.end)) for a in some for b in others)
    return [interval for interval in both if interval.begin < interval.end]
