"""What the suite makes of figures: which targets hold, and the page that it writes."""

from pathlib import Path
from typing import Any

import pytest
from cases import (
    customers,
    depth,
    disk,
    duration,
    idle,
    memory,
    overload,
    peers,
    saturation,
    streams,
    throughput,
    workers,
)
from cases.outcome import Check, at_least, at_most, none_of
from cases.page import TITLES, machine, write_page
from suite import CASES, holds, measured


def verdicts(checks: list[Check]) -> dict[str, bool | None]:
    return {check.figure: check.holds for check in checks}


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
def test_a_bound_belongs_to_what_holds(check: Check, expected: bool | None) -> None:
    """And what was not measured neither holds nor fails."""
    assert check.holds is expected


def found(**changes: Any) -> dict[str, Any]:
    figures = {"rate": 12_000, "p50_ms": 80, "p99_ms": 200, "errors": 0, "rows_off": 0, "echo_us": 50.0}
    return {**figures, "cpu_us": {"gateway": 50.0, "redis": 30.0}, **changes}


def test_throughput_is_judged_by_connections() -> None:
    """10,000 at 1,000 connections and 13,000 at 2,000; the cost is the sum of the roles beside the echo."""
    judged = verdicts(throughput.judge({"1000": found(), "2000": found(p99_ms=900, cpu_us={"gateway": 90.0})}))

    assert judged["1,000 connections: requests/s"] is True
    assert judged["2,000 connections: requests/s"] is False
    assert judged["1,000 connections: CPU over the echo's"] is True
    assert judged["2,000 connections: CPU over the echo's"] is False
    assert judged["2,000 connections: p99"] is None


@pytest.mark.parametrize("change", [{"rate": 9_999}, {"p99_ms": 251}, {"errors": 1}, {"rows_off": 1}])
def test_throughput_fails_by_each_figure(change: dict[str, Any]) -> None:
    """Whatever else is right."""
    assert False in verdicts(throughput.judge({"1000": found(**change)})).values()


def test_on_disk_is_told_by_medians_beside_in_memory() -> None:
    """One slow round does not speak for its kind."""
    slow = found(rate=3_000, cpu_us={"gateway": 200.0, "redis": 100.0}, max_ms=900, rewrites=2)
    in_memory, on_disk = (
        found(max_ms=300, rewrites=0),
        found(cpu_us={"gateway": 50.0, "redis": 40.0}, max_ms=400, rewrites=3),
    )

    told = {c.figure: c.measured for c in disk.judge({"memory": [in_memory] * 3, "disk": [on_disk, slow, on_disk]})}

    assert told["on disk: requests/s"] == "12,000"
    assert told["on disk: p50, p99, at most"] == "80.0, 200, 400 ms"
    assert told["on disk: CPU of a request, all roles"] == "90.0 us (gateway 50.0, redis 40.0)"
    assert told["in memory: Redis' CPU over the gateways'"] == "0.600"
    assert told["on disk: Redis' CPU over the gateways'"] == "0.800"
    assert told["on disk: times that Redis rewrote its file"] == "8"


@pytest.mark.parametrize("change", [{"errors": 1}, {"rows_off": 1}])
def test_on_disk_nothing_is_lost_in_any_round(change: dict[str, Any]) -> None:
    """Where one round lost something, it fails, whatever the others did."""
    well, ill = found(max_ms=300, rewrites=1), found(max_ms=300, rewrites=1, **change)

    assert False not in verdicts(disk.judge({"memory": [well], "disk": [well]})).values()
    assert False in verdicts(disk.judge({"memory": [well] * 3, "disk": [well, well, ill]})).values()


def test_idle_counts_what_is_added_to_the_gpu() -> None:
    """52 ms are 2 ms added."""
    figures = {"median_e2el_ms": 52.0, "p99_e2el_ms": 59.0, "max_e2el_ms": 70.0, "failed": 0}

    assert verdicts(idle.judge(figures)) == {
        "added at p50": True,
        "added at p99": False,
        "added at most": None,
        "errors": True,
    }


def test_saturation_without_an_audit_is_not_measured() -> None:
    """No database, no fill: that is no success."""
    judged = saturation.judge({"batches": None, "request_throughput": 1.0, "failed": 0})

    assert [check.measured for check in judged[:2]] == ["not measured"] * 2


def point(load: float, **changes: Any) -> dict[str, Any]:
    base = {"enterprise_p99_ms": 110.0, "enterprise_p50_ms": 60.0, "enterprise_failed": 0, "goodput": 96.0}
    return {"load": load, **base, "unanswered": 0, "failed_after_acceptance": 0, **changes}


def test_overload_is_judged_at_the_floods() -> None:
    """Points between are for the plot alone."""
    data = {"capacity": 100.0, "nominal": 100.0, "alone_p99_ms": 100.0}
    points = [point(1.0, goodput=1.0), point(3.0), point(10.0, enterprise_p99_ms=130.0, goodput=94.0, unanswered=1)]
    judged = verdicts(overload.judge({**data, "points": points}))

    assert not any(figure.startswith("1 x") for figure in judged)
    assert all(mark is not False for figure, mark in judged.items() if figure.startswith("3 x"))
    assert sum(mark is False for figure, mark in judged.items() if figure.startswith("10 x")) == 3


def test_a_load_that_the_machine_cannot_take_is_doubted() -> None:
    """Where requests waited for a connection, the processors were the bottleneck, and the page says so."""
    found = overload.doubts([point(3.0, waited=0.0), point(10.0, waited=0.3)])

    assert len(found) == 1
    assert found[0].startswith("At 10 x capacity 30 % of the requests")


def test_what_must_not_grow_is_named() -> None:
    """Each by its own base; a role whose memory grew is named."""
    over_time = {"seconds": 600, "early_us": 100.0, "late_us": 109.0, "grown": {"gateway": 0.01, "redis": 0.06}}
    judged = verdicts(
        workers.judge({"200": 115.0, "4": 100.0})
        + customers.judge({"few": 1.0, "many": 1.05, "again": 1.2})
        + duration.judge(over_time)
    )

    assert [figure for figure, mark in judged.items() if mark is False] == [
        "CPU more with 200 workers than with 4",
        "memory of redis grown",
    ]


def test_depth_and_memory() -> None:
    """All roles in one sum; the body does not count."""
    costs = {"100": {"redis": 10.0, "worker": 10.0}, "100000": {"redis": 13.0, "worker": 10.0}}

    assert depth.judge(costs)[0].holds is False
    assert memory.judge({"most": 760.0, "settled": 500.0, "body": 60.0})[0].holds is True


def test_peers_are_judged_where_they_could_be_started() -> None:
    """One that did not start is no rival; without Mosec its cost is not known."""
    ours = {"name": "tierlane", "requests_per_second": 11_000.0, "cpu_us_per_request": 100.0}
    mosec = {"name": "mosec", "requests_per_second": 12_000.0, "cpu_us_per_request": 60.0}
    away = {"name": "ray_serve", "requests_per_second": None, "cpu_us_per_request": None}

    assert [check.holds for check in peers.judge({"rows": [ours, mosec, away]})] == [False, True]
    assert [check.holds for check in peers.judge({"rows": [ours, away]})] == [None]


def test_a_case_that_breaks_is_kept_as_broken() -> None:
    """The suite goes on, and does not pass."""

    def broken(*, quick: bool) -> Any:
        raise RuntimeError("The stack does not start.")

    case = measured(broken, quick=True)

    assert case["error"] == "The stack does not start."
    assert not holds(case)


def test_the_page_shows_every_case_that_is_kept(tmp_path: Path) -> None:
    """A table with targets and marks, a plot for the overload, a foreign table word for word, a fault by its reason."""
    about = {"date": "2026-01-01", "machine": machine(), "quick": False, "notes": ["A note."], "error": ""}
    data = {"capacity": 100.0, "nominal": 100.0, "alone_p99_ms": 100.0, "points": [point(0.5), point(10.0)]}
    kept = {
        "overload": {**about, "checks": [["p99", "<= 1", "2", False], ["rate", "", "3", None]], "data": data},
        "peers": {**about, "checks": [], "data": {"table": "| system |\n|---|"}},
        "idle": {**about, "checks": [], "data": {}, "error": "No stack."},
    }
    write_page(tmp_path / "benchmarks.md", kept)
    page = (tmp_path / "benchmarks.md").read_text()

    assert "| p99 | <= 1 | 2 | **no** |" in page
    assert "| rate |  | 3 |  |" in page
    assert "| system |" in page
    assert "It could not be measured: No stack." in page
    assert "A note." in page
    assert (tmp_path / "images" / "enterprise-p99.png").read_bytes().startswith(b"\x89PNG")
    assert platform_names_absent(page)


def test_cases_of_two_machines_say_so_each(tmp_path: Path) -> None:
    """A page must not give one machine's figures to another."""
    about = {"date": "2026-01-01", "quick": True, "notes": [], "error": "", "checks": [], "data": {}}
    kept = {"idle": {**about, "machine": machine()}, "memory": {**about, "machine": {**machine(), "memory": "1 GiB"}}}
    write_page(tmp_path / "benchmarks.md", kept)
    page = (tmp_path / "benchmarks.md").read_text()

    assert "All of it on one machine" not in page
    assert page.count("2026-01-01, a short run; ") == 2


def platform_names_absent(page: str) -> bool:
    """Nothing that tells which machine it was."""
    import platform  # noqa: PLC0415

    return platform.node() not in page and str(Path.cwd()) not in page


def test_every_case_has_a_title() -> None:
    """The page would leave it out otherwise."""
    assert set(CASES) == set(TITLES)


def streamed(**changes: Any) -> dict[str, Any]:
    calm = {"streams": 1000, "events": 18.0, "p50_ms": 5.0, "p95_ms": 15.0, "not_whole": 0}
    return {"calm": {**calm, **changes}, "cut": dict(calm), "cpu_us": {"gateway": 50.0}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"p95_ms": 20.1}, False), ({"not_whole": 1}, False), ({"p95_ms": None}, True)],
)
def test_streams_are_judged_by_their_first_byte_and_by_what_is_missing(changes: dict[str, Any], expected: bool) -> None:
    """20 ms at p95, and not one answer that differs; what was not measured is no failure, and shows as such."""
    checks = streams.judge(streamed(**changes))

    assert (False not in verdicts(checks).values()) is expected
