"""A quiet customer's latency alone and then, in the same run, beside floods; and the law of its wait.

A batch is not interrupted. If all n workers are busy with batches that take T, at times that are independent of each other,
the time until the first of them is free is the least of n times, each equally likely to be anything up to T. So it is
longer than t with the probability (1 - t/T)^n, and its p99 is T (1 - 0.01^(1/n)). No order of requests is faster, unless
it holds workers free or starts their batches at even intervals: then the longest wait is T/n.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cases.customer_load import (
    Load,
    Window,
    answers_due_in,
    answers_in,
    batch_ms,
    causes,
    failed,
    latencies_of,
    percentile,
    refused,
    run_loads,
    wait_for_audit,
)
from cases.outcome import Check, at_most, figure, none_of, over
from cases.stack import Stack

MOST_P99 = 1.2
RAMP_S = 1.0
"""The time after the start of each load that is not judged."""


def residual_p99_ms(batch_ms: float, workers: int) -> float:
    """The p99 of the wait for the first of so many workers whose batches end independently of each other."""
    return batch_ms * (1 - 0.01 ** (1 / workers))


def beside_floods(
    stack: Stack, workers: int, quiet: Sequence[Load], floods: Sequence[Load], seconds: float
) -> dict[str, Any]:
    """Run the quiet loads for `seconds` alone, then for as long beside the floods."""
    alone = Window(RAMP_S, RAMP_S + seconds)
    beside = Window(alone.end + RAMP_S, alone.end + RAMP_S + seconds)
    for number, load in enumerate(quiet):  # Not all at the same time.
        load.begin_s, load.end_s = number / len(quiet) / load.rate, beside.end
    for load in floods:
        load.begin_s, load.end_s = alone.end, beside.end
    began = run_loads(stack, [*quiet, *floods])
    wait_for_audit(stack, began, [*quiet, *floods])
    before, during = answers_due_in(quiet, alone), answers_due_in(quiet, beside)
    of_floods = answers_in(floods, beside)
    busy_ms = batch_ms(stack, began, beside)
    base_ms = percentile(latencies_of(before), 50)
    return {
        "alone_p50_ms": base_ms,
        "alone_p99_ms": percentile(latencies_of(before), 99),
        "p50_ms": percentile(latencies_of(during), 50),
        "p99_ms": percentile(latencies_of(during), 99),
        "batch_ms": busy_ms,
        "law_p99_ms": base_ms + residual_p99_ms(busy_ms, workers),
        "even_ms": base_ms + busy_ms / workers,
        "answered": len(latencies_of(during)),
        "refused": refused(during),
        "failed": failed(during),
        "causes": causes(during),
        "flood_p99_ms": percentile(latencies_of(of_floods), 99),
        "flood_answered": len(latencies_of(of_floods)),
        "flood_refused": refused(of_floods),
        "flood_causes": causes(of_floods),
        "flood_at_s": alone.end,
        # As text, since the file of figures has one number a line.
        "latencies": " ".join(f"{each.due:.1f}:{each.ms:.0f}" for each in quiet[0].answers if each.status == 200),
    }


def check_quiet(title: str, found: Mapping[str, Any], most: float = MOST_P99) -> list[Check]:
    """Judge the p99 and the rejections of quiet customers; the law is for comparison."""
    alone = found["alone_p99_ms"]
    return [
        figure(f"{title}: p99 alone", f"{alone:.1f} ms"),
        at_most(f"{title}: p99 over that", over(found["p99_ms"], alone), most, " x", 2),
        figure(f"{title}: the same by the law", f"{over(found['law_p99_ms'], alone) or 0:.2f} x"),
        figure(f"{title}: the same with even intervals, at most", f"{over(found['even_ms'], alone) or 0:.2f} x"),
        figure(f"{title}: batches of the flood, T", f"{found['batch_ms']:.1f} ms"),
        none_of(f"{title}: requests of quiet customers refused", found["refused"]),
        none_of(f"{title}: requests of quiet customers failed", found["failed"]),
    ]
