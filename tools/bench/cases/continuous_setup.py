"""The setup of the cases with a stand-in engine: the engine alone and a stack before it, loaded by turns."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import psutil
from cases.stack import CUSTOMERS_AS_TIERS, CUSTOMERS_RAISED, RAISED, Stack, started
from chat_load.connection import Answer
from chat_load.figures import answers_due_in, answers_ended_in, engine_figures, latencies
from chat_load.generator import Ran, Span, run_loads
from chat_load.plan import Load
from engine.process import RunningEngine
from engine.steps import Pace, Sample

from tierlane_tools.bench.measurement.resources import cpu_between

MODEL = "stand-in"
PACE = Pace()
CAPACITY = PACE.tokens_per_s(PACE.slots)
"""Tokens/s of the engine with all slots taken."""
IDLE_S = 60.0
"""The time in which the engine is idle after the clients have left."""
POLL_S = 0.1
# The defaults of a stack are for a function of 50 ms; a chat of 2,000 tokens takes 43 s.
SETTINGS: Mapping[str, object] = {"total_request_ms": 60_000, "gpu_timeout_ms": 59_000}
LONG_WAITS = "UPDATE tiers SET max_queue_ms = 60000"
SELL_EVERYTHING = "UPDATE models SET target_utilization = 1.0"


@dataclass(frozen=True)
class Plan:
    """The length of the runs. `rounds`: how often the sides take turns. `settings`: of the stack, by name."""

    seconds: float = 60.0
    rounds: int = 3
    warm_s: float = 8.0
    gateways: int = 2
    clients: Sequence[int] = (64, 256)
    workers: Sequence[int] = (1, 2)
    settings: Mapping[str, object] = field(default_factory=lambda: SETTINGS)

    @property
    def span(self) -> Span:
        """Of one run of a closed loop."""
        return Span(self.warm_s, self.seconds)


QUICK = Plan(seconds=10.0, rounds=1, warm_s=4.0)


@contextmanager
def in_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread beside the block. It must return soon after its event is set, at the end of the block."""
    stopped = threading.Event()
    thread = threading.Thread(target=work, args=(stopped,), name=work.__name__)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


class Side(NamedTuple):
    """One of the compared systems. `cpu` reads the CPU seconds of its processes by role."""

    name: str
    url: str
    key: str
    cpu: Callable[[], Mapping[str, float]] = dict


class Run(NamedTuple):
    """One run: figures that are written as JSON, and what they were computed from."""

    figures: dict[str, Any]
    ran: Ran
    samples: list[Sample]
    answers: list[Answer]


def direct(engine: RunningEngine) -> Side:
    """The engine without anything before it."""
    return Side("direct", engine.api, "")


def through(stack: Stack, tier: str = "paid") -> Side:
    """A stack before the engine, with the demo key of a tier."""
    return Side("tierlane", f"{stack.info.http_url}/v1", stack.info.keys[tier], lambda: _by_role(stack))


def _by_role(stack: Stack) -> Mapping[str, float]:
    return cpu_between([], stack.reading()).by_role


@contextmanager
def stack_before(engine: RunningEngine, plan: Plan, workers: int, *, limited: bool = False) -> Iterator[Stack]:
    """Run a stack before the engine. Without `limited` only the capacity limits what it accepts; with it, shares and
    shedding of the tiers do too.
    """
    backend = f"{engine.backend}#{MODEL}"
    with started(workers=workers, gateways=plan.gateways, backend=backend, **plan.settings) as stack:
        if limited:
            stack.sql(CUSTOMERS_RAISED, SELL_EVERYTHING, LONG_WAITS)
        else:
            stack.sql(RAISED, CUSTOMERS_AS_TIERS, LONG_WAITS)
        yield stack


def run_side(
    side: Side,
    engine: RunningEngine,
    loads: Sequence[Load],
    span: Span,
    *,
    slots: int = PACE.slots,
    wait: bool = True,
) -> Run:
    """Run loads of one side, and wait until the engine is idle again, unless the caller does. Loads without a key get that of
    the side.
    """
    loads = [load if load.key else Load(**{**vars(load), "key": side.key}) for load in loads]
    ran = run_loads(side.url, MODEL, loads, span, lambda: _reading(side, engine))
    answers = (answers_due_in if any(load.rate for load in loads) else answers_ended_in)(ran)
    # Of the whole run: answers of an open loop end after the window.
    samples = engine.history(ran.begin_s - span.warm_s - 1)
    found = latencies(answers) | engine_figures(samples, ran.begin_s, ran.end_s, slots)
    found |= {"unanswered": ran.unanswered, "late_ms": round(ran.late_ms, 1)}
    found |= _cpu(ran, len([answer for answer in ran.answers if ran.begin_s <= answer.last_s < ran.end_s]))
    if wait:
        found["idle_after_s"] = wait_until_idle(engine)
    return Run(found, ran, samples, answers)


class Reading(NamedTuple):
    """Seconds of all processors and of the idle ones, tokens of clients that left, and CPU seconds of the side by role."""

    all_s: float
    idle_s: float
    wasted_tokens: int
    cpu_s: Mapping[str, float]


def _reading(side: Side, engine: RunningEngine) -> Reading:
    times = psutil.cpu_times()
    wasted = engine.state()["totals"]["wasted_tokens"]
    return Reading(sum(times), times.idle + getattr(times, "iowait", 0.0), wasted, side.cpu())


def _cpu(ran: Ran, ended: int) -> dict[str, Any]:
    """Milliseconds of CPU for each request that ended in the window, by role; the share of the machine that was busy;
    tokens/s for clients that left.
    """
    before, after = ran.before, ran.after
    used = {role: seconds - before.cpu_s.get(role, 0.0) for role, seconds in after.cpu_s.items()}
    whole = after.all_s - before.all_s
    return {
        "cpu_ms": {role: round(seconds * 1000 / max(1, ended), 3) for role, seconds in used.items()},
        "machine_busy": round(1 - (after.idle_s - before.idle_s) / whole, 3) if whole else None,
        "wasted_per_s": (after.wasted_tokens - before.wasted_tokens) / (ran.end_s - ran.begin_s),
    }


def wait_until_idle(engine: RunningEngine, limit_s: float = IDLE_S) -> float:
    """Wait until nothing runs in the engine; returns the seconds. Raises RuntimeError."""
    began = time.monotonic()
    while (state := engine.state())["running"] or state["waiting"]:
        if time.monotonic() > began + limit_s:
            raise RuntimeError(
                f"The engine still has {state['running']} sequences, {limit_s:.0f} s after all clients left."
            )
        time.sleep(POLL_S)
    return round(time.monotonic() - began, 2)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the rounds; counts by code are added up."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if name in ("refused", "errors"):
            found[name] = {
                code: sum(run.get(code, 0) for run in values) for code in sorted({c for run in values for c in run})
            }
        elif isinstance(values[0], Mapping):
            found[name] = {role: median(run.get(role, 0.0) for run in values) for role in values[0]}
        else:
            known = [value for value in values if value is not None]
            found[name] = median(known) if known else None
    return found
