"""Mean wait and fill by arrivals, adaptive windows beside a fixed one: simulated, so that a machine cannot blur it."""

import subprocess
import sys
from pathlib import Path

from cases.outcome import Outcome
from cases.scripts import LONGEST_S, missing

SCRIPT = Path(__file__).resolve().parents[1] / "batch_windows.py"


def run(*, quick: bool) -> Outcome:
    """Its table, word for word."""
    if not SCRIPT.exists():
        return missing(SCRIPT)
    command = [sys.executable, str(SCRIPT), *(["--requests", "20000"] if quick else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip()[-500:])
    return Outcome([], {"table": f"```\n{ended.stdout.rstrip()}\n```"}, [])
