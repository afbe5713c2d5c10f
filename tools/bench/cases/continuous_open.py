"""Chats that arrive at 0.7 of the capacity of an engine with continuous batching: what Tierlane adds to their latency.

Arrivals and lengths are the same on both sides. Beside the difference of the percentiles there are the percentiles of the
difference of each request; both contain what the engine's own load differs by.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cases.continuous_closed import by_role
from cases.continuous_setup import (
    CAPACITY,
    QUICK,
    Plan,
    Run,
    direct,
    medians,
    run_side,
    stack_before,
    through,
)
from cases.outcome import Check, Outcome, at_most, figure, none_of
from chat_load.figures import percentile
from chat_load.generator import Span
from chat_load.plan import Load, mean_tokens
from engine.process import running_engine

SHARE = 0.7
MOST_P50_MS, MOST_P99_MS = 5.0, 15.0
DRAIN_S, DRAIN_QUICK_S = 45.0, 15.0
"""The longest answers take 35 s."""


def run(*, quick: bool, plan: Plan | None = None) -> Outcome:
    """Measure chats and streams."""
    plan = plan or (QUICK if quick else Plan())
    rate, span = SHARE * CAPACITY / mean_tokens(), Span(plan.warm_s, plan.seconds, DRAIN_QUICK_S if quick else DRAIN_S)
    points = []
    with running_engine() as engine, stack_before(engine, plan, 1) as stack:
        sides = [direct(engine), through(stack)]
        for stream in (False, True):
            rounds = []
            for turn in range(plan.rounds):
                load = Load(rate=rate, stream=stream, seed=turn + 1)
                alone, found = (run_side(side, engine, [load], span) for side in sides)
                rounds.append((alone, found))
            points.append({"stream": stream, "rate": rate, **_point(rounds)})
    return Outcome(judge(points), {"points": points}, [])


def _point(rounds: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    added = [_added(alone, found) for alone, found in rounds]
    return {
        "direct": medians([alone.figures for alone, _ in rounds]),
        "tierlane": medians([found.figures for _, found in rounds]),
        "added": medians(added),
    }


def _added(alone: Run, found: Run) -> dict[str, Any]:
    """Milliseconds: differences of the percentiles, and percentiles of the differences."""
    base = {answer.chat.number: answer.latency_ms for answer in alone.answers if answer.ok}
    pairs = [
        answer.latency_ms - base[answer.chat.number]
        for answer in found.answers
        if answer.ok and answer.chat.number in base
    ]
    names = [f"{kind}p{percent}_ms" for kind in ("", "first_") for percent in (50, 99)]
    return {
        **{
            name: None if alone.figures[name] is None else found.figures[name] - alone.figures[name]
            for name in names
            if found.figures[name] is not None
        },
        "paired_p50_ms": percentile(pairs, 50),
        "paired_p99_ms": percentile(pairs, 99),
    }


def judge(points: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Compare with the targets."""
    checks = []
    for point in points:
        name, added, found = "streams" if point["stream"] else "chats", point["added"], point["tierlane"]
        checks += [
            at_most(f"{name}: added p50", added.get("p50_ms"), MOST_P50_MS, " ms", 1),
            at_most(f"{name}: added p99", added.get("p99_ms"), MOST_P99_MS, " ms", 1),
            figure(f"{name}: added to the same request, p50, p99", _pair(added, "paired_")),
            figure(f"{name}: p50, p99 of the engine alone", _pair(point["direct"], "")),
            none_of(f"{name}: refused", sum(found["refused"].values())),
            none_of(f"{name}: errors", sum(found["errors"].values())),
            figure(f"{name}: not answered when the run ended", f"{found['unanswered']:.0f}"),
            figure(f"{name}: CPU by role", f"{by_role(found['cpu_ms'])} ms"),
        ]
        if point["stream"]:
            checks.append(figure(f"{name}: added to the first token, p50, p99", _pair(added, "first_")))
    return checks


def _pair(found: Mapping[str, Any], kind: str) -> str:
    values = [found.get(f"{kind}p{percent}_ms") for percent in (50, 99)]
    return ", ".join("not measured" if value is None else f"{value:,.1f} ms" for value in values)
