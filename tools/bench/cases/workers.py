"""The cost of a request with 200 workers beside that with 4, at the same load."""

from collections.abc import Mapping
from typing import Any

import psutil
from cases.outcome import Check, Outcome, at_most, figure, more
from cases.stack import started

FEW, MANY = 4, 200
RATE = 2000
MOST_MORE = 10.0
WORKER_BYTES = 60_000_000
"""The memory of a worker and its model, to start only as many as fit: measured with 200 under load, 39 + 10 MB (PSS)
each, by which the available memory fell by 55 MB."""


def run(*, quick: bool) -> Outcome:
    """Measure both numbers on separate stacks; the larger one is limited by the memory."""
    fit = int(psutil.virtual_memory().available * 0.8 / WORKER_BYTES)
    many = min(MANY // 5 if quick else MANY, fit)
    notes = [f"This machine has memory for about {fit} workers, not for {MANY}."] if fit < MANY else []
    data = {str(count): _cost(count, 8 if quick else 30) for count in (FEW, many)}
    return Outcome(judge(data), data, notes)


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare the cost with both numbers."""
    few, many = sorted(data, key=int)
    costs = [figure(f"CPU of a request with {count} workers", f"{data[count]:.1f} us") for count in (few, many)]
    return [
        at_most(f"CPU more with {many} workers than with {few}", more(data[many], data[few]), MOST_MORE, " %", 1),
        *costs,
    ]


def _cost(workers: int, seconds: int) -> float:
    with started(workers=workers) as stack:
        stack.raise_limits()
        found = stack.bench(rate=RATE, duration=seconds, warmup=4, connections=512, echo="off")
        return float(found["server_cpu_seconds_per_1000"]) * 1000
