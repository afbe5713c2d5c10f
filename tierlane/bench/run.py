"""From a checked plan to an exit code: measure, show, write."""

from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from tierlane.bench.conduct import measure
from tierlane.bench.document import Document, document
from tierlane.bench.option_texts import TOOL
from tierlane.bench.plan import Plan, UsageError, read_address
from tierlane.bench.progress import Progress
from tierlane.bench.report import show
from tierlane.bench.stack_info import read_stack

PASSED, FAILED = 0, 1
MIN_WIDTH = 110


def run(plan: Plan) -> int:
    """Run the plan and report. Raises UsageError or StackError before anything is sent."""
    stack = read_stack(plan.stack)
    url = plan.url or stack.http_url
    address = read_address(url)
    if plan.json:
        _writable(plan.json)
    progress = Progress(Console(stderr=True), plan.warmup + plan.duration)
    found = uvloop.run(measure(plan, address, stack, progress))
    result = document(plan, url, found)
    # A table that is wider than the terminal is better broken by it than cut by us.
    show(Console(width=max(MIN_WIDTH, Console().width)), result)
    if plan.json:
        _write(plan.json, result)
    return PASSED if result["passed"] else FAILED


def _writable(path: Path) -> None:
    """Raise UsageError now rather than after a long run."""
    try:
        path.touch()
    except OSError as error:
        raise UsageError(f"{TOOL.both_names('json')}: cannot write {path}: {error.strerror}.") from None


def _write(path: Path, result: Document) -> None:
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    path.write_bytes(text + b"\n")
