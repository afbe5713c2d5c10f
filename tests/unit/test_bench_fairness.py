"""The fairness cases of `make bench`: parts, the law of a quiet request's wait, what is judged, and the plots."""

from pathlib import Path
from typing import Any

import pytest
from cases import fairness, fairness_fleet, fairness_gateways
from cases.customer_load import (
    Answer,
    Load,
    Window,
    answers_due_in,
    answers_in,
    causes,
    failed,
    latencies_of,
    percentile,
    refused,
)
from cases.fairness_plots import draw_kills, draw_parts, draw_quiet, parts_by_second
from cases.outcome import Check
from cases.quiet import residual_p99_ms
from cases.saturated import loads_of, parts, turns_ratio


def missed(checks: list[Check]) -> set[str]:
    return {check.figure.rpartition(": ")[2] for check in checks if check.holds is False}


@pytest.mark.parametrize(
    ("gpu_ms", "weights", "index", "error"),
    [
        ([10.0, 10.0], [1, 1], 1.0, 0.0),
        ([10.0, 20.0, 40.0], [1, 2, 4], 1.0, 0.0),
        ([40.0, 0.0, 0.0, 0.0], [1, 1, 1, 1], 0.25, 3.0),
        ([9.0, 11.0], [1, 1], 0.990, 0.1),
        ([0.0, 0.0], [1, 1], 0.0, 1.0),
    ],
)
def test_parts(gpu_ms: list[float], weights: list[float], index: float, error: float) -> None:
    """Jain's index is 1 for equal parts and 1/n if one of n has everything; the error is that of the worst part."""
    assert parts(gpu_ms, weights) == pytest.approx((index, error), abs=1e-3)


@pytest.mark.parametrize(("workers", "expected"), [(1, 99.0), (8, 43.8), (32, 13.4)])
def test_the_law_of_the_wait(workers: int, expected: float) -> None:
    """With one worker, the p99 is 99 % of a batch; with many, ln(100)/n of it."""
    assert residual_p99_ms(100.0, workers) == pytest.approx(expected, abs=0.05)


def test_answers_of_a_window() -> None:
    """By the time when they came, or were due. Its end does not belong to a window; rejections and failures are no results."""
    answers = [Answer(1.0, 5.0, 200, ""), Answer(1.5, 7.0, 429, "shed"), Answer(1.9, 9.0, 0, "ClientError")]
    load = Load("key", 4, answers=[*answers, Answer(2.0, 6.0, 200, "")])
    found = answers_in([load], Window(1.0, 2.0))

    assert found == answers
    assert answers_due_in([load], Window(1.99, 2.0)) == [Answer(2.0, 6.0, 200, "")]
    assert latencies_of(found) == [5.0]
    assert (refused(found), failed(found)) == (1, 1)
    assert causes(found) == {"429 shed": 1, "0 ClientError": 1}
    assert percentile([1.0], 99) == 0.0


def test_saturated_loads_have_words_in_flight_by_weight() -> None:
    """But for less than one request. Short and long ones alternate; only the first customer has a gateway of its own."""
    loads = loads_of(["a", "b", "c", "d"], [1, 2, 5], 60.0, "gateway-1")

    assert [load.words * load.loops for load in loads] == pytest.approx([5_000, 10_000, 25_000], abs=800)
    assert [load.begin_s for load in loads] == [0.0, 2.0, 4.0]
    assert [load.gateway for load in loads] == ["gateway-1", "", ""]


def test_the_ratio_of_the_orders_is_that_of_each_round() -> None:
    """A machine that becomes slower between rounds changes no ratio."""
    turns = {
        "fair": [{"rps": 100.0}, {"rps": 49.0}, {"rps": 10.0}],
        "arrival": [{"rps": 100.0}, {"rps": 50.0}, {"rps": 10.0}],
    }

    assert turns_ratio(turns, "rps") == 1.0


QUIET = {
    "alone_p99_ms": 100.0,
    "p99_ms": 119.0,
    "law_p99_ms": 120.0,
    "even_ms": 110.0,
    "batch_ms": 100.0,
    "refused": 0,
    "failed": 0,
}
JOBS = {"submitted": {"202": 100}, "requests": 200, "refused": 0, "failed": 0, "waiting": [100, 50], "p50_ms": 1.0}
JOBS |= {"p99_ms": 2.0, "causes": {}, "flood_causes": {"503 shed_for_priority": 40}}
SATURATED = {
    "index": 0.99,
    "error": 0.01,
    "causes": {},
    "failed": 0,
    "served": 10,
    "rps": 500.0,
    "of_gateway": 1.0,
    "busy": 1.0,
}
TURN = {"refused": 5, "failed": 0}


def main_case(name: str = "", **changes: Any) -> dict[str, Any]:
    turns = {"turns": {"fair": [TURN], "arrival": [TURN]}, "rps_ratio": 0.99, "words_ratio": 0.99, "cpu_us_ratio": 1.0}
    data = {
        "quiet": QUIET,
        "many_quiet": QUIET,
        "jobs": JOBS,
        "equal": SATURATED,
        "weights": SATURATED,
        "turns": turns,
        "order_alone": SATURATED,
    }
    data[name] = data.get(name, {}) | changes
    return {**data, "jobs": {"100": data["jobs"]}}


def gateways_case(**changes: Any) -> dict[str, Any]:
    kills = {"kills": [{"role": "redis", "back_s": 0.5, "at_s": 22.0}], "windows": [SATURATED | changes]}
    return {"equal": SATURATED, "weights": SATURATED, "kills": kills}


def fleet_case(**changes: Any) -> dict[str, Any]:
    return {
        "quiet": QUIET,
        "enterprise": {"alone_p99_ms": 100.0, "p99_ms": 109.0, "failed": 0, "waited": 0.0, **changes},
    }


@pytest.mark.parametrize(
    ("case", "data", "expected"),
    [
        (fairness, main_case(), set()),
        (fairness, main_case("quiet", p99_ms=121.0), {"p99 over that"}),
        (fairness, main_case("many_quiet", refused=1), {"requests of quiet customers refused"}),
        (fairness, main_case("jobs", refused=1), {"of 200 requests of 10 customers, refused"}),
        (fairness, main_case("jobs", failed=1), {"of these, failed"}),
        (fairness, main_case("equal", index=0.97), {"Jain index of GPU time"}),
        (fairness, main_case("equal", failed=1), {"requests failed"}),
        (fairness, main_case("order_alone", error=0.031), {"largest error of a part"}),
        (fairness, main_case("weights", error=0.031), {"largest error of a part"}),
        (fairness, main_case("turns", rps_ratio=0.97), {"requests/s"}),
        (fairness_gateways, gateways_case(), set()),
        (fairness_gateways, gateways_case(failed=30), set()),
        (fairness_gateways, gateways_case(index=0.97), {"Jain index of GPU time"}),
        (fairness_fleet, fleet_case(), set()),
        (fairness_fleet, fleet_case(p99_ms=111.0), {"p99 over that"}),
        (fairness_fleet, fleet_case(failed=1), {"refused or failed"}),
    ],
)
def test_each_case_is_judged_by_its_targets(case: Any, data: Any, expected: set[str]) -> None:
    """A bad figure misses its target and no other. Requests that a killed process had accepted may fail."""
    assert missed(case.judge(data)) == expected


def test_parts_by_second() -> None:
    """They sum to 1, but for a second without any GPU time."""
    assert parts_by_second(["10 0 5", "30 0 5"]) == [[0.25, 0.0, 0.5], [0.75, 0.0, 0.5]]


def test_equal_figures_are_equal_plots(tmp_path: Path) -> None:
    """Each plot is an SVG file without the date."""
    data = {
        "equal": {"gpu_ms_by_second": ["10 5", "30 5"]},
        "kills": {"gpu_ms_by_second": ["10 5", "30 5"], "kills": [{"role": "redis", "at_s": 1.0}]},
        "quiet": {"latencies": "0.5:20 1.5:30", "flood_at_s": 1.0, "law_p99_ms": 65.0},
    }
    for number, draw in enumerate((draw_parts, draw_kills, draw_quiet)):
        path = tmp_path / f"{number}.svg"
        draw(path, data)
        first = path.read_bytes()
        draw(path, data)

        assert first.startswith(b"<?xml")
        assert path.read_bytes() == first
