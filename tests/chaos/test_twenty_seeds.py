"""Twenty minutes of `tierlane chaos`: a minute for each seed, one after the other, every fault, and nothing may be lost.

With TIERLANE_CHAOS_REPORT, a directory, the figures of all seeds are written there as JSON and as a table in Markdown,
anew after each seed.
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

from tierlane.chaos.series import Summary, markdown, series_document, summary_of

REPOSITORY = Path(__file__).parent.parent.parent
SEEDS = range(1, 21)
ENDS_WITHIN_S = 200
REPORT_VARIABLE = "TIERLANE_CHAOS_REPORT"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(ENDS_WITHIN_S + 20)]

Report = Callable[[Summary], None]


@pytest.fixture(scope="module")
def report() -> Report:
    """Takes the row of one seed, and writes all that there are."""
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
    """Zero lost, unanswered, duplicated, crossed or missing; the output shows every breach with its story."""
    began = time.monotonic()
    ran, found = _run(seed, tmp_path / "result.json")
    wall_s = round(time.monotonic() - began, 1)
    report(summary_of(found, wall_s) if found else Summary(seed, passed=False, error="It did not come to its end."))

    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found["passed"]
    assert found["requests"] > 15_000
    assert {fault["name"] for fault in found["faults"] if not fault["error"]}


def _run(seed: int, result: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What it printed, and what it wrote; nothing where it did not come so far."""
    options = {"seed": seed, "duration": 60, "rate": 300, "faults": "all", "json": result}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERLANE_")}
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
