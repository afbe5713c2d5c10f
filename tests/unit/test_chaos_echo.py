"""The model of a chaos stack: what it returns, how long it takes, and what it writes down."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierlane.chaos.echo import BATCH_S, MEAN_S, RUNS_VARIABLE, SLOW_S, seconds_of


def test_one_batch_in_eight_is_slow() -> None:
    """Drawn by the nonce of the first input alone, so that the same batch takes as long when it is run again."""
    batches = [[f"{number:016x}:1.0:x", "0" * 16 + ":1.0:x"] for number in range(80)]
    times = [seconds_of(batch) for batch in batches]
    assert (times.count(SLOW_S), times.count(BATCH_S)) == (10, 70)
    assert sum(times) / len(times) == pytest.approx(MEAN_S)


@pytest.mark.parametrize("inputs", [[], ["warm up"], [""]])
def test_what_is_no_request_of_the_load_is_fast(inputs: list[str]) -> None:
    """A warm-up has no nonce."""
    assert seconds_of(inputs) == BATCH_S


def test_a_run_is_written_down(tmp_path: Path) -> None:
    """One line for each input: when it began, and how long it will take; the output is the input reversed."""
    inputs = ["0000000000000001:1.5:ab", "0000000000000008:2.5:cd"]
    code = f"from tierlane.chaos.echo import Echo; model = Echo(); model.load(); print(*model.predict({inputs!r}))"
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, RUNS_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert ran.stdout.split() == ["ba:5.1:1000000000000000", "dc:5.2:8000000000000000"]
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [(line["nonce"], line["sent"], line["takes"]) for line in lines] == [
        ("0000000000000001", 1.5, BATCH_S),
        ("0000000000000008", 2.5, BATCH_S),
    ]
    assert all(began <= line["began"] <= time.monotonic() - BATCH_S for line in lines)
