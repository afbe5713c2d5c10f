"""Scenarios in which gateways are compared before an engine with continuous batching: loads, and what happens to the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cases.continuous_setup import CAPACITY, PACE, Run
from chat_load.connection import Answer
from chat_load.figures import latencies
from chat_load.generator import Span
from chat_load.plan import Load, mean_tokens

PROMPT_MS = 1000.0
"""An answer whose first token comes later than this is no goodput."""
SLOW_FACTOR, SLOW_S = 4.0, 10.0
FAST_FACTOR = 0.1
OVERHEAD_RATE, OVERHEAD_TOKENS = 300.0, 8


@dataclass(frozen=True)
class Scenario:
    """One scenario. `loads` have the name of a tier or customer.

    `factor` multiplies the time of a step. `slow`: it is also multiplied by SLOW_FACTOR for SLOW_S seconds, from a fifth of the
    window. `kill`: there are two engines, and one is killed at a third of the window. `more_s`: seconds beyond those of others.
    """

    name: str
    title: str
    loads: Sequence[Load]
    factor: float = 1.0
    slow: bool = False
    kill: bool = False
    more_s: float = 0.0

    def span(self, warm_s: float, seconds: float, drain_s: float) -> Span:
        """Its run. A closed loop is not drained."""
        return Span(warm_s, seconds + self.more_s, drain_s if any(load.rate for load in self.loads) else 0.0)


def scenarios(seed: int) -> Sequence[Scenario]:
    """All scenarios; the loads of a seed are the same for each gateway."""
    mixed = _open({"enterprise": 0.1, "paid": 0.2, "free": 0.4}, seed)
    clients = {"enterprise": PACE.slots // 8, "paid": PACE.slots // 4, "free": PACE.slots - PACE.slots * 3 // 8}
    closed = [Load(name, clients=count, stream=True, seed=seed) for name, count in clients.items()]
    overhead = Load("enterprise", rate=OVERHEAD_RATE, stream=True, tokens=OVERHEAD_TOKENS, seed=seed)
    return (
        Scenario("closed", f"Closed loop of {PACE.slots} clients, as many as the engine has slots", closed),
        Scenario("open", "0.7 of the capacity: enterprise 0.1, paid 0.2, free 0.4", mixed),
        Scenario(
            "overload",
            "Free at twice the capacity, beside enterprise 0.1 and paid 0.2",
            _open({"enterprise": 0.1, "paid": 0.2, "free": 2.0}, seed),
        ),
        Scenario(
            "flood",
            "One free customer at three times the capacity, another at 0.2",
            _open({"quiet": 0.2, "noisy": 3.0}, seed),
        ),
        Scenario(
            "slow",
            f"0.7 of the capacity, the engine {SLOW_FACTOR:.0f} times slower for {SLOW_S:.0f} s",
            mixed,
            slow=True,
            more_s=SLOW_S,
        ),
        Scenario(
            "overhead",
            f"{OVERHEAD_RATE:.0f} streams of {OVERHEAD_TOKENS} tokens a second, steps of {PACE.step_ms * FAST_FACTOR:.1f} ms",
            [overhead],
            factor=FAST_FACTOR,
        ),
        Scenario("kill", "0.7 of the capacity of one engine, one of two killed", mixed, kill=True),
    )


def _open(shares: Mapping[str, float], seed: int) -> Sequence[Load]:
    rate = CAPACITY / mean_tokens()
    return [Load(name, rate=share * rate, stream=True, seed=seed) for name, share in shares.items()]


@dataclass(frozen=True)
class Figures:
    """The figures of one run, as they are in the file of raw data.

    `tokens_per_s` are of right answers that ended in the window, `goodput_per_s` of those whose first token came within
    PROMPT_MS. `loads` has the counts of requests that were due in the window (in a closed loop: that ended in it) and the
    milliseconds to their first tokens, by load. `running`: mean sequences of the engine; `cpu_ms`: of a request, all processes of the
    gateway. `late_ms`: the longest delay of a request; `machine_busy`: the part of all processors that was used.
    """

    tokens_per_s: float
    goodput_per_s: float
    unanswered: int
    running: float
    waiting_p99: float
    cpu_ms: float
    late_ms: float
    machine_busy: float | None
    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def figures(run: Run, loads: Sequence[Load]) -> Figures:
    """Sum up a run."""
    ran = run.ran
    seconds = ran.end_s - ran.begin_s
    ended = [answer for answer in ran.answers if answer.ok and ran.begin_s <= answer.last_s < ran.end_s]
    return Figures(
        tokens_per_s=round(_tokens(ended) / seconds, 1),
        goodput_per_s=round(_tokens(answer for answer in ended if answer.first_ms <= PROMPT_MS) / seconds, 1),
        unanswered=ran.unanswered,
        running=round(run.figures["running"], 1),
        waiting_p99=run.figures["waiting_p99"],
        cpu_ms=round(sum(run.figures["cpu_ms"].values()), 2),
        late_ms=run.figures["late_ms"],
        machine_busy=run.figures["machine_busy"],
        loads={load.name: _of_load(run.answers, load) for load in loads},
    )


def _tokens(answers: Any) -> int:
    return sum(answer.chat.tokens for answer in answers)


def _of_load(answers: Sequence[Answer], load: Load) -> dict[str, Any]:
    found = latencies([answer for answer in answers if answer.chat.load.name == load.name])
    times = {name: None if found[name] is None else round(found[name], 1) for name in ("first_p50_ms", "first_p99_ms")}
    return {**times, **{name: found[name] for name in ("answers", "refused", "errors")}}
