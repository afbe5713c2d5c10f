"""The page of `make peers`: what its tables show for given runs, and that it is that of its data."""

import json
from typing import Any

import pytest
from cases.continuous_setup import Run
from cases.peer_page import DATA, PAGE, render, summary, table, worse
from cases.peer_scenarios import figures, scenarios
from chat_load.connection import Answer
from chat_load.generator import Ran
from chat_load.plan import Chat, Load, request_bytes

OPEN = {"name": "open", "title": "Open loop"}
LOAD = Load("paid", rate=1.0, stream=True)


def run(gateway: str, **changes: Any) -> dict[str, Any]:
    """One run in the scenario `open`, as it is in the file."""
    load = {"answers": 98, "refused": {"429 full": 1}, "errors": {"500 unknown": 1}}
    load |= {"first_p50_ms": 40.0, "first_p99_ms": 90.0} | changes.pop("load", {})
    found = {"tokens_per_s": 2000.0, "goodput_per_s": 1900.0, "unanswered": 3, "cpu_ms": 2.0, "idle_after_s": 0.1}
    return {"scenario": "open", "round": 0, "gateway": gateway, **found, **changes, "loads": {"paid": load}}


def document(*runs: dict[str, Any], failed: str = "") -> dict[str, Any]:
    names = ("direct", "tierlane", "other")
    gateways = [
        {"name": name, "title": name, "setup": "", "cannot": "", "failed": failed * (name == "other")} for name in names
    ]
    return {"gateways": gateways, "scenarios": [OPEN], "runs": list(runs)}


def rows(found: dict[str, Any]) -> list[list[str]]:
    lines = table(found, "open", summary(found, "open")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_compares_with_no_gateway() -> None:
    """Medians over the rounds as parts of direct's tokens/s, counts added up."""
    halves = [run("other", tokens_per_s=rate, goodput_per_s=rate / 2) for rate in (900.0, 1000.0, 1100.0)]
    _, _, other = rows(document(run("direct"), run("tierlane"), *halves))
    assert other == ["other", "0.50", "0.25", "1.0%", "3 x 500 unknown", "9", "40, 90 ms"]


def test_a_gateway_without_figures_has_a_row_with_the_reason() -> None:
    """Not installed, or failed in its runs."""
    assert rows(document(run("direct"), run("tierlane"), failed="cannot be installed"))[2][1] == "cannot be installed"
    broken = {"scenario": "open", "round": 0, "gateway": "other", "failed": "not idle"}
    assert rows(document(run("direct"), run("tierlane"), broken))[2][1] == "not idle"


def test_a_gateway_that_keeps_the_engine_busy_is_named() -> None:
    """It was started again before the next run."""
    assert "started again" in rows(document(run("direct"), run("tierlane"), run("other", idle_after_s=None)))[2][5]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"load": {"first_p99_ms": 50.0}}, ["* Open loop; paid, first token p99: 90.0 ms, other 50.0 ms"]),
        ({"load": {"first_p99_ms": 50.0}, "goodput_per_s": 1000.0}, []),
        ({"load": {"first_p99_ms": None}}, []),
        ({"tokens_per_s": 2100.0}, ["* Open loop; tokens/s: 2,000, other 2,100"]),
    ],
)
def test_worse_figures_are_listed(changes: dict[str, Any], expected: list[str]) -> None:
    """Those of gateways that deliver about as much, beyond the limits."""
    found = document(run("direct"), run("tierlane"), run("other", **changes))
    assert list(worse(found, OPEN, summary(found, "open"))) == expected


def answer(due_s: float, first_s: float, last_s: float, code: str = "", status: int = 200) -> Answer:
    return Answer(Chat(LOAD, (0, 0), "prompt", 10), due_s, first_s, last_s, status, code)


def test_goodput_has_answers_whose_first_token_came_in_time() -> None:
    """Tokens of right answers that ended in the window; counts of those that were due in it."""
    answers = [answer(0.5, 0.6, 1.0), answer(1.0, 2.5, 3.0), answer(2.0, 2.1, 9.0), answer(3.0, 3.0, 3.1, "full", 429)]
    ran = Ran(answers=answers, begin_s=0.0, end_s=5.0)
    found = figures(
        Run({"running": 1.0, "waiting_p99": 0, "cpu_ms": {}, "late_ms": 0.0, "machine_busy": 0.5}, ran, [], answers),
        [LOAD],
    )
    assert (found.tokens_per_s, found.goodput_per_s) == (4.0, 2.0)
    assert (found.loads["paid"]["answers"], found.loads["paid"]["refused"]) == (3, {"429 full": 1})


def test_loads_are_the_same_for_each_gateway() -> None:
    """Each scenario has loads, and a header of one gateway is part of the request."""
    assert scenarios(1) == scenarios(1) != scenarios(2)
    assert all(scenario.loads for scenario in scenarios(1))
    chat = Chat(Load(headers="x-class: bulk\r\n"), (0, 0), "prompt", 10)
    assert b"\r\nx-class: bulk\r\n" in request_bytes(chat, "host", "model")


def test_the_page_is_that_of_its_data() -> None:
    """`make peers` wrote docs/peers.md from the raw data and the template."""
    assert PAGE.read_text("utf-8") == render(json.loads(DATA.read_text("utf-8")))
