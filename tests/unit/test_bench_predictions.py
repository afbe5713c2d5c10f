"""`make predictions`: scenario files that are those of `make peers`, the figures of both sides, and the table."""

import json
from typing import Any

import pytest
from cases.continuous_setup import PACE, Run
from cases.peer_scenarios import Scenario, scenarios
from cases.prediction_page import DATA, PAGE, misses, section, updated
from cases.predictions import STARTS_S, measured, predict, scenario_of
from chat_load.connection import Answer
from chat_load.generator import Ran, Span
from chat_load.plan import Chat, Load, arrivals

from tierlane_tools.simulate.scenario import DEFAULTS, merged, read_document, scenario_from

SHORT = Span(2.0, 6.0, 5.0)
ALL = {each.name: each for each in scenarios(1) if each.name != "overhead"}


@pytest.mark.parametrize("scenario", ALL.values(), ids=ALL)
def test_a_file_has_the_engine_and_the_loads_of_its_scenario(scenario: Scenario) -> None:
    """So that the command of its own, `tierlane simulate FILE`, shows the same as the table."""
    file = scenario_of(scenario, SHORT, 1.0)
    whole = scenario_from(merged(DEFAULTS, read_document(scenario_file(scenario.name))))
    costs = file.costs

    assert (costs.step_ms, costs.step_item_ms, costs.slots) == (PACE.step_ms, PACE.sequence_ms, PACE.slots)
    assert file.gpus == 1 + scenario.kill
    assert set(whole.customers) == {"first", *(load.name for load in scenario.loads)}
    for load in scenario.loads:
        each = whole.customers[load.name]
        assert each.steps[-1][1] == pytest.approx(load.rate, rel=0.001)
        assert each.user_steps[-1][1] == load.clients
        assert (each.steps[-1][0] if load.rate else each.user_steps[-1][0]) == STARTS_S
    assert [change.slower for change in file.changes] == ([4.0, 1.0] if scenario.slow else [None] * scenario.kill)


def scenario_file(name: str) -> Any:
    return DATA.parent / f"{name}.yaml"


def test_predictions_are_of_the_requests_that_are_sent() -> None:
    """All of the window, and the same for the same seed."""
    found = predict(ALL["open"], SHORT, 4.0)

    assert found == predict(ALL["open"], SHORT, 4.0)
    assert found != predict(ALL["open"], SHORT, 8.0)
    enterprise = found["enterprise"]
    assert enterprise.requests == sum(at_s >= SHORT.warm_s for at_s in arrivals(ALL["open"].loads[0], 8.0)) > 10
    assert (enterprise.refused, enterprise.failed) == (0.0, 0.0)
    assert enterprise.goodput_per_s == pytest.approx(enterprise.requests / SHORT.seconds, abs=0.01)


def answer(due_s: float, first_s: float, last_s: float, code: str = "", status: int = 200) -> Answer:
    return Answer(Chat(Load("paid", stream=True), (0, 0), "prompt", 10), due_s, first_s, last_s, status, code)


def test_figures_of_a_run() -> None:
    """Parts of all requests of the load, times of right answers, and those in time per second."""
    answers = [
        answer(0, 0.1, 1),
        answer(0, 0.2, 2),
        answer(0, 2, 3),
        answer(0, 0, 0, "full", 503),
        answer(0, 1, 1, "lost"),
    ]
    found = measured(Run({}, Ran(), [], answers), [Load("paid"), Load("free")], 2.0)

    assert found["paid"] == (5, 0.2, 0.2, 1.0, 200.0, 2000.0, 2000.0, 3000.0)
    assert found["free"] == (0, 0.0, 0.0, 0.0, None, None, None, None)


@pytest.mark.parametrize(
    ("kind", "predicted", "ran", "missed"),
    [
        ("p50_ms", 109.0, 100.0, False),
        ("p50_ms", 111.0, 100.0, True),
        ("p50_ms", None, None, False),
        ("p50_ms", None, 100.0, True),
        ("refused", 0.009, 0.0, False),
        ("refused", 0.6, 0.65, False),
        ("refused", 0.5, 0.65, True),
        ("failed", 0.02, 0.0, True),
    ],
)
def test_a_miss_is_more_than_a_tenth(kind: str, predicted: float | None, ran: float | None, missed: bool) -> None:
    """And more than one per cent of the requests, for parts of them."""
    assert misses(kind, predicted, ran) is missed


def test_misses_are_bold_and_counted() -> None:
    """Each cell has the prediction and the run."""
    figures = {"requests": 5, "refused": 0.1, "failed": 0.0, "goodput_per_s": 2.0, "first_p50_ms": 40.0}
    figures |= {"first_p99_ms": 90.0, "p50_ms": 900.0, "p99_ms": 9000.0}
    each = {"title": "Open loop", "machine_busy": 0.5, "predicted": {"paid": figures}}
    each["run"] = {"paid": figures | {"first_p50_ms": 50.0, "p99_ms": 9500.0}}
    machine = {"processor": "one", "memory": "1 GiB", "Python": "3"}
    found = section({"date": "today", "machine": machine, "seconds": 60.0, "cost_ms": 5.0, "scenarios": [each]})

    assert "6 of 7 figures" in found
    assert "| paid, 5 requests | 10.0%; 10.0% |" in found
    assert "| **40 ms; 50 ms** |" in found
    assert "| 9.00 s; 9.50 s |" in found


def test_the_page_is_that_of_its_data() -> None:
    """`make predictions` wrote the tables from the raw data."""
    page = PAGE.read_text("utf-8")
    assert page == updated(page, json.loads(DATA.read_text("utf-8")))
