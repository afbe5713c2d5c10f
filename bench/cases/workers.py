"""Whether a request costs more where there are 200 workers than where there are 4, at the same load."""

from collections.abc import Mapping
from typing import Any

from cases.outcome import Check, Outcome, at_most, more, told
from cases.stand import free_memory, started

FEW, MANY = 4, 200
RATE = 2000
MOST_MORE = 10.0
WORKER_BYTES = 60_000_000
"""What a worker and its model take, with what the system keeps for them, so that no more are started than fit. Measured
with 200, loaded: 39 + 10 MB (PSS), by which the memory available fell by 55 MB each."""


def run(*, quick: bool) -> Outcome:
    """Both numbers, each on a stack of its own; as many of the larger one as the machine has memory for."""
    fit = int(free_memory() * 0.8 / WORKER_BYTES)
    many = min(MANY // 5 if quick else MANY, fit)
    notes = [f"This machine has memory for about {fit} workers, not for {MANY}."] if fit < MANY else []
    data = {str(count): _cost(count, 8 if quick else 30) for count in (FEW, many)}
    return Outcome(judge(data), data, notes)


def judge(data: Mapping[str, Any]) -> list[Check]:
    """The cost with many beside that with few."""
    few, many = sorted(data, key=int)
    costs = [told(f"CPU of a request with {count} workers", f"{data[count]:.1f} us") for count in (few, many)]
    return [
        at_most(f"CPU more with {many} workers than with {few}", more(data[many], data[few]), MOST_MORE, " %", 1),
        *costs,
    ]


def _cost(workers: int, seconds: int) -> float:
    with started(workers=workers) as stand:
        stand.raise_limits()
        found = stand.bench(rate=RATE, duration=seconds, warmup=4, connections=512, echo="off")
        return float(found["server_cpu_seconds_per_1000"]) * 1000
