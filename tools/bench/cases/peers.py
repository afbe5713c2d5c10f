"""The same job on other systems, measured by tools/bench/peers/run.py."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases.outcome import Check, Outcome, at_least, at_most, over

SCRIPT = Path(__file__).resolve().parents[1] / "peers" / "run.py"
LIMIT_S = 3600.0
OURS, FRUGAL = "tierlane", "mosec"
MOST_OVER_MOSEC = 2.0


def run(*, quick: bool) -> Outcome:
    """Run the script."""
    with tempfile.TemporaryDirectory() as home:
        table, figures = Path(home) / "table.md", Path(home) / "figures.json"
        command = [sys.executable, str(SCRIPT), "--seconds", "5" if quick else "30"]
        command += ["--markdown", str(table), "--json", str(figures)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if not figures.exists():
            raise RuntimeError((ended.stderr or ended.stdout).strip()[-500:])
        data = {**json.loads(figures.read_text("utf-8")), "table": table.read_text("utf-8").strip()}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare requests/s with each peer that could be started, and the cost with that of the most efficient one."""
    rows = {row["name"]: row for row in data["rows"]}
    rates = {name: row.get("requests_per_second") for name, row in rows.items()}
    ours = rates.get(OURS)
    checks = [
        at_least(f"requests/s beside {name}'s {rate:,.0f}", ours, rate)
        for name, rate in rates.items()
        if name != OURS and rate
    ]
    costs = [rows.get(name, {}).get("cpu_us_per_request") for name in (OURS, FRUGAL)]
    return [*checks, at_most(f"CPU of a request over {FRUGAL}'s", over(*costs), MOST_OVER_MOSEC, " x", 2)]
