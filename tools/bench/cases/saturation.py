"""GPU utilization and fill of batches when the load exceeds the capacity."""

from collections.abc import Mapping
from typing import Any

from cases.outcome import Check, Outcome, at_least, figure, none_of
from cases.stack import SHADOW, started

WORKERS = 4
LEAST_FILL, LEAST_BUSY = 95.0, 97.0


def run(*, quick: bool) -> Outcome:
    """Measure with twice the connections of two rounds of full batches."""
    with started(workers=WORKERS) as stack:
        # By default limits give out only a share of the capacity.
        stack.raise_limits(SHADOW, "UPDATE models SET target_utilization = 1")
        found = stack.bench(
            mode="closed",
            connections=1000,
            duration=8 if quick else 30,
            warmup=4,
            mix="enterprise=1,paid=1,free=1",
            echo="off",
        )
    keep = ("request_throughput", "p99_e2el_ms", "failed", "batches", "audit")
    return Outcome(judge(found), {name: found[name] for name in keep}, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Compare fill and busy share, computed from the audit rows of the run."""
    batches = found["batches"] or {"fill": None, "gpu_busy": None, "mean_gpu_ms": None}
    fill, busy = (None if batches[name] is None else batches[name] * 100 for name in ("fill", "gpu_busy"))
    return [
        at_least("fill of batches", fill, LEAST_FILL, " %", 1),
        at_least("GPUs busy", busy, LEAST_BUSY, " %", 1),
        figure("requests/s", f"{found['request_throughput']:,.0f}"),
        none_of("errors", found["failed"]),
    ]
