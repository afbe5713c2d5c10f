"""Measurements that are scripts of their own: their tables, word for word."""

import subprocess
import sys
import tempfile
from pathlib import Path

from cases.outcome import Check, Outcome, told

BENCH = Path(__file__).resolve().parents[1]
LONGEST_S = 3600.0


def batching(*, quick: bool) -> Outcome:
    """Mean wait and fill by arrivals, adaptive beside a fixed window."""
    more = ["--requests", "20000"] if quick else []
    return _shown("batching", BENCH / "batch_windows.py", more)


def peers(*, quick: bool) -> Outcome:
    """The same job on other systems, in the same run."""
    seconds = ["--seconds", "5" if quick else "30"]
    with tempfile.TemporaryDirectory() as home:
        table = Path(home) / "table.md"
        return _shown("peers", BENCH / "peers" / "run.py", [*seconds, "--markdown", str(table)], table)


def _shown(name: str, script: Path, arguments: list[str], table: Path | None = None) -> Outcome:
    if not script.exists():
        return Outcome([Check(name, "", "not there")], {}, [f"There is no {script.name}."])
    command = [sys.executable, str(script), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    text = table.read_text() if table and table.exists() else "```\n" + ended.stdout.strip() + "\n```"
    if ended.returncode:
        text += f"\n\nIt ended with code {ended.returncode}: {ended.stderr.strip()[-300:]}"
    return Outcome([told(name, "see the table")], {"table": text}, [])
