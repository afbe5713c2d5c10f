"""Clients in a closed loop before an engine with continuous batching: through Tierlane, and to the engine alone.

64 clients are as many as the engine has slots, 256 are four times as many. Streamed and not, with one worker and two.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cases.continuous_setup import QUICK, Plan, Side, direct, medians, run_side, stack_before, through
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from chat_load.plan import Load
from engine.process import RunningEngine, running_engine

LEAST_TOKENS = 0.98
MOST_SHORT = 1.15
MOST_FIRST_MS, MOST_FIRST_P99 = 10.0, 1.3
MOST_CPU_MS = {False: 2.5, True: 4.0}
"""Of a chat, and of a stream of 80 tokens."""


def run(*, quick: bool, plan: Plan | None = None) -> Outcome:
    """Measure all combinations."""
    plan = plan or (QUICK if quick else Plan())
    points = []
    with running_engine() as engine:
        for workers in plan.workers:
            with stack_before(engine, plan, workers) as stack:
                points += [
                    {"workers": workers, **point} for point in compare(engine, [direct(engine), through(stack)], plan)
                ]
    return Outcome(judge(points), {"points": points, "table": table(points)}, notes(points))


def compare(engine: RunningEngine, sides: Sequence[Side], plan: Plan) -> list[dict[str, Any]]:
    """Each number of clients, streamed and not, on each side by turns; the medians of each side by its name."""
    points = []
    for clients in plan.clients:
        for stream in (False, True):
            runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            for turn in range(plan.rounds):
                load = Load(clients=clients, stream=stream, seed=turn + 1)
                for side in sides:
                    runs[side.name].append(run_side(side, engine, [load], plan.span).figures)
            points.append(
                {"clients": clients, "stream": stream, **{name: medians(several) for name, several in runs.items()}}
            )
    return points


def ratios(point: Mapping[str, Any], name: str = "tierlane") -> dict[str, float | None]:
    """One side beside the engine alone."""
    alone, found = point["direct"], point[name]
    firsts = found["first_p50_ms"], alone["first_p50_ms"]
    return {
        "tokens": over(found["tokens_per_s"], alone["tokens_per_s"]),
        "short": over(found["short_p50_ms"], alone["short_p50_ms"]),
        "p50": over(found["p50_ms"], alone["p50_ms"]),
        "first_ms": None if None in firsts else firsts[0] - firsts[1],
        "first_p99": over(found["first_p99_ms"], alone["first_p99_ms"]),
    }


def label(point: Mapping[str, Any]) -> str:
    """The name of a combination."""
    return f"{point['workers']} workers, {point['clients']} clients, {'streams' if point['stream'] else 'chats'}"


def judge(points: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Compare with the targets."""
    checks = []
    for point in points:
        name, ratio, found = label(point), ratios(point), point["tierlane"]
        checks += [
            at_least(f"{name}: tokens/s over the engine's alone", ratio["tokens"], LEAST_TOKENS, " x", 2),
            at_most(f"{name}: p50 of short answers over direct", ratio["short"], MOST_SHORT, " x", 2),
        ]
        if point["stream"]:
            checks += [
                at_most(f"{name}: first token p50 over direct", ratio["first_ms"], MOST_FIRST_MS, " ms", 1),
                at_most(f"{name}: first token p99 over direct", ratio["first_p99"], MOST_FIRST_P99, " x", 2),
            ]
        cpu_ms = sum(found["cpu_ms"].values())
        checks += [
            at_most(f"{name}: CPU of all processes", cpu_ms, MOST_CPU_MS[point["stream"]], " ms", 2),
            figure(f"{name}: CPU by role", by_role(found["cpu_ms"])),
            none_of(f"{name}: refused", sum(found["refused"].values())),
            none_of(f"{name}: errors", sum(found["errors"].values())),
        ]
    return checks


def by_role(cpu_ms: Mapping[str, float]) -> str:
    """CPU in ms by role, the largest first."""
    return ", ".join(f"{role} {ms:.2f}" for role, ms in sorted(cpu_ms.items(), key=lambda pair: -pair[1]))


def notes(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Refusals and errors by code, and runs that the machine disturbed."""
    lines = [
        f"{label(point)}: {kind} {point['tierlane'][kind]}"
        for point in points
        for kind in ("refused", "errors")
        if point["tierlane"][kind]
    ]
    busy = [f"{label(point)} {point['tierlane']['machine_busy']:.0%}" for point in points]
    return [*lines, f"Processors busy: {'; '.join(busy)}"]


HEADERS = ("", "tokens/s", "running", "queue p99", "p50 s", "short p50 s", "first p50, p99 ms", "CPU ms", "refused")


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """All figures of all sides as a table in Markdown."""
    lines = [" | ".join(HEADERS), " | ".join("---" for _ in HEADERS)]
    for point in points:
        for name in [name for name in point if isinstance(point[name], Mapping)]:
            found = point[name]
            first = f"{_ms(found['first_p50_ms'])}, {_ms(found['first_p99_ms'])}" if point["stream"] else ""
            cells = [
                f"{label(point)}: {name}",
                f"{found['tokens_per_s']:,.0f}",
                f"{found['running']:.1f}",
                f"{found['waiting_p99']:.0f}",
                _s(found["p50_ms"]),
                _s(found["short_p50_ms"]),
                first,
                f"{sum(found['cpu_ms'].values()):.2f}" if found["cpu_ms"] else "",
                f"{sum(found['refused'].values())}",
            ]
            lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value / 1000:.2f}"
