"""Scenarios: how documents are merged, and what an invalid field is answered with."""

from pathlib import Path
from typing import Any

import pytest

from tierlane_tools.simulate.command import run_scenario
from tierlane_tools.simulate.events import Arrival
from tierlane_tools.simulate.recorded import RecordedTraffic
from tierlane_tools.simulate.scenario import (
    DEFAULTS,
    Costs,
    ScenarioError,
    merged,
    read_document,
    scenario_from,
    with_settings,
)

SMALL: dict[str, Any] = {"customers": {"acme": {"tier": "free", "rate": 5}}}
PART = "simulate a part: divide gpus, cells.count, and the rate or count of each class by the same factor"


def complete(**fields: Any) -> dict[str, Any]:
    return merged(merged(DEFAULTS, SMALL), fields)


def test_defaults_are_the_tiers_of_a_new_installation() -> None:
    """A scenario needs customers only."""
    scenario = scenario_from(complete())

    assert [(row.name, row.priority, row.guaranteed_share) for row in scenario.tier_rows()] == [
        ("enterprise", 1, 0.05),
        ("paid", 2, 0.25),
        ("free", 3, 0.1),
    ]
    assert scenario.tiers["free"].limits == {"requests_per_second": 200, "burst": 200, "max_concurrency": 100}


def test_one_field_can_be_changed() -> None:
    """`--set` changes a field, adds an entry, or removes one with null."""
    changes = ["tiers.free.limits.burst=7", "tiers.paid=null", "gpus=3", "customers.flood={tier: free, rate: 100}"]
    scenario = scenario_from(with_settings(complete(), changes))

    assert scenario.tiers["free"].limits["burst"] == 7
    assert scenario.tiers["free"].limits["requests_per_second"] == 200
    assert list(scenario.tiers) == ["enterprise", "free"]
    assert (scenario.gpus, list(scenario.customers)) == (3, ["acme", "flood"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gpu": 3}, "the scenario: object contains unknown field `gpu`; see docs/simulate.md."),
        ({"mode": "flows"}, f"mode: the aggregated mode was removed; remove this field. If the system is large, {PART}."),
        ({"step_s": 0.2}, f"step_s: the aggregated mode was removed; remove this field. If the system is large, {PART}."),
        ({"gpus": 0}, "gpus: expected `int` >= 1; see docs/simulate.md."),
        ({"gpus": "many"}, "gpus: expected `int`, got `str`; see docs/simulate.md."),
        ({"tiers": {"free": {"guaranteed_share": 2}}}, "tiers.*.guaranteed_share: expected `float` <= 1.0; see docs/simulate.md."),
        (
            {"tiers": {"free": {"limits": {"rps": 5}}}},
            "tiers.free.limits.rps: is no limit; use requests_per_second, burst, max_concurrency, tokens_per_minute.",
        ),
        ({"tiers": {"free": {"limits": {"burst": 0}}}}, "tiers.free.limits.burst: must be above 0, or null, got 0.0."),
        (
            {"tiers": {"free": {"limits": {"burst": None}}}},
            "tiers.free.limits.burst: is missing; every tier needs it.",
        ),
        (
            {"tiers": {"free": {"priority": 1}}},
            "tiers: two tiers have the same priority; give each another one, 1 is served first.",
        ),
        (
            {"tiers": {"free": {"guaranteed_share": 0.9}}},
            "tiers: the guaranteed shares sum to more than 1; reduce guaranteed_share of a tier.",
        ),
        (
            {"customers": {"acme": {"tier": "gold"}}},
            "customers.acme.tier: there is no tier 'gold'; use one of enterprise, paid, free.",
        ),
        (
            {"customers": {"acme": {"cells": ["cell-9"]}}},
            "customers.acme.cells: there is no cell 'cell-9'; cells.count makes cell-1 to cell-1.",
        ),
        ({"changes": [{"at_s": 3}]}, "changes[0]: changes nothing; give gpus, slower, killed, or cell and state."),
        (
            {"changes": [{"at_s": 3, "killed": 1}]},
            "changes[0].killed: only engines with slots are killed; set costs.slots, or change gpus.",
        ),
        ({"customers": {"acme": {"users": -1}}}, "customers.*.users: expected `int` >= 0; see docs/simulate.md."),
    ],
)  # fmt: skip
def test_an_invalid_field_is_named(fields: dict[str, Any], sentence: str) -> None:
    """With what is wrong and what is accepted."""
    with pytest.raises(ScenarioError) as error:
        scenario_from(complete(**fields))

    assert str(error.value) == sentence


def test_without_customers_there_is_nothing_to_simulate() -> None:
    """Recorded requests would do, too."""
    with pytest.raises(ScenarioError, match="customers: there is no class; add one with tier and rate"):
        scenario_from(DEFAULTS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpus", "--set: must be FIELD=VALUE, such as model.max_batch_size=16, got 'gpus'."),
        ("gpus=[1", "--set gpus: the value must be YAML, got '[1'."),
    ],
)
def test_an_invalid_change_is_named(text: str, sentence: str) -> None:
    """So that it can be corrected on the command line."""
    with pytest.raises(ScenarioError) as error:
        with_settings({}, [text])

    assert str(error.value) == sentence


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing one, one that is not YAML, and one that is no mapping."""
    (tmp_path / "broken.yaml").write_text("gpus: [1", "utf-8")
    (tmp_path / "list.yaml").write_text("[1, 2]", "utf-8")

    for name, reason in (
        ("none.yaml", "No such file"),
        ("broken.yaml", "is not valid YAML"),
        ("list.yaml", "must be a mapping"),
    ):
        with pytest.raises(ScenarioError, match=reason):
            read_document(tmp_path / name)


@pytest.mark.parametrize(
    ("costs", "size", "words", "ms"),
    [
        (Costs(batch_ms=50), 8, 80, 50.0),
        (Costs(batch_ms=50, request_ms=2, word_ms=0.5), 8, 80, 106.0),
        (Costs(sizes={1: 20, 8: 34, 16: 66}), 1, 10, 20.0),
        (Costs(sizes={1: 20, 8: 34, 16: 66}), 4.5, 10, 27.0),
        (Costs(sizes={1: 20, 8: 34, 16: 66}), 12, 10, 50.0),
        (Costs(sizes={1: 20, 8: 34, 16: 66}), 32, 10, 130.0),  # as the last line goes on
        (Costs(sizes={8: 34}), 32, 10, 34.0),
    ],
)
def test_the_time_of_a_batch(costs: Costs, size: float, words: float, ms: float) -> None:
    """By its size and its words, or between measured sizes."""
    assert costs.run_ms(size, words) == pytest.approx(ms)


def test_the_number_of_requests() -> None:
    """Rates in steps, each until the next one or the end."""
    scenario = scenario_from(
        complete(customers={"acme": {"count": 3, "rate": [[0, 10], [20, 2]]}}, duration_s=25, warmup_s=5)
    )

    assert scenario.offered() == 3 * (10 * 20 + 2 * 10)


def test_too_many_requests_are_rejected() -> None:
    """At once, with the advice to simulate a part of the system."""
    scenario = scenario_from(complete(customers={"acme": {"count": 1000, "rate": 1000}}, duration_s=25, warmup_s=5))

    with pytest.raises(ScenarioError) as error:
        run_scenario(scenario, [Arrival(1.0, 0, 10.0)], RecordedTraffic())

    assert str(error.value) == (
        f"the scenario: has 30,000,001 requests, and at most 20,000,000 can be simulated; reduce duration_s, or {PART}."
    )
