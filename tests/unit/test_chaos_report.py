"""The report of a chaos run: table, document, and the rows of a series."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from chaos_history import RecordedRun
from tierlane_tools.chaos.history import FaultEvent, FaultPhase, Recovery, RunInfo
from tierlane_tools.chaos.report import document, show
from tierlane_tools.chaos.series import Summary, markdown, series_document, summary_of

START = FaultEvent(3.0, "stop-redis", "redis", FaultPhase.START)
NOT_INJECTED = FaultEvent(3.0, "kill-worker", "worker-1", FaultPhase.START, error="It is down already.")
HEAL = FaultEvent(4.0, "stop-redis", "redis", FaultPhase.HEAL)
INFO = RunInfo(
    seed=7,
    duration_s=12.0,
    rate=50.0,
    versions={"tierlane": "1"},
    shape="2 gateways",
    schedule=("   3.0 s  stop-redis redis",),
    events=(START, NOT_INJECTED, HEAL),
    recoveries=(Recovery(HEAL, 1.5), Recovery(HEAL, 4.5), Recovery(HEAL, None)),
    drained_s=2.0,
    notes=("Something [odd].",),
)


def recorded(*, broken: bool) -> RecordedRun:
    """A run with one excused timeout and, where it is `broken`, one crossed answer."""
    run = RecordedRun()
    run.fault("stop-redis", "redis", 3.0, 4.0)
    run.send(2, 2.0)
    run.answer(2, 3.5, 504, "deadline_exceeded")
    run.row(2)
    if broken:
        run.send(1, 1.0)
        run.answer(1, 1.1, owner="f" * 16)
        run.row(1)
    return run


def document_of(run: RecordedRun, info: RunInfo = INFO) -> dict[str, Any]:
    evidence = replace(run.evidence, rows=tuple(run.rows), runs=tuple(run.runs))
    written = document(info, run.events, evidence, run.results())
    return json.loads(json.dumps(written))  # type: ignore[no-any-return]


def shown(run: RecordedRun) -> str:
    output = io.StringIO()
    show(Console(file=output, width=150), INFO, run.results())
    return output.getvalue()


def test_the_table_of_a_run() -> None:
    """A violation is shown with the timeline of its request and the schedule; excused cases are counted."""
    passed, failed = shown(recorded(broken=False)), shown(recorded(broken=True))

    assert "BROKEN" not in passed
    assert INFO.schedule[0] not in passed
    assert INFO.notes[0] in passed
    line = next(line for line in failed.splitlines() if line.startswith("crosstalk"))
    assert line.split()[1:3] == ["1", "BROKEN"]
    assert "try 0: " in failed
    assert INFO.schedule[0] in failed
    assert "1 reported timeout" in next(line for line in failed.splitlines() if line.startswith("mismatch"))


def test_the_document_of_a_run() -> None:
    """The names are stable, and everything can be written as JSON."""
    found = document_of(recorded(broken=True))

    assert (found["passed"], found["seed"], found["requests"], found["tries"]) == (False, 7, 4, 4)
    assert {"status": 504, "code": "deadline_exceeded", "count": 1} in found["answers"]
    assert found["tiers"]["free"]["completed"] == 3
    assert found["tiers"]["free"]["p95_ms"] == pytest.approx(100.0, rel=0.01)
    assert found["audit"]["outcomes"] == [{"status": "completed", "code": "", "count": 4}]
    assert found["faults"][0]["what"] == "start"
    assert found["recoveries"][0] == {"name": "stop-redis", "target": "redis", "seconds": 1.5}
    crosstalk = next(verdict for verdict in found["verdicts"] if verdict["name"] == "crosstalk")
    assert (crosstalk["holds"], crosstalk["count"], len(crosstalk["examples"])) == (False, 1, 1)
    assert crosstalk["examples"][0]["timeline"]


def test_the_row_of_a_run() -> None:
    """It has the counts, allowances, violations and the slowest recovery; an interrupted run has not passed."""
    row = summary_of(document_of(recorded(broken=False)), 75.25)
    assert (row.seed, row.passed, row.sent, row.accepted, row.completed, row.faults) == (7, True, 3, 3, 3, 1)
    assert (row.excused, row.breaches) == ({"reported timeout": 1}, {})
    assert (row.recovery_worst_s, row.not_recovered, row.drained_s, row.wall_s) == (4.5, 1, 2.0, 75.25)
    assert (row.verdicts["lost"], row.verdicts["recovery"]) == ("holds", "not measured")

    broken = summary_of(document_of(recorded(broken=True)))
    assert (broken.passed, broken.breaches, broken.verdicts["crosstalk"]) == (False, {"crosstalk": 1}, "BROKEN 1")
    interrupted = summary_of(document_of(recorded(broken=False), replace(INFO, interrupted=True)))
    assert (interrupted.passed, interrupted.error) == (False, "interrupted")


def test_the_document_of_a_series() -> None:
    """It passes only when every seed has; the Markdown table has a row for each."""
    passed, broken = (summary_of(document_of(recorded(broken=value))) for value in (False, True))
    assert series_document([7], [passed])["passed"]
    assert not series_document([7, 7], [passed, broken])["passed"]
    assert not series_document([7, 8], [passed])["passed"]
    rows = markdown([passed, broken, Summary(9, passed=False, error="cannot start")]).splitlines()
    assert ["passed" in rows[-3], "1 crosstalk" in rows[-2], "cannot start" in rows[-1]] == [True] * 3
