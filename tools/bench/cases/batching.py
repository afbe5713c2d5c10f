"""Mean wait and fill of adaptive batch windows beside a fixed window, in simulated time."""

import subprocess
import sys
from pathlib import Path

from cases.outcome import Outcome

SCRIPT = Path(__file__).resolve().parents[1] / "batch_windows.py"
LIMIT_S = 3600.0


def run(*, quick: bool) -> Outcome:
    """The table of the script."""
    command = [sys.executable, str(SCRIPT), *(["--requests", "20000"] if quick else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip()[-500:])
    return Outcome([], {"table": f"```text\n{ended.stdout.rstrip()}\n```"}, [])
