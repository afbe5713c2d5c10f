"""Whether the cost of a request grows with the number of workers, of customers, or with time."""

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import limits_at_scale
import scaled_stack
from cases.outcome import Check, Outcome, at_most, over, told
from cases.stand import free_memory, rss_growth, started, used_us

FEW_WORKERS, MANY_WORKERS = 4, 200
FEW_CUSTOMERS, MANY_CUSTOMERS = 10, 100_000
RATE = 2000
MOST_MORE, MOST_RSS = 10.0, 5.0
WORKER_BYTES = 120_000_000
"""What a worker and its model may take at most, so that many of them are not started where they do not fit."""


def run(*, quick: bool) -> Outcome:
    """All three."""
    workers, notes = _workers(quick=quick)
    data = {"workers": workers, "customers": _customers(quick=quick), "time": _time(quick=quick)}
    return Outcome(judge(data), data, notes)


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Each cost beside its base."""
    workers, time = data["workers"], data["time"]
    few, many = sorted(workers, key=int)
    checks = [
        at_most(
            f"CPU more with {many} workers than with {few}", _more(workers[many], workers[few]), MOST_MORE, " %", 1
        ),
        told("CPU of a request by workers", f"{workers[few]:.1f} us with {few}, {workers[many]:.1f} us with {many}"),
        at_most(
            f"CPU more with {MANY_CUSTOMERS:,} customers than with {FEW_CUSTOMERS} (gateway and Redis)",
            (data["customers"] - 1) * 100,
            MOST_MORE,
            " %",
            1,
        ),
        at_most(
            f"CPU more at the end of {time['seconds'] / 60:.0f} minutes than at the beginning",
            _more(time["late_us"], time["early_us"]),
            MOST_MORE,
            " %",
            1,
        ),
    ]
    grown = {role: share * 100 for role, share in time["rss"].items()}
    return checks + [at_most(f"memory of {role} grown", share, MOST_RSS, " %", 1) for role, share in grown.items()]


def _more(cost: float, base: float) -> float | None:
    ratio = over(cost, base)
    return None if ratio is None else (ratio - 1) * 100


def _workers(*, quick: bool) -> tuple[dict[str, float], list[str]]:
    fit = int(free_memory() * 0.8 / WORKER_BYTES)
    many = min(MANY_WORKERS // 5 if quick else MANY_WORKERS, fit)
    notes = [f"This machine has memory for {many} workers, not for {MANY_WORKERS}."] if fit < MANY_WORKERS else []
    return {str(count): _cost_with(count, 8 if quick else 30) for count in (FEW_WORKERS, many)}, notes


def _cost_with(workers: int, seconds: int) -> float:
    with started(workers=workers) as stand:
        stand.raise_limits()
        found = stand.bench(rate=RATE, duration=seconds, warmup=4, connections=512, echo="off")
        return float(found["server_cpu_seconds_per_1000"]) * 1000


def _customers(*, quick: bool) -> float:
    """As bench/limits_at_scale.py measures it: the median of paired rounds."""
    arguments = argparse.Namespace(rate=1000.0, seconds=2.0 if quick else 4.0, rounds=4 if quick else 12, revocations=1)
    with ExitStack() as stacks:
        small = stacks.enter_context(scaled_stack.started("few", FEW_CUSTOMERS))
        large = stacks.enter_context(scaled_stack.started("many", MANY_CUSTOMERS))
        found = asyncio.run(limits_at_scale.measure(small, large, arguments))
    rounds = {case.says: one for case, one in found.rounds.items()}
    names = list(rounds)
    return limits_at_scale.ratio(rounds[names[1]], rounds[names[0]])


def _time(*, quick: bool) -> dict[str, Any]:
    """One load all the time, looked at in its first and last minute."""
    total, part = (60, 15) if quick else (600, 60)
    load = {"rate": RATE, "connections": 512, "echo": "off"}
    with started(workers=8) as stand:
        stand.raise_limits()
        # Caches, pools and buffers have their size after a while of load.
        stand.bench(duration=part, warmup=2, **load)
        first = stand.reading()
        early = stand.bench(duration=part, warmup=0, **load)
        stand.bench(duration=total - 2 * part, warmup=0, **load)
        late = stand.bench(duration=part, warmup=0, **load)
        last = stand.reading()
    cost = {name: found["server_cpu_seconds_per_1000"] * 1000 for name, found in (("early", early), ("late", late))}
    overall = used_us(first, last, int(RATE * total))
    return {
        "seconds": total,
        "early_us": cost["early"],
        "late_us": cost["late"],
        "overall_us": sum(overall.values()),
        "rss": rss_growth(first, last),
    }
