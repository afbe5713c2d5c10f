"""A pool of GPUs in virtual time with the limits of the gateway: requests offered, rejected and served per second.

The workers' measurements (`ServiceTime`, `ServedRate`), the estimate and the sharing (`LiveLimits`) are the product's. Only the
queue, the batches (an idle worker takes waiting requests up to a full batch) and admission are simulated.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.limits.capacity import LiveLimits
from gpu_pool.worker.batch_rates import ServedRate
from gpu_pool.worker.service_time import ServiceTime
from ledger.catalog.snapshot import Model, Snapshot, Tier
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, TierStats, WorkerView

STEP_S = 0.005
LOOK_S = 0.25
TIER = "free"

RunMs = Callable[[int, float], float]
"""The milliseconds of a batch of n that begins after a number of seconds."""


@dataclass
class Gpu:
    """One worker. `effective_batch`: the most requests that it runs in a batch."""

    run_ms: RunMs
    effective_batch: int = 10_000
    service: ServiceTime = field(default_factory=ServiceTime)
    served: ServedRate = field(default_factory=ServedRate)
    began_s: float = 0.0
    ends_s: float = 0.0
    size: int = 0

    def view(self, name: str) -> WorkerView:
        item_ms, base_ms = self.service.fit()
        return WorkerView(
            name,
            "busy",
            1.0,
            self.size,
            age_ms=0.0,
            healthy=True,
            rps=0.0,
            service_p95_ms=self.service.typical_p95_ms(max(1, self.size)),
            backend="simulated",
            model_version="1",
            base_ms=base_ms,
            item_ms=item_ms,
            seen_batch=self.service.seen_batch,
            served_rps=self.served.rps,
            fresh_batch=self.service.fresh_batch,
        )


class Second(NamedTuple):
    """The requests of one second; the capacity is its last estimate, before `target_utilization`."""

    offered: int
    refused: int
    served: int
    late: int
    capacity_rps: float
    evidence: str


class Simulation:
    """Requests arrive at `offered_rps` with a little jitter; each has `deadline_s` in all."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        offered_rps: Callable[[float], float],
        *,
        batch: int = 32,
        prior_rps: float = 20.0,
        target: float = 0.95,
        deadline_s: float = 4.0,
        max_depth: int = 5000,
    ) -> None:
        self.gpus = list(gpus)
        self._offered_rps = offered_rps
        self.batch = batch
        self._prior_rps, self._target = prior_rps, target
        self._deadline_s = deadline_s
        tier = Tier(TIER, 1, 0.1, (1e6, 1e6, 100_000, None), max_depth, int(deadline_s * 1000), None, None)
        self._tier = tier
        self.limits = LiveLimits("default")
        self._queue: deque[float] = deque()
        self._tokens = 0.0
        self._random = random.Random(7)
        self._arrived: deque[int] = deque(maxlen=8)
        self._shed: deque[int] = deque(maxlen=8)
        self.seconds: list[Second] = []

    @property
    def snapshot(self) -> Snapshot:
        model = Model("m", "default", self.batch, None, 40, self._prior_rps, self._target, 0, enabled=True)
        return Snapshot(1, (self._tier,), {}, {}, {"m": model}, ())

    def run(self, seconds: int, change: Callable[["Simulation", int], None] = lambda *_: None) -> list[Second]:
        """Run for a number of seconds; `change` is called at the start of each."""
        steps = round(1 / STEP_S)
        for second in range(seconds):
            change(self, second)
            counts = [0, 0, 0, 0]
            for step in range(steps):
                self._step(second + step * STEP_S, counts, look=step % round(LOOK_S / STEP_S) == 0)
            estimate = self.limits.estimate
            self.seconds.append(Second(*counts, estimate.rps, estimate.evidence.value))
        return self.seconds

    def _step(self, now: float, counts: list[int], *, look: bool) -> None:
        if look:
            self._look(now)
        self._finish(now, counts)
        arrivals = int(self._offered_rps(now) * STEP_S + self._random.random())
        rate, capacity = self.limits.ceiling(TIER), self.limits.current(self.snapshot).capacity_rps
        self._tokens = min(rate, self._tokens + rate * STEP_S)
        for _ in range(arrivals):
            counts[0] += 1
            if self._enters(capacity):
                self._tokens -= 1
                self._queue.append(now)
            else:
                counts[1] += 1
                self._shed[-1] += 1
        self._arrived[-1] += arrivals
        self._start(now, counts)

    def _enters(self, capacity: float) -> bool:
        wait_s = len(self._queue) / capacity if capacity > 0 else 0.0
        return self._tokens >= 1 and wait_s < self._deadline_s and len(self._queue) < self._tier.max_queue_depth

    def _finish(self, now: float, counts: list[int]) -> None:
        for gpu in self.gpus:
            if gpu.size and now >= gpu.ends_s:
                gpu.service.record(gpu.size, (gpu.ends_s - gpu.began_s) * 1000)
                gpu.served.ended(gpu.ends_s, gpu.size)
                counts[2] += gpu.size
                gpu.size = 0

    def _start(self, now: float, counts: list[int]) -> None:
        while self._queue and now - self._queue[0] > self._deadline_s:
            self._queue.popleft()
            counts[3] += 1
        for gpu in self.gpus:
            if not gpu.size and self._queue:
                gpu.size = min(self.batch, gpu.effective_batch, len(self._queue))
                for _ in range(gpu.size):
                    self._queue.popleft()
                gpu.began_s = max(now - STEP_S, gpu.ends_s) if gpu.ends_s > now - STEP_S else now
                gpu.ends_s = gpu.began_s + gpu.run_ms(gpu.size, now) / 1000

    def _views(self, _now: float) -> list[WorkerView]:
        return [gpu.view(f"w{i}") for i, gpu in enumerate(self.gpus)]

    def _look(self, now: float) -> None:
        arrived, shed = sum(self._arrived), sum(self._shed)
        span_s = max(LOOK_S, len(self._arrived) * LOOK_S)
        self._arrived.append(0)
        self._shed.append(0)
        busy = sum(1 for gpu in self.gpus if gpu.size)
        oldest_ms = (now - self._queue[0]) * 1000 if self._queue else 0.0
        stats = TierStats(arrived / span_s, shed / span_s, 0.0, arrived_rps=arrived / span_s)
        self.limits.observe(
            Observation(
                int(now * 1000),
                {TIER: TierDepth(TIER, len(self._queue), oldest_ms)},
                self._views(now),
                [GatewayStats("g", 0.0, {TIER: stats})],
                0,
                busy,
                0,
                0,
            ),
            self.snapshot,
            now,
        )
