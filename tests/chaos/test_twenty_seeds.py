"""Twenty minutes of `tierlane chaos`: a minute for each seed, every fault enabled, and nothing may be lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
SEEDS = range(1, 21)
ENDS_WITHIN_S = 200

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(ENDS_WITHIN_S + 20)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_of_chaos_loses_nothing(tmp_path: Path, seed: int) -> None:
    """Zero lost, unanswered, duplicated, crossed or missing; the output shows every breach with its story."""
    result = tmp_path / "result.json"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERLANE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "tierlane", "chaos", "--seed", str(seed), "--duration", "60", "--json", str(result)],
        cwd=REPOSITORY,
        env=clean,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )

    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(result.read_text())
    assert found["passed"]
    assert found["requests"] > 15_000
    assert {fault["name"] for fault in found["faults"] if not fault["error"]}
