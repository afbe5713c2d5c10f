"""Other gateways before the same engine with continuous batching, measured by tools/bench/peers/gateways.py."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases.continuous_closed import by_role, ratios
from cases.continuous_setup import QUICK, Plan
from cases.outcome import Check, Outcome, figure

SCRIPT = Path(__file__).resolve().parents[1] / "peers" / "gateways.py"
LIMIT_S = 7200.0


def run(*, quick: bool, plan: Plan | None = None) -> Outcome:
    """Run the script."""
    plan = plan or (QUICK if quick else Plan())
    with tempfile.TemporaryDirectory() as home:
        markdown, figures = Path(home) / "table.md", Path(home) / "figures.json"
        command = [sys.executable, str(SCRIPT), "--json", str(figures), "--markdown", str(markdown)]
        command += ["--seconds", str(plan.seconds), "--rounds", str(plan.rounds), "--warm-seconds", str(plan.warm_s)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if not markdown.exists():
            raise RuntimeError((ended.stderr or ended.stdout).strip()[-500:])
        rows = json.loads(figures.read_text("utf-8"))["rows"]
        data = {"rows": rows, "table": markdown.read_text("utf-8").strip()}
    return Outcome([check for row in rows for check in _checks(row)], data, [])


def _checks(row: dict[str, Any]) -> list[Check]:
    if "failed" in row:
        return [figure(row["title"], f"not measured: {row['failed']}")]
    checks = []
    for point in row["points"]:
        found, tokens = point[row["name"]], ratios(point, row["name"])["tokens"]
        label = f"{row['title']}: {point['clients']} {'streams' if point['stream'] else 'chats'}"
        checks.append(figure(label, f"{tokens or 0:.3f} x of direct, {by_role(found['cpu_ms'])} ms"))
    return checks
