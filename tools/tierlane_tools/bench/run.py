"""From a checked plan to an exit code: measure, show, write."""

from collections.abc import Callable
from pathlib import Path

import uvloop
from rich.console import Console

from tierlane_tools.bench.command import TOOL
from tierlane_tools.bench.plan import BenchPlan, BenchUsageError, LoadMode, read_address
from tierlane_tools.bench.plots import NoPlots, json_text, require_plots, write_report
from tierlane_tools.bench.report import document, show
from tierlane_tools.bench.resources import read_stack
from tierlane_tools.bench.runner import ProgressDisplay, measure

PASSED, FAILED = 0, 1
MIN_WIDTH = 110


def run(plan: BenchPlan) -> int:
    """Run the plan and report. Raises UsageError or StackError before anything is sent."""
    stack = read_stack(plan.stack)
    url = plan.url or stack.http_url
    address = read_address(url)
    _writable(plan)
    progress = ProgressDisplay(Console(stderr=True), plan.warmup + plan.duration)
    load = f"{plan.rate:g} requests/s" if plan.mode is LoadMode.OPEN else f"{plan.connections} connections"
    progress.say(f"Sending {load} to {url}: {plan.warmup:g} s of warm-up, then {plan.duration:g} s measured.")
    found = uvloop.run(measure(plan, address, stack, progress))
    result = document(plan, url, found)
    # A table that is wider than the terminal is better broken by it than cut by us.
    show(Console(width=max(MIN_WIDTH, Console().width)), result)
    if plan.json:
        plan.json.write_bytes(json_text(result))
    if plan.report:
        write_report(plan.report, result)
    return PASSED if result["passed"] else FAILED


def _writable(plan: BenchPlan) -> None:
    """Raise UsageError now rather than after a long run."""
    if plan.json:
        _tried("json", plan.json, plan.json.touch)
    if plan.report:
        report = plan.report
        _tried("report", report, lambda: report.mkdir(parents=True, exist_ok=True))
        try:
            require_plots()
        except NoPlots as error:
            raise BenchUsageError(f"{TOOL.both_names('report')}: {error}.") from None


def _tried(option: str, path: Path, attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except OSError as error:
        raise BenchUsageError(f"{TOOL.both_names(option)}: cannot write {path}: {error.strerror}.") from None
