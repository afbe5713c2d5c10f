"""From a checked plan to an exit code: measure, show, write."""

from dataclasses import replace

import msgspec
import uvloop
from rich.console import Console

from tierlane_local.stack_file import read_stack
from tierlane_tools.bench.command import TOOL
from tierlane_tools.bench.plan.plan import BenchPlan, BenchUsageError, LoadMode, read_address
from tierlane_tools.bench.report.document import document
from tierlane_tools.bench.report.tables import show
from tierlane_tools.bench.runner import ProgressDisplay, measure
from tierlane_tools.traces.replay import TraceReplay

PASSED, FAILED = 0, 1
MIN_WIDTH = 110


def run(plan: BenchPlan) -> int:
    """Run the plan and report. Raises UsageError or StackError before anything is sent."""
    stack = read_stack(plan.stack)
    url = plan.url or stack.http_url
    address = read_address(url, plan.trace_api.path) if plan.trace else read_address(url)
    if plan.json:
        try:
            plan.json.touch()  # An error is reported now rather than after a long run.
        except OSError as error:
            raise BenchUsageError(f"{TOOL.both_names('json')}: cannot write {plan.json}: {error.strerror}.") from None
    plan = with_trace(plan)
    progress = ProgressDisplay(Console(stderr=True), plan.warmup + plan.duration)
    load = f"{plan.rate:g} requests/s" if plan.mode is LoadMode.OPEN else f"{plan.connections} connections"
    progress.say(f"Sending {load} to {url}: {plan.warmup:g} s of warm-up, then {plan.duration:g} s measured.")
    found = uvloop.run(measure(plan, address, stack, progress))
    result = document(plan, url, found)
    # A table that is wider than the terminal is better broken by it than cut by us.
    show(Console(width=max(MIN_WIDTH, Console().width)), result)
    if plan.json:
        plan.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return PASSED if result["passed"] else FAILED


def with_trace(plan: BenchPlan) -> BenchPlan:
    """The plan with the requests of its trace, which decide its rate and, if none was given, its duration.

    Raises TraceError, or BenchUsageError for a trace that ends with the warm-up.
    """
    if plan.trace is None:
        return plan
    replay = TraceReplay(plan.trace)
    requests = replay.sorted_requests()
    left_s = replay.ends_s - plan.warmup
    if left_s <= 0:
        raise BenchUsageError(f"{TOOL.both_names('warmup')}: must be less than the {replay.ends_s:g} s of the trace.")
    duration = left_s if plan.measures_all else min(plan.duration, left_s)
    rate = round(len(requests) / replay.ends_s, 6)
    return replace(plan, requests=requests, notes=replay.notes, duration=duration, rate=rate)
