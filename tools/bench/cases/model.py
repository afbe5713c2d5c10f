"""The overhead of Tierlane on a model: items/s of `tiny` through the whole system beside a bare loop.

One worker with one thread, so that the other roles have the other core. Rounds alternate, with the same batches and
inputs. Without a GPU the system shares caches and memory with the model.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from cases.bare_loop import FILLER
from cases.outcome import Check, Outcome, at_least, figure, none_of
from cases.stack import SHADOW, Stack, started

BATCH = 16
ROUNDS = 3
LEAST = 97.0


def run(*, quick: bool) -> Outcome:
    """Alternate rounds of the bare loop, while the stack is idle, and of the system."""
    seconds = 8 if quick else 20
    with started(workers=1, batch=BATCH, gateways=1, backend="tiny", torch_threads=1, device="cpu") as stack:
        stack.raise_limits(SHADOW, "UPDATE models SET target_utilization = 1")
        rounds = [{"bare": _bare(seconds), **_through(stack, seconds)} for _ in range(1 if quick else ROUNDS)]
    data = {"rounds": rounds}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare the medians of the rounds."""
    bare, through, busy, fill = (
        float(median(each[name] for each in data["rounds"])) for name in ("bare", "through", "busy", "fill")
    )
    return [
        figure(f"bare loop, batches of {BATCH}", f"{bare:.1f} items/s"),
        figure("through the whole system", f"{through:.1f} items/s"),
        at_least("of the bare loop", through / bare * 100, LEAST, " %", 1),
        figure("model busy", f"{busy * 100:.1f} %"),
        figure("fill of batches", f"{fill * 100:.1f} %"),
        none_of("errors", sum(each["failed"] for each in data["rounds"])),
    ]


def _bare(seconds: int) -> float:
    script = Path(__file__).with_name("bare_loop.py")
    command = [sys.executable, str(script), str(BATCH), str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _through(stack: Stack, seconds: int) -> dict[str, Any]:
    found = stack.bench(
        mode="closed",
        connections=4 * BATCH,
        duration=seconds,
        warmup=3,
        mix="paid=1",
        input=FILLER,
        verify="off",
        echo="off",
    )
    batches = found["batches"]
    return {
        "through": found["request_throughput"],
        "busy": batches["gpu_busy"],
        "fill": batches["fill"],
        "failed": found["failed"],
    }
