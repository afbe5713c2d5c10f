"""The cases of `make bench`: which targets hold for given figures, and the page that is written."""

import platform
from pathlib import Path
from typing import Any

import pytest
from cases import (
    batch_lane,
    customers,
    depth,
    disk,
    duration,
    idle,
    memory,
    overload,
    peers,
    scaling,
    stream_events,
    streams,
    throughput,
    workers,
)
from cases.outcome import Check, at_least, at_most, none_of
from cases.page import TITLES, machine, write_page
from suite import CASES, holds, measured


def failures(checks: list[Check]) -> set[str]:
    return {check.figure for check in checks if check.holds is False}


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (at_least("x", 95.0, 95), True),
        (at_least("x", 94.9, 95), False),
        (at_most("x", 250.0, 250), True),
        (at_most("x", 250.1, 250), False),
        (at_least("x", None, 1), None),
        (at_most("x", None, 1), None),
        (none_of("x", 0), True),
        (none_of("x", 1), False),
    ],
)
def test_bounds(check: Check, expected: bool | None) -> None:
    """The bound itself holds; a figure that was not measured neither holds nor fails."""
    assert check.holds is expected


def load(**changes: Any) -> dict[str, Any]:
    figures = {"rate": 12_000, "p50_ms": 80, "p99_ms": 200, "max_ms": 300, "errors": 0, "rows_off": 0, "rewrites": 1}
    return {**figures, "echo_us": 50.0, "cpu_us": {"gateway": 50.0, "redis": 30.0}, **changes}


def disk_rounds(**changes: Any) -> dict[str, Any]:
    return {"memory": [load()] * 3, "disk": [load(), load(rate=3_000), load(**changes)]}


def flood(**changes: Any) -> dict[str, Any]:
    point = {"enterprise_p99_ms": 110.0, "enterprise_p50_ms": 60.0, "enterprise_failed": 0, "goodput": 96.0}
    points = [{"load": 1.0, **point, "goodput": 1.0}, {"load": 10.0, **point, **changes}]
    points = [{"unanswered": 0, "failed_after_acceptance": 0, "waited": 0.0, **each} for each in points]
    return {"capacity": 100.0, "nominal": 100.0, "alone_p99_ms": 100.0, "points": points}


def step(direction: str, at_s: float) -> dict[str, Any]:
    return {"direction": direction, "at_s": at_s}


def fleet(workers: tuple[int, ...] = (2, 8, 2), steps: tuple[float, ...] = (5.0, 60.0), **changes: Any) -> Any:
    part = {"scheduled": 1000, "lost": 0, "failed_after": 0, "refused": 20, "enterprise_failed": 0, "p95_ms": 120.0}
    part |= {"accepted": 980, "rows_of_others": 980}
    moves = [step("down" if number % 2 else "up", at) for number, at in enumerate(steps)]
    return {"loads": [part | changes, part], "looks": [{"workers": count} for count in workers], "steps": moves}


def stream(**changes: Any) -> dict[str, Any]:
    calm = {"streams": 1000, "events": 18.0, "p50_ms": 5.0, "p95_ms": 15.0, "not_whole": 0}
    return {"calm": {**calm, **changes}, "cut": calm, "cpu_us": {"gateway": 50.0}}


def events(**changes: Any) -> dict[str, Any]:
    found = {"events": 9000, "events_s": 900.0, "cpu_us": {"gateway": 30.0}, "all_us": {"gateway": 40.0}}
    return found | {"first_ms": 3.0, "p50_ms": 3.0, "p99_ms": 9.0, "broken": 0} | changes


IDLE = {"median_e2el_ms": 52.0, "p99_e2el_ms": 57.0, "max_e2el_ms": 70.0, "failed": 0}
GROWTH = {"seconds": 600, "early_us": 100.0, "late_us": 109.0, "grown": {"gateway": 0.01, "redis": 0.04}}
OURS = {"name": "tierlane", "requests_per_second": 11_000.0, "cpu_us_per_request": 100.0}
MOSEC = {"name": "mosec", "requests_per_second": 10_000.0, "cpu_us_per_request": 60.0}
NOT_STARTED = {"name": "ray_serve", "requests_per_second": None, "cpu_us_per_request": None}


@pytest.mark.parametrize(
    ("case", "good", "bad", "number"),
    [
        (throughput, {"1000": load()}, {"1000": load(rate=9_999)}, 1),
        (throughput, {"1000": load()}, {"1000": load(p99_ms=251)}, 1),
        (throughput, {"1000": load()}, {"1000": load(errors=1)}, 1),
        (throughput, {"1000": load()}, {"1000": load(rows_off=1)}, 1),
        (throughput, {"2000": load(rate=13_000)}, {"2000": load(cpu_us={"gateway": 90.0})}, 2),
        (disk, disk_rounds(), disk_rounds(errors=1), 1),
        (disk, disk_rounds(), disk_rounds(rows_off=1), 1),
        (idle, IDLE, IDLE | {"p99_e2el_ms": 59.0}, 1),
        (overload, flood(), flood(enterprise_p99_ms=130.0, goodput=94.0, unanswered=1), 3),
        (
            depth,
            {"100": {"redis": 20.0}, "100000": {"redis": 21.0}},
            {"100": {"redis": 20.0}, "100000": {"redis": 23.0}},
            1,
        ),
        (memory, {"most": 760.0, "settled": 500.0, "body": 60.0}, {"most": 761.0, "settled": 500.0, "body": 60.0}, 1),
        (customers, {"few": 1.0, "many": 1.05, "again": 1.2}, {"few": 1.0, "many": 1.2, "again": 1.2}, 1),
        (workers, {"4": 100.0, "200": 109.0}, {"4": 100.0, "200": 115.0}, 1),
        (duration, GROWTH, GROWTH | {"grown": {"gateway": 0.01, "redis": 0.06}}, 1),
        (streams, stream(p95_ms=None), stream(p95_ms=20.1), 1),
        (streams, stream(), stream(not_whole=1), 1),
        (stream_events, events(), events(cpu_us={"gateway": 30.0, "worker": 9.0}, first_ms=5.1), 2),
        (stream_events, events(first_ms=None), events(broken=1), 1),
        (scaling, fleet(), fleet(lost=1), 1),
        (scaling, fleet(), fleet(rows_of_others=981), 1),
        (scaling, fleet(), fleet(enterprise_failed=1), 1),
        (scaling, fleet(), fleet(p95_ms=250.1), 1),
        (scaling, fleet(), fleet(workers=(2, 7, 3)), 2),
        (scaling, fleet(), fleet(steps=(5.0, 6.0, 7.0)), 1),
        (peers, {"rows": [OURS, MOSEC, NOT_STARTED]}, {"rows": [OURS, MOSEC | {"requests_per_second": 12_000.0}]}, 1),
    ],
)
def test_a_case_is_judged_by_each_figure(case: Any, good: Any, bad: Any, number: int) -> None:
    """Good figures miss no target; each bad one misses its own, whatever the others are."""
    assert failures(case.judge(good)) == set()
    assert len(failures(case.judge(bad))) == number


def batch_turns(busy: float, p99_ms: float) -> dict[str, Any]:
    without = {"p50_ms": 210.0, "p99_ms": 250.0, "failed": 0, "busy": 90.0, "lines_per_s": 0.0}
    beside = {**without, "p99_ms": p99_ms, "busy": busy, "lines_per_s": 80.0}
    return {"without": without, "beside": beside, "turns": [without, beside]}


def test_a_batch_beside_interactive_requests() -> None:
    """The targets are those of the load at half of the capacity."""
    good, bad = batch_turns(95.0, 262.0), batch_turns(94.0, 270.0)

    assert failures(batch_lane.judge({"half": good, "tenth": bad})) == set()
    assert failures(batch_lane.judge({"half": bad, "tenth": good})) == {
        "half of the capacity: p99 beside a batch over that",
        "half of the capacity: GPUs busy beside a batch",
    }


def test_a_failed_case_is_kept_with_its_error() -> None:
    """The suite continues, and does not pass."""

    def broken(*, quick: bool) -> Any:
        raise RuntimeError("The stack does not start.")

    case = measured(broken, quick=True)

    assert case["error"] == "The stack does not start."
    assert not holds(case)


def test_the_page(tmp_path: Path) -> None:
    """It has every case, the plot of the overload, errors, and the machine where it differs, but not the host's name."""
    about = {"date": "2026-01-01", "machine": machine(), "quick": False, "notes": ["A note."], "error": ""}
    kept = {
        "overload": {
            **about,
            "checks": [["p99", "<= 1", "2", False], ["a: rate", "", "3", None], ["b: rate", "", "4", None]],
            "data": flood(),
        },
        "peers": {**about, "checks": [], "data": {"table": "| system |\n|---|"}},
        "idle": {
            **about,
            "checks": [],
            "data": {},
            "error": "No stack.",
            "machine": {**machine(), "memory": "7777 GiB"},
        },
    }
    write_page(tmp_path / "benchmarks.md", kept)
    page = (tmp_path / "benchmarks.md").read_text()

    assert {"* p99: **2** (<= 1)", "| rate | 3 | 4 |", "| system |", "A note."} <= set(page.splitlines())
    assert "No stack." in page
    assert page.count("7777 GiB") == 1
    assert (tmp_path / "images" / "enterprise-p99.png").read_bytes().startswith(b"\x89PNG")
    assert platform.node() not in page
    assert set(CASES) == set(TITLES)


def test_the_cpu_of_an_event_is_apart_from_requests_and_idle_work() -> None:
    """An event of 20 us, a request of 500 us and 1 % of idle work are told apart."""

    def used(seconds: float, requests: int, tokens: int) -> stream_events.Used:
        us = 1e4 * seconds + 500.0 * requests + 20.0 * requests * tokens
        return stream_events.Used({"gateway": us}, seconds, requests, requests * tokens)

    assert stream_events.per_event(used(5, 0, 0), used(10, 900, 8), used(20, 300, 80)) == {"gateway": 20.0}
