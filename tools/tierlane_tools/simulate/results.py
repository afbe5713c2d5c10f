"""The figures of a simulation: of each class of customers, of the GPUs and of the cells, and their document.

Requests that arrive during the warm-up are not counted. Response times are counts in buckets that are 1 % wide.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from gateway.limits.gpu_time import UNMET, jain_index
from gateway.limits.rejections import is_capacity_rejection
from scheduler.errors import ErrorCode
from tierlane_tools.simulate.admission import CustomerAccount
from tierlane_tools.simulate.fair_queue import QueuedRequest

Document: TypeAlias = dict[str, Any]

PERCENTILES = (0.5, 0.95, 0.99)
_LEAST_MS, _WIDTH, _BUCKETS = 0.1, math.log(1.01), 1500
MOST_STEPS = 300
"""Points of the timeline."""


class LatencyCounts:
    """Counts of response times. A time is known to 1 %."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.total = 0

    def add(self, ms: float) -> None:
        """Count a response."""
        bucket = int(math.log(ms / _LEAST_MS) / _WIDTH) if ms > _LEAST_MS else 0
        self.counts[min(bucket, _BUCKETS - 1)] += 1
        self.total += 1

    def merge(self, other: "LatencyCounts") -> None:
        """Add the counts of another."""
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def within(self, ms: float) -> int:
        """How many responses took at most this time."""
        return sum(self.counts[: int(math.log(ms / _LEAST_MS) / _WIDTH) + 1])

    def percentiles(self, shares: Sequence[float] = PERCENTILES) -> list[float | None]:
        """The times below which these shares of the responses are, in the middle of their bucket; None without responses."""
        if not self.total:
            return [None] * len(shares)
        reached = list(accumulate(self.counts))
        ranks = [bisect_left(reached, share * self.total - 1e-9) for share in shares]
        return [round(_LEAST_MS * math.exp((rank + 0.5) * _WIDTH), 2) for rank in ranks]


class ClassFigures:
    """The figures of one class, or the sum of several. `gpu_ms`: by customer. `first_token`: None without slots."""

    def __init__(self, tier: str, name: str, customers: int) -> None:
        self.tier = tier
        self.name = name
        self.customers = customers
        self.arrivals = self.completed = 0
        self.gpu_ms = 0.0
        self.refused: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.latency = LatencyCounts()
        self.first_token: LatencyCounts | None = None
        self.queue_ms = 0.0

    def add_first_token(self, ms: float) -> None:
        """Count the time to the first token."""
        if self.first_token is None:
            self.first_token = LatencyCounts()
        self.first_token.add(ms)

    def add(self, other: "ClassFigures") -> None:
        """Add the figures of another class."""
        self.customers += other.customers
        self.arrivals += other.arrivals
        self.completed += other.completed
        self.gpu_ms += other.gpu_ms
        self.queue_ms += other.queue_ms
        for own, more in ((self.refused, other.refused), (self.outcomes, other.outcomes), (self.failed, other.failed)):
            own.update(more)
        self.latency.merge(other.latency)
        if other.first_token is not None:
            self.first_token = self.first_token or LatencyCounts()
            self.first_token.merge(other.first_token)

    def document(self, gpu_ms: float) -> Document:
        """The figures; `gpu_ms`: the GPU time of all classes."""
        p50, p95, p99 = self.latency.percentiles()
        first = dict[str, float | None]()
        if self.first_token is not None:
            names = ("first_token_p50_ms", "first_token_p95_ms", "first_token_p99_ms")
            first = dict(zip(names, self.first_token.percentiles(), strict=True))
        refused, failed = sum(self.refused.values()), sum(self.failed.values())
        return {
            "tier": self.tier,
            "class": self.name,
            "customers": self.customers,
            "arrivals": self.arrivals,
            "completed": self.completed,
            "refused": refused,
            "failed": failed,
            "unfinished": max(0, self.arrivals - self.completed - refused - failed),
            "refused_by_code": dict(sorted(self.refused.items())),
            "refused_by_outcome": dict(sorted(self.outcomes.items())),
            "failed_by_code": dict(sorted(self.failed.items())),
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            **first,
            "mean_queue_ms": round(self.queue_ms / self.completed, 3) if self.completed else None,
            "gpu_s": round(self.gpu_ms / 1000, 3),
            "gpu_share": round(self.gpu_ms / gpu_ms, 4) if gpu_ms else 0.0,
        }


class TierStep:
    """One tier in one step of the timeline."""

    __slots__ = ("arrived", "completed", "latency", "refused")

    def __init__(self) -> None:
        self.arrived = self.completed = self.refused = 0
        self.latency: LatencyCounts | None = None

    def answered(self, latency_ms: float) -> None:
        """Count a response that ended in this step."""
        if self.latency is None:
            self.latency = LatencyCounts()
        self.latency.add(latency_ms)
        self.completed += 1


class CellStep(NamedTuple):
    """A cell at the end of a step."""

    workers: float
    depth: float


class CustomerFairness(NamedTuple):
    """The GPU time of a customer divided by its weight, its capacity rejections, and the mean number of its waiting requests."""

    tier: str
    gpu_ms: float
    unmet: float
    waiting: float


class SimulatedTimeline:
    """The course of a simulation in at most MOST_STEPS steps."""

    def __init__(self, tiers: Sequence[str], cells: Sequence[str], ends_s: float) -> None:
        self.step_s = max(0.25, ends_s / MOST_STEPS)
        self.count = math.ceil(ends_s / self.step_s)
        self.tiers = {tier: [TierStep() for _ in range(self.count)] for tier in tiers}
        self.busy_s = {cell: [0.0] * self.count for cell in cells}
        self.cells: dict[str, list[CellStep]] = {cell: [] for cell in cells}

    def step(self, tier: str, now: float) -> TierStep:
        """The step of a time; the last one for later times."""
        return self.tiers[tier][min(self.count - 1, int(now / self.step_s))]

    def run(self, cell: str, start_s: float, run_s: float) -> None:
        """A GPU is busy from `start_s`; only the part within the simulation counts."""
        bins, step_s = self.busy_s[cell], self.step_s
        number, end_s = int(start_s / step_s), start_s + run_s
        while start_s < end_s and number < self.count:
            until = min(end_s, (number + 1) * step_s)
            bins[number] += until - start_s
            start_s, number = until, number + 1

    def document(self) -> Document:
        """Lists with one value for each step."""
        total = [sum(parts) for parts in zip(*self.busy_s.values(), strict=True)]
        workers = [sum(step.workers for step in steps) for steps in zip(*self.cells.values(), strict=True)]
        step_s, tiers = self.step_s, dict[str, Document]()
        for tier, steps in self.tiers.items():
            tiers[tier] = {
                "arrived_rps": [round(step.arrived / step_s, 2) for step in steps],
                "completed_rps": [round(step.completed / step_s, 2) for step in steps],
                "refused_rps": [round(step.refused / step_s, 2) for step in steps],
                "p99_ms": [step.latency.percentiles((0.99,))[0] if step.latency else None for step in steps],
            }
        return {
            "step_s": step_s,
            "tiers": tiers,
            "busy": [
                round(busy / (step_s * count), 4) if count else 0.0 for busy, count in zip(total, workers, strict=False)
            ],
            "cells": {
                cell: {
                    "workers": [round(step.workers, 1) for step in steps],
                    "depth": [round(step.depth) for step in steps],
                }
                for cell, steps in self.cells.items()
            },
        }


class Figures:
    """All figures of a simulation."""

    def __init__(self, classes: Iterable[ClassFigures], timeline: SimulatedTimeline) -> None:
        self.classes = {each.name: each for each in classes}
        self.timeline = timeline
        self.batches = self.batched = self.moves = 0
        self.cell_arrivals: Counter[str] = Counter()
        self.cell_latency: dict[str, LatencyCounts] = defaultdict(LatencyCounts)
        self.fairness: list[CustomerFairness] = []

    def document(self, warmup_s: float, ends_s: float) -> Document:
        """The document, without what describes the scenario."""
        gpu_ms = sum(each.gpu_ms for each in self.classes.values())
        tiers: dict[str, ClassFigures] = {}
        for each in self.classes.values():
            tiers.setdefault(each.tier, ClassFigures(each.tier, "", 0)).add(each)
        fairness: dict[str, float] = {}
        for name in tiers:
            # Only of the customers that could have used more GPU time, as in gateway/limits/gpu_time.py.
            short = [one for one in self.fairness if one.tier == name and (one.waiting >= 1 or one.unmet >= UNMET)]
            fairness[name] = round(jain_index([one.gpu_ms for one in short]), 4)
        timeline = self.timeline.document()
        first = min(len(timeline["busy"]) - 1, int(warmup_s / self.timeline.step_s))
        busy = timeline["busy"][first:]
        cells = {}
        for name, steps in timeline["cells"].items():
            workers, busy_s = steps["workers"][first:], self.timeline.busy_s[name][first:]
            held_s = sum(workers) * self.timeline.step_s
            p50, _, p99 = self.cell_latency[name].percentiles()
            cells[name] = {
                "arrivals": self.cell_arrivals[name],
                "workers": round(sum(workers) / len(workers), 2) if workers else 0.0,
                "busy": round(min(1.0, sum(busy_s) / held_s), 4) if held_s else 0.0,
                "p50_ms": p50,
                "p99_ms": p99,
            }
        return {
            "simulated_s": round(ends_s, 3),
            "measured_s": round(ends_s - warmup_s, 3),
            "requests": sum(each.arrivals for each in self.classes.values()),
            "tiers": {name: {**each.document(gpu_ms), "fairness": fairness[name]} for name, each in tiers.items()},
            "classes": [each.document(gpu_ms) for each in self.classes.values()],
            "gpus": {
                "busy": round(sum(busy) / len(busy), 4) if busy else 0.0,
                "batches": self.batches,
                "mean_batch": round(self.batched / self.batches, 2) if self.batches else 0.0,
                "moves": self.moves,
            },
            "cells": cells,
            "timeline": timeline,
        }


class Recorder:
    """Fills the figures from single requests. `clock`: the virtual time."""

    def __init__(
        self, figures: Figures, accounts: Sequence[CustomerAccount], warmup_s: float, clock: Callable[[], float]
    ) -> None:
        self._figures = figures
        self._accounts = accounts
        self._timeline = figures.timeline
        self._warmup_s = warmup_s
        self._clock = clock
        self._cell_of = [""] * len(accounts)
        self._gpu_ms = [0.0] * len(accounts)
        self._waited_s = [0.0] * len(accounts)
        self._unmet = [0] * len(accounts)

    def arrived(self, account: CustomerAccount, cell: str) -> None:
        """A request arrives now."""
        now = self._clock()
        self._timeline.step(account.identity.tier, now).arrived += 1
        self._cell_of[account.number] = cell
        if now >= self._warmup_s:
            self._figures.classes[account.class_name].arrivals += 1
            self._figures.cell_arrivals[cell] += 1

    def refused(self, account: CustomerAccount, code: str, outcome: str) -> None:
        """It is rejected at once."""
        now = self._clock()
        self._timeline.step(account.identity.tier, now).refused += 1
        if now >= self._warmup_s:
            figures = self._figures.classes[account.class_name]
            figures.refused[code] += 1
            figures.outcomes[outcome] += 1
            if is_capacity_rejection(ErrorCode(code)):
                self._unmet[account.number] += 1

    def failed(self, account: CustomerAccount, code: str, arrived_s: float) -> None:
        """It was accepted, and fails now."""
        if arrived_s >= self._warmup_s:
            self._figures.classes[account.class_name].failed[code] += 1
            self._unmet[account.number] += 1

    def completed(
        self, account: CustomerAccount, request: QueuedRequest, latency_ms: float, cost_ms: float, call_ms: float
    ) -> None:
        """It is answered now. `call_ms`: what a response takes beyond queue and GPU."""
        self._timeline.step(account.identity.tier, self._clock()).answered(latency_ms)
        if request.arrived_s < self._warmup_s:
            return
        queue_s = request.started_s - request.arrived_s
        number, figures = account.number, self._figures.classes[account.class_name]
        figures.completed += 1
        figures.gpu_ms += cost_ms
        figures.queue_ms += queue_s * 1000
        figures.latency.add(latency_ms)
        if request.first_s:
            figures.add_first_token((request.first_s - request.arrived_s) * 1000 + call_ms)
        self._figures.cell_latency[self._cell_of[number]].add(latency_ms)
        self._gpu_ms[number] += cost_ms
        self._waited_s[number] += queue_s

    def run(self, cell: str, size: int, start_s: float, run_s: float) -> None:
        """A batch runs from `start_s`."""
        self._timeline.run(cell, start_s, run_s)
        if start_s >= self._warmup_s:
            self._figures.batches += 1
            self._figures.batched += size

    def close(self, measured_s: float) -> None:
        """Add what is known of single customers."""
        self._figures.fairness = [
            CustomerFairness(
                account.identity.tier,
                self._gpu_ms[account.number] / account.identity.weight,
                self._unmet[account.number],
                self._waited_s[account.number] / measured_s,
            )
            for account in self._accounts
        ]
