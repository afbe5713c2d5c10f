"""`tierlane chaos` with twenty seeds of a minute each and every fault: no invariant may be broken.

Where TIERLANE_CHAOS_REPORT names a directory, the figures of all seeds are written there after each seed, as JSON and as
a Markdown table.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierlane_local.running import bare_environment
from tierlane_tools.chaos.series import Summary, markdown, series_document, summary_of

REPOSITORY = Path(__file__).parent.parent.parent
SEEDS = range(1, 21)
ENDS_WITHIN_S = 200
REPORT_VARIABLE = "TIERLANE_CHAOS_REPORT"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(ENDS_WITHIN_S + 20)]

Report = Callable[[Summary], None]


@pytest.fixture(scope="module")
def report() -> Report:
    """A function that adds the row of a seed, and writes all rows."""
    rows: list[Summary] = []

    def add(row: Summary) -> None:
        rows.append(row)
        if directory := os.environ.get(REPORT_VARIABLE):
            _write(Path(directory), rows)

    return add


def _write(directory: Path, rows: list[Summary]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "twenty-seeds.json").write_text(json.dumps(series_document(SEEDS, rows), indent=2) + "\n")
    (directory / "twenty-seeds.md").write_text(markdown(rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_of_chaos_loses_nothing(tmp_path: Path, seed: int, report: Report) -> None:
    """No request is lost, unanswered, duplicated, crossed or missing; the output shows every violation."""
    began = time.monotonic()
    ran, found = _run(seed, tmp_path / "result.json")
    wall_s = round(time.monotonic() - began, 1)
    report(summary_of(found, wall_s) if found else Summary(seed, passed=False, error="The run did not finish."))

    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found["passed"]
    assert found["requests"] > 15_000
    assert {fault["name"] for fault in found["faults"] if not fault["error"]}


def _run(seed: int, result: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The finished process and its document, empty where none was written."""
    options = {"seed": seed, "duration": 60, "rate": 300, "faults": "all", "json": result}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    clean = bare_environment()
    ran = subprocess.run(
        [sys.executable, "-m", "tierlane", "chaos", *given],
        cwd=REPOSITORY,
        env=clean,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    return ran, json.loads(result.read_text() or "{}") if result.exists() else {}
