"""Whether a request costs more after ten minutes, or any role takes more memory: one load all the time."""

from collections.abc import Mapping
from typing import Any

from cases.outcome import Check, Outcome, at_most, more, told
from cases.stand import rss_growth, started

WORKERS = 8
RATE = 2000
MOST_MORE, MOST_GROWN = 10.0, 5.0
KEPT_S = 45
"""So long Redis keeps what has ended, and a little more: before that its memory must grow."""


def run(*, quick: bool) -> Outcome:
    """The first and the last minute are looked at, after a while in which caches, pools and buffers get their size."""
    total, part = (60, 15) if quick else (600, 60)
    load = {"rate": RATE, "connections": 512, "echo": "off"}
    with started(workers=WORKERS) as stand:
        stand.raise_limits()
        stand.bench(duration=max(part, KEPT_S), warmup=2, **load)
        first = stand.reading()
        early = stand.bench(duration=part, warmup=0, **load)
        stand.bench(duration=total - 2 * part, warmup=0, **load)
        late = stand.bench(duration=part, warmup=0, **load)
        grown = rss_growth(first, stand.reading())
    early_us, late_us = (found["server_cpu_seconds_per_1000"] * 1000 for found in (early, late))
    data = {"seconds": total, "early_us": early_us, "late_us": late_us, "grown": grown}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """The last minute beside the first, then the memory of each role."""
    return [
        at_most(
            "CPU more in the last minute than in the first", more(data["late_us"], data["early_us"]), MOST_MORE, " %", 1
        ),
        told("CPU of a request in the first", f"{data['early_us']:.1f} us"),
        told("length of the run", f"{data['seconds'] / 60:g} minutes at {RATE:,} requests/s"),
        *(
            at_most(f"memory of {role} grown", share * 100, MOST_GROWN, " %", 1)
            for role, share in data["grown"].items()
        ),
    ]
