"""A case as it is run, stored and printed."""

import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cases.outcome import Outcome
from cases.page import machine
from rich.console import Console
from rich.table import Table

from tierlane_local.up.data_dir import StackError

FAULTS = (StackError, RuntimeError, OSError, KeyError, TypeError, SystemExit, subprocess.SubprocessError)
"""Errors that end a case but not the suite: a stack that does not start, or a missing figure."""

Case = dict[str, Any]


def measured(run: Callable[..., Outcome], *, quick: bool) -> Case:
    """Run one case; returns it as stored in the JSON file."""
    began = time.monotonic()
    about = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "quick": quick}
    try:
        checks, data, notes = run(quick=quick)
    except FAULTS as error:
        return {**about, "checks": [], "data": {}, "notes": [], "error": str(error) or type(error).__name__}
    took_s = round(time.monotonic() - began)
    return {
        **about,
        "checks": [list(check) for check in checks],
        "data": data,
        "notes": notes,
        "error": "",
        "took_s": took_s,
    }


def show(console: Console, name: str, case: Case) -> None:
    """Print one case."""
    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    for column in ("figure", "target", "measured", "holds"):
        table.add_column(column)
    for figure, target, found, holds in case["checks"]:
        mark = "" if holds is None else "[green]yes[/]" if holds else "[red]no[/]"
        table.add_row(figure, target, found, mark)
    console.print(table)
    for line in [*case["notes"], *([case["error"]] if case["error"] else [])]:
        console.print(line, markup=False)
    if "table" in case["data"]:
        console.print(case["data"]["table"], markup=False)


def holds(case: Case) -> bool:
    """Whether the case was measured and met every target."""
    return not case["error"] and all(check[3] is not False for check in case["checks"])
