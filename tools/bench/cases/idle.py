"""The latency that an idle system adds to the time of the GPU: one connection, one request at a time."""

from collections.abc import Mapping
from typing import Any

from cases.outcome import Check, Outcome, at_most, figure, none_of
from cases.stack import started

GPU_MS = 50
MOST_P50_MS, MOST_P99_MS = 3, 8


def run(*, quick: bool) -> Outcome:
    """Measure with a closed loop of one connection."""
    with started(workers=34) as stack:
        stack.raise_limits()
        found = stack.bench(
            mode="closed", connections=1, duration=15 if quick else 60, warmup=3, mix="paid=1", echo="off"
        )
    keep = ("median_e2el_ms", "p99_e2el_ms", "max_e2el_ms", "completed", "failed", "histogram_ms")
    return Outcome(judge(found), {name: found[name] for name in keep}, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Compare the latency without the time of the GPU."""
    added = {name: found[f"{name}_e2el_ms"] - GPU_MS for name in ("median", "p99", "max")}
    return [
        at_most("added at p50", added["median"], MOST_P50_MS, " ms", 1),
        at_most("added at p99", added["p99"], MOST_P99_MS, " ms", 1),
        figure("added at most", f"{added['max']:.1f} ms"),
        none_of("errors", found["failed"]),
    ]
