"""Adaptive batch windows beside speculative ones and a fixed one: waits and fill in simulated time.

Drives the real policy (`scheduler/batching/policy.py`, `scheduler/batching/target_size.py`) with Poisson arrivals of one tier.
Batches take `--base-ms` and `--item-ms`, everything else takes no time, and the same seed prints the same table. With a
fixed window, a batch starts at an idle worker when it is full or its first request has waited for the window. Without
distances, part batches start when their windows end, however many workers are idle. With speculative windows one also starts
as soon as the expected arrivals will not fill it to its size before its window ends.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from scheduler.batching.arrival_rate import ArrivalRate
from scheduler.batching.decision import Decision
from scheduler.batching.policy import decide
from scheduler.batching.service import Service
from scheduler.batching.snapshot import PoolSnapshot, TierQueue
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.protocol.wake_condition import WakeCondition

TIER = "free"
AGEING_MS, LOOKAHEAD_WORKERS = 1000.0, 4
WARM_SHARE = 0.2  # The first requests, which are not counted.

Policy = Callable[[PoolSnapshot], Decision]


class Pool(NamedTuple):
    """The workers, and the batch size, speed and window of the model."""

    workers: int
    batch: int
    service: Service
    window_ms: float


class Result(NamedTuple):
    """Waits in ms from arrival to the start of the run, sizes of batches, and the busy share of workers."""

    waits: list[float]
    sizes: list[int]
    busy: float


def adaptive(pool: Pool, headroom: float = 0.05) -> Policy:
    """The policy of the dispatcher."""
    tiers = [TierPolicy(TIER, 1, 0.0)]
    policy = BatchPolicy(pool.batch, pool.window_ms, LOOKAHEAD_WORKERS, AGEING_MS, tiers, 0.0, headroom=headroom)
    return lambda snapshot: decide(snapshot, policy, {})


def without_distances(pool: Pool) -> Policy:
    """The same, but part batches leave at uneven intervals too."""
    return adaptive(pool, 0.0)


def speculative(pool: Pool) -> Policy:
    """As `without_distances`, but a part batch leaves as soon as its window will end before it reaches its size, by the arrival rate."""
    policy = without_distances(pool)

    def decision(snapshot: PoolSnapshot) -> Decision:
        found = policy(snapshot)
        if found.picks or not snapshot.waiting or not snapshot.idle or not found.wait_ms:
            return found
        missing = found.condition.depth - snapshot.waiting
        left_ms = found.wait_ms - 1000 * missing / snapshot.arrivals_per_s
        return replace(found, wait_ms=left_ms) if left_ms > 1e-6 else replace(found, picks=[(TIER, snapshot.waiting)])

    return decision


def fixed(pool: Pool) -> Policy:
    """Start a batch when it is full or its window is over."""

    def decision(snapshot: PoolSnapshot) -> Decision:
        left_ms = pool.window_ms - snapshot.oldest_ms if snapshot.waiting else None
        if snapshot.idle and (snapshot.waiting >= pool.batch or (left_ms is not None and left_ms <= 1e-6)):
            return Decision([(TIER, min(pool.batch, snapshot.waiting))], None, WakeCondition(0), 1, {})
        return Decision((), left_ms if snapshot.idle else None, WakeCondition(1), 1, {})

    return decision


class Simulation:
    """One pool in simulated time: the events are arrivals, ends of batches, and timers of the policy."""

    def __init__(self, pool: Pool, policy: Policy, rate: float, seed: int) -> None:
        self._pool, self._policy, self._rate = pool, policy, rate
        self._random = random.Random(seed)
        self._queue: deque[float] = deque()
        self._ends: list[float] = []
        self._arrivals = ArrivalRate()
        self._unrecorded = 0
        self._timer_at: float | None = None
        self._formed_at = -math.inf
        self._condition = WakeCondition(1)
        self.waits: list[float] = []
        self.sizes: list[int] = []
        self.busy_s = 0.0

    def run(self, requests: int) -> Result:
        """Run until a number of requests have been served; the first fifth is not counted."""
        now, left = 0.0, requests
        arrival = self._random.expovariate(self._rate)
        while left or self._queue:
            events = [
                t for t in (arrival if left else None, self._ends[0] if self._ends else None, self._timer_at) if t
            ]
            now = max(now, min(events))
            if self._timer_at is not None and now >= self._timer_at:
                self._decide(now)
            elif self._ends and now >= self._ends[0]:
                self._ended(now)
            else:
                left, arrival = left - 1, now + self._random.expovariate(self._rate)
                self._arrived(now)
        return Result(self.waits[int(WARM_SHARE * requests) :], self.sizes, self.busy_s / (now * self._pool.workers))

    def _arrived(self, now: float) -> None:
        self._queue.append(now)
        self._unrecorded += 1
        if self._condition.depth and len(self._queue) >= self._condition.depth:
            self._decide(now)

    def _ended(self, now: float) -> None:
        heapq.heappop(self._ends)
        if self._condition.ready >= (0 if self._ends else -1) or self._condition.depth == 1:
            self._decide(now)

    def _decide(self, now: float) -> None:
        """Form batches until the policy forms no more, as the dispatcher does."""
        self._timer_at = None
        while True:
            decision = self._policy(self._snapshot(now))
            if not decision.picks:
                break
            self._start(now, sum(count for _, count in decision.picks))
        self._condition = decision.condition
        if decision.wait_ms is not None:
            self._timer_at = now + max(1e-6, decision.wait_ms / 1000)

    def _snapshot(self, now: float) -> PoolSnapshot:
        self._arrivals.record(self._unrecorded, now)
        self._unrecorded = 0
        oldest_ms = 1000 * (now - self._queue[0]) if self._queue else 0.0
        rate, running = self._arrivals.per_second(now), len(self._ends)
        waiting = {TIER: TierQueue(len(self._queue), oldest_ms)}
        # With every worker busy the policy decides when a worker becomes idle.
        ready = 1_000_000 if running >= self._pool.workers else 0
        since_formed_ms = 1000 * (now - self._formed_at)
        workers, service = self._pool.workers, self._pool.service
        return PoolSnapshot(waiting, ready, running, workers, rate, service, since_formed_ms=since_formed_ms)

    def _start(self, now: float, size: int) -> None:
        self._formed_at = now
        takes_s = (self._pool.service.base_ms + size * self._pool.service.item_ms) / 1000
        self.waits += [1000 * (now - self._queue.popleft()) for _ in range(size)]
        self.sizes.append(size)
        self.busy_s += takes_s
        heapq.heappush(self._ends, now + takes_s)


POLICIES = {"adaptive": adaptive, "without distances": without_distances, "speculative": speculative, "fixed": fixed}


def rows(pool: Pool, rates: Sequence[float], requests: int, seed: int) -> list[tuple[str, ...]]:
    """A row for each rate and policy: mean wait, its percentiles, fill and busy share."""
    lines = []
    for rate in rates:
        count = min(requests, max(2000, int(rate * 20)))
        for name, policy in POLICIES.items():
            result = Simulation(pool, policy(pool), rate, seed).run(count)
            cuts = statistics.quantiles(result.waits, n=100)
            waits = [f"{each:.1f}" for each in (statistics.fmean(result.waits), cuts[49], cuts[94], cuts[98])]
            lines.append((f"{rate:,.0f}", name, *waits, f"{statistics.fmean(result.sizes):.1f}", f"{result.busy:.1%}"))
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=34)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--base-ms", type=float, default=50.0)
    parser.add_argument("--item-ms", type=float, default=0.0)
    parser.add_argument("--window-ms", type=float, default=40.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--requests", type=int, default=200_000, help="at most so many a rate")
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    pool = Pool(a.workers, a.batch, Service(a.base_ms, a.item_ms, a.batch, steady=True), a.window_ms)
    table = Table("requests/s", "windows", "wait ms", "p50", "p95", "p99", "fill", "busy")
    for row in rows(pool, a.rates, a.requests, a.seed):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
