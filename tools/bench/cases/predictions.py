"""Predictions of `tierlane simulate` for the scenarios of `make peers`, and the same figures of a run."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases.continuous_setup import Run
from cases.peer_scenarios import PROMPT_MS, SLOW_S, Scenario
from chat_load.connection import Answer
from chat_load.figures import percentile
from chat_load.generator import Span
from chat_load.plan import Load, arrivals, chats

from tierlane_tools.simulate.events import Arrival
from tierlane_tools.simulate.recorded import customer_numbers
from tierlane_tools.simulate.results import ClassFigures, LatencyCounts
from tierlane_tools.simulate.run import RequestSimulation
from tierlane_tools.simulate.scenario import DEFAULTS, SimulationScenario, merged, read_document, scenario_from

FOLDER = Path(__file__).resolve().parents[1] / "predictions"
STARTS_S = 10.0
"""When the load begins in the scenario files: after the closed loop from which the capacity is learnt."""
WARM_TOKENS = 190
"""The most of an answer in the closed loop: 4 s, so that all have ended when the load begins. In a run its clients leave then."""
SHARES = (0.5, 0.99)


class LoadFigures(NamedTuple):
    """One customer. `refused` and `failed`: parts of all requests; `goodput_per_s`: responses whose first token came within PROMPT_MS."""

    requests: int
    refused: float
    failed: float
    goodput_per_s: float
    first_p50_ms: float | None
    first_p99_ms: float | None
    p50_ms: float | None
    p99_ms: float | None


def scenario_of(scenario: Scenario, span: Span, cost_ms: float) -> SimulationScenario:
    """The file of a scenario with the times of a run, without the arrivals of open loops. `cost_ms`: beyond queue and engine."""
    document = read_document(FOLDER / f"{scenario.name}.yaml")
    begin_s = STARTS_S + span.warm_s
    times = [begin_s + span.seconds / (3 if scenario.kill else 5)]
    times.append(times[0] + SLOW_S)
    changes = [{**change, "at_s": at_s} for change, at_s in zip(document.get("changes", []), times, strict=False)]
    customers = {load.name: {"rate": 0} for load in scenario.loads if load.rate}
    fields: dict[str, Any] = {
        "warmup_s": begin_s,
        "duration_s": span.seconds,
        "changes": changes,
        "customers": customers,
        # On the way to the engine and back.
        "costs": {"dispatch_ms": cost_ms / 2, "call_ms": cost_ms / 2},
    }
    return scenario_from(merged(merged(DEFAULTS, document), fields))


def predict(scenario: Scenario, span: Span, cost_ms: float) -> dict[str, LoadFigures]:
    """The figures of each load, from the arrivals and lengths that the generator will send."""
    simulated = scenario_of(scenario, span, cost_ms)
    numbers, loads = customer_numbers(simulated), {load.name: load for load in scenario.loads}
    found = [
        Arrival(STARTS_S + at_s, numbers[load.name][0], float(chat.tokens))
        for load in scenario.loads
        if load.rate
        for at_s, chat in zip(arrivals(load, span.warm_s + span.seconds), chats(load, 0), strict=False)
    ]

    def words(customer: str, user: int) -> Iterator[float]:
        load, most = loads.get(customer, Load("warm")), math.inf if customer in loads else WARM_TOKENS
        return (float(min(chat.tokens, most)) for chat in chats(load, user))

    figures = RequestSimulation(simulated, sorted(found), words).run()
    return {name: _predicted(figures.classes[name], span.seconds) for name in loads}


def _predicted(found: ClassFigures, seconds: float) -> LoadFigures:
    count, first = max(1, found.arrivals), found.first_token or LatencyCounts()
    return LoadFigures(
        found.arrivals,
        sum(found.refused.values()) / count,
        sum(found.failed.values()) / count,
        round(first.within(PROMPT_MS) / seconds, 3),
        *first.percentiles(SHARES),
        *found.latency.percentiles(SHARES),
    )


def measured(run: Run, loads: Sequence[Load], seconds: float) -> dict[str, LoadFigures]:
    """The figures of each load of a run."""
    return {
        load.name: _measured([each for each in run.answers if each.chat.load.name == load.name], seconds)
        for load in loads
    }


def _measured(answers: Sequence[Answer], seconds: float) -> LoadFigures:
    right = [answer for answer in answers if answer.ok]
    refused, count = sum(answer.refused for answer in answers), max(1, len(answers))
    times = [
        percentile(values, 100 * share)
        for values in ([answer.first_ms for answer in right], [answer.latency_ms for answer in right])
        for share in SHARES
    ]
    return LoadFigures(
        len(answers),
        refused / count,
        (len(answers) - len(right) - refused) / count,
        round(sum(answer.first_ms <= PROMPT_MS for answer in right) / seconds, 3),
        *(None if each is None else round(each, 1) for each in times),
    )
