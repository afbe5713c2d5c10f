"""How soon a stack knows how many requests an engine with continuous batching takes: from cold, and when the engine changes.

The load is a closed loop of twice as many clients as the engine has slots, so that a free slot is always missed. A stack
follows a change when the running sequences are worth 90 % of the engine's tokens/s, and the engine's own queue is at most a
tenth of its slots, for three seconds. Once with the engine's metrics and once without.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cases.continuous_setup import PACE, QUICK, Plan, direct, in_thread, run_side, stack_before, through
from cases.outcome import Check, Outcome, at_most, figure
from chat_load.figures import QUEUE_PART, engine_figures, tokens_at
from chat_load.generator import Span
from chat_load.plan import Load
from engine.process import RunningEngine, running_engine
from engine.steps import Pace, Sample

CLIENTS = 2 * PACE.slots
REACHED = 0.9
MOST_COLD_S = {"vllm": 5.0, "none": 10.0}
MOST_FOLLOWED_S, MOST_OSCILLATION, MOST_QUEUE_S = 5.0, 15.0, 1.0
STEADY_S = 3.0
GRID_S = 0.25
COLD_S, COLD_QUICK_S = 20.0, 12.0
PHASE_S, PHASE_QUICK_S = 20.0, 10.0
HALF = PACE.slots // 2


class Phase(NamedTuple):
    """A change of the engine, the running sequences that it has then, and the seconds until it can have them."""

    name: str
    change: Mapping[str, object]
    slots: int = PACE.slots
    factor: float = 1.0
    begins_s: float = 0.0


PHASES = (
    Phase("as before", {}),
    Phase("4 x slower", {"factor": 4.0}, factor=4.0),
    Phase("as fast again", {"factor": 1.0}),
    Phase("half the slots", {"slots": HALF}, slots=HALF),
    Phase("all slots again", {"slots": PACE.slots}),
    Phase("429 beyond half the slots", {"refuse": 429, "refuse_above": HALF - 1}, slots=HALF),
    Phase("no 429 again", {"refuse": 0}),
    Phase("429 to all for 2 s", {"refuse": 429, "refuse_for_s": 2.0}, begins_s=2.0),
)


def run(*, quick: bool, plan: Plan | None = None) -> Outcome:
    """Measure with and without the metrics of the engine, on a new stack each."""
    plan = plan or (QUICK if quick else Plan())
    data = {}
    for metrics in MOST_COLD_S:
        with running_engine(metrics=metrics, owner="vllm" if metrics == "vllm" else "other") as engine:
            alone = run_side(direct(engine), engine, [Load(clients=CLIENTS)], Span(2.0, 6.0)).figures["tokens_per_s"]
            with stack_before(engine, plan, 1) as stack:
                side = through(stack)
                cold = run_side(side, engine, [Load(clients=CLIENTS)], Span(0.0, COLD_QUICK_S if quick else COLD_S))
                data[metrics] = {
                    "alone": alone,
                    "cold_s": reached_s(cold.samples, cold.ran.begin_s, cold.ran.end_s, REACHED * alone),
                    "cold_end": cold.figures,
                    "phases": _phases(engine, side, PHASE_QUICK_S if quick else PHASE_S),
                }
    return Outcome(judge(data), data, notes(data))


def reached_s(samples: Sequence[Sample], begin_s: float, end_s: float, tokens_per_s: float) -> float | None:
    """Seconds until the first of three seconds in a row with so many tokens each; None if there are none."""
    at = begin_s
    while at + STEADY_S <= end_s:
        counts = [tokens_at(samples, at + n + 1) - tokens_at(samples, at + n) for n in range(int(STEADY_S))]
        if min(counts) >= tokens_per_s:
            return round(at - begin_s, 2)
        at += GRID_S
    return None


def _phases(engine: RunningEngine, side: Any, phase_s: float) -> list[dict[str, Any]]:
    span = Span(5.0, phase_s * len(PHASES))
    with _changing(engine, span.warm_s, phase_s):
        run = run_side(side, engine, [Load(clients=CLIENTS, seed=2)], span)
    found = []
    for number, phase in enumerate(PHASES):
        begin_s = run.ran.begin_s + number * phase_s
        answers = [answer for answer in run.ran.answers if begin_s <= answer.last_s < begin_s + phase_s]
        found.append(
            {
                "name": phase.name,
                **followed(run.samples, begin_s + phase.begins_s, begin_s + phase_s, phase),
                "refused": sum(answer.refused for answer in answers),
                "errors": sum(not answer.ok and not answer.refused for answer in answers),
            }
        )
    return found


@contextmanager
def _changing(engine: RunningEngine, first_s: float, phase_s: float) -> Iterator[None]:
    """Change the engine at the beginning of each phase, from a thread; at the end it is as it was."""
    began = time.monotonic()

    def change(stopped: threading.Event) -> None:
        for number, phase in enumerate(PHASES):
            if stopped.wait(max(0.0, began + first_s + number * phase_s - time.monotonic())):
                return
            if phase.change:
                engine.control(**phase.change)

    try:
        with in_thread(change):
            yield
    finally:
        engine.control(factor=1.0, slots=PACE.slots, refuse=0)


def followed(samples: Sequence[Sample], begin_s: float, end_s: float, phase: Phase) -> dict[str, Any]:
    """How a stack follows a phase. `oscillation`: the largest deviation of a second's running sequences from their mean, in
    per cent of it, after it followed or after five seconds.
    """
    pace = Pace(slots=phase.slots)
    good = []
    at = begin_s
    while at + 1 <= end_s:
        found = engine_figures(samples, at, at + 1, phase.slots)
        worth = pace.tokens_per_s(found["running"]) / pace.tokens_per_s(phase.slots) if found["running"] else 0.0
        good.append((at - begin_s, worth >= REACHED and found["waiting_mean"] <= QUEUE_PART * phase.slots))
        at += GRID_S
    need = min(len(good), int(STEADY_S / GRID_S))
    time_s = next(
        (at for number, (at, _) in enumerate(good) if all(ok for _, ok in good[number : number + need])), None
    )
    steady_s = min(end_s - 2, begin_s + max(time_s or 0.0, MOST_FOLLOWED_S))
    seconds = [
        engine_figures(samples, steady_s + n, steady_s + n + 1, phase.slots) for n in range(int(end_s - steady_s))
    ]
    running = [found["running"] for found in seconds]
    mean = sum(running) / len(running)
    whole = engine_figures(samples, begin_s, end_s, phase.slots)
    steady = engine_figures(samples, steady_s, end_s, phase.slots)
    return {
        "followed_s": time_s,
        "oscillation": max(abs(each - mean) for each in running) / mean * 100 if mean else None,
        "queue_s": whole["queue_s"],
        "waiting_max": whole["waiting_max"],
        "running": steady["running"],
        "tokens": steady["tokens_per_s"] / (pace.tokens_per_s(phase.slots) / phase.factor),
    }


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare with the targets."""
    checks = []
    for metrics, found in data.items():
        name = "with metrics" if metrics == "vllm" else "without metrics"
        checks.append(_within(f"{name}: from cold to 90 % of direct", found["cold_s"], MOST_COLD_S[metrics]))
        for phase in found["phases"]:
            label = f"{name}, {phase['name']}"
            checks += [
                _within(f"{label}: followed", phase["followed_s"], MOST_FOLLOWED_S),
                at_most(f"{label}: oscillation", phase["oscillation"], MOST_OSCILLATION, " %", 1),
                at_most(f"{label}: engine queue over a tenth of its slots", phase["queue_s"], MOST_QUEUE_S, " s", 1),
                figure(
                    f"{label}: then",
                    f"{phase['tokens']:.2f} x of its tokens/s, {phase['running']:.1f} running; queue at most "
                    f"{phase['waiting_max']}; {phase['refused']} refused, {phase['errors']} errors",
                ),
            ]
    return checks


def _within(name: str, seconds: float | None, most_s: float) -> Check:
    """A time; None: never."""
    if seconds is None:
        return Check(name, f"<= {most_s:.0f} s", "never", holds=False)
    return at_most(name, seconds, most_s, " s", 1)


def notes(data: Mapping[str, Any]) -> list[str]:
    """The tokens/s that 90 % refers to."""
    return [f"Direct, metrics {metrics}: {found['alone']:,.0f} tokens/s" for metrics, found in data.items()]
