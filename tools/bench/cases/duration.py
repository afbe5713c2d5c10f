"""The cost of a request and the memory of each role after ten minutes of constant load."""

from collections.abc import Mapping
from typing import Any

from cases.outcome import Check, Outcome, at_most, figure, more
from cases.stack import started

from tierlane_tools.bench.measurement.resources import ProcessCpu, rss_by_role

WORKERS = 8
RATE = 2000
MOST_MORE, MOST_GROWN = 10.0, 5.0
KEPT_S = 45
"""Redis keeps ended requests for almost this time, in which its memory grows."""


def run(*, quick: bool) -> Outcome:
    """Measure the first and the last minute, after a warm-up in which caches and buffers grow to their size."""
    total, part = (60, 15) if quick else (600, 60)
    load = {"rate": RATE, "connections": 512, "echo": "off"}
    with started(workers=WORKERS) as stack:
        stack.raise_limits()
        stack.bench(duration=max(part, KEPT_S), warmup=2, **load)
        first = stack.reading()
        early = stack.bench(duration=part, warmup=0, **load)
        stack.bench(duration=total - 2 * part, warmup=0, **load)
        late = stack.bench(duration=part, warmup=0, **load)
        grown = _rss_growth(first, stack.reading())
    early_us, late_us = (found["server_cpu_seconds_per_1000"] * 1000 for found in (early, late))
    data = {"seconds": total, "early_us": early_us, "late_us": late_us, "grown": grown}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare the last minute with the first, and the memory of each role."""
    return [
        at_most(
            "CPU more in the last minute than in the first", more(data["late_us"], data["early_us"]), MOST_MORE, " %", 1
        ),
        figure("CPU of a request in the first", f"{data['early_us']:.1f} us"),
        figure("length of the run", f"{data['seconds'] / 60:g} minutes at {RATE:,} requests/s"),
        *(
            at_most(f"memory of {role} grown", share * 100, MOST_GROWN, " %", 1)
            for role, share in data["grown"].items()
        ),
    ]


def _rss_growth(before: list[ProcessCpu], after: list[ProcessCpu]) -> dict[str, float]:
    """The share by which the memory of each role grew."""
    early, late = rss_by_role(before), rss_by_role(after)
    return {role: round(late[role] / early[role] - 1, 4) for role in early if role in late and early[role]}
