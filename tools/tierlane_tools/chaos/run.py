"""One run from checked options to a result: home directory, stack, scenario, checker."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from tierlane_tools.chaos import report
from tierlane_tools.chaos.checker import checker
from tierlane_tools.chaos.checker.collection import collect
from tierlane_tools.chaos.checker.evidence import Evidence
from tierlane_tools.chaos.checker.open_files import FileCount, Files, compared, open_files
from tierlane_tools.chaos.checker.results import InvariantResults
from tierlane_tools.chaos.display import RunDisplay
from tierlane_tools.chaos.drain import UnfinishedWork
from tierlane_tools.chaos.faults.fault_kind import FaultTarget
from tierlane_tools.chaos.faults.target import StackTargets
from tierlane_tools.chaos.history import History, RunInfo, Sources, Target
from tierlane_tools.chaos.home import home
from tierlane_tools.chaos.options import TOOL, ChaosUsageError, Options
from tierlane_tools.chaos.scenario import Scenario, timed
from tierlane_tools.chaos.stack.external import ExternalStack
from tierlane_tools.chaos.stack.stack import ChaosStack
from tierlane_tools.chaos.versions import versions

PASSED, VIOLATED = 0, 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HISTORY = "history.jsonl"
EVIDENCE = "evidence.json"
MIN_WIDTH = 130
ROLES = (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER)


@dataclass(frozen=True)
class RunSetup:
    """A running stack, and the inputs of a run. `stop_now`: the action of a second Ctrl-C; `took_s`: seconds by part."""

    targets: StackTargets
    target: Target
    sources: Sources
    spools: Sequence[Path]
    stop_now: Callable[[], None]
    took_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """The result of one run."""

    info: RunInfo
    verdicts: InvariantResults
    document: report.Document

    def show(self) -> None:
        """Print the table and the violations."""
        # A wide table is wrapped by the terminal rather than cut.
        report.show(Console(width=max(MIN_WIDTH, Console().width)), self.info, self.verdicts)


def run(options: Options) -> int:
    """Run and report; return the exit code. Raises ChaosUsageError, StackError, EmbeddedServerError."""
    if options.json:
        writable(options.json)
    result = run_and_check(options)
    result.show()
    if options.json:
        write(options.json, result.document)
    return PASSED if result.verdicts.hold else VIOLATED


def run_and_check(options: Options) -> RunResult:
    """Run, and check the invariants. Raises ChaosUsageError, StackError, EmbeddedServerError."""
    return uvloop.run(_run_on_stack(options, RunDisplay(Console(), quiet=options.quiet)))


async def _run_on_stack(options: Options, display: RunDisplay) -> RunResult:
    """Run on the external stack of the options, or on a new one."""
    if options.against:
        external = ExternalStack(options.against)
        display.show(f"seed {options.seed}: against {options.against}")
        setup = RunSetup(external, await external.target(), external.sources(time.time()), (), lambda: None)
        return await _run_scenario(options, setup, History(), display)
    with home(options.keep) as place:
        stack = ChaosStack(
            place.data_dir, options.shape, place.guard, place.lines, tls=options.tls_to_redis, engine=options.engine
        )
        try:
            display.show(f"seed {options.seed}: starting {options.stack}")
            took_s: dict[str, float] = {}
            with timed(took_s, "start"):
                await stack.start()
            display.show(f"ready in {took_s['start']:.1f} s")
            setup = RunSetup(stack, stack.target, stack.sources(time.time()), stack.spools, stack.kill, took_s)
            with History(place.path / HISTORY) as history:
                return await _run_scenario(options, setup, history, display)
        finally:
            await stack.stop()


async def _run_scenario(options: Options, setup: RunSetup, history: History, display: RunDisplay) -> RunResult:
    """Run the scenario and check the invariants."""
    shown = await versions(setup.targets.redis_url, setup.targets.database_url)
    display.show(", ".join(f"{name} {version}" for name, version in shown.items()))
    scenario = Scenario(options, setup.targets, setup.target, history, display)
    info = scenario.info
    info.versions, info.took_s = shown, setup.took_s
    before = await _open_files(setup.targets)
    with _signals(scenario.interrupt, setup.stop_now):
        await scenario.run(setup.spools)
    files = compared(before, await _open_files(setup.targets))
    # In a thread, because the event loop carries the connections of the proxies.
    with timed(info.took_s, "evidence"):
        found = await asyncio.to_thread(_collected, setup, files, scenario.left)
    with timed(info.took_s, "check"):
        verdicts = checker.check(history.events, found, info.recoveries)
    if options.keep:
        write(options.keep / EVIDENCE, found)
    return RunResult(info, verdicts, report.document(info, history.events, found, verdicts))


def _collected(setup: RunSetup, files: Sequence[FileCount], left: UnfinishedWork) -> Evidence:
    unfinished = "" if left.nothing else f"Not drained: {left}."
    return asyncio.run(collect(setup.sources, setup.target.customers, files, unfinished))


def write(path: Path, value: object) -> None:
    """Write it as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


async def _open_files(targets: StackTargets) -> Files:
    """The open files of all roles."""

    def read() -> Files:
        processes = [(place, index) for place in ROLES for index in range(targets.counts.get(place, 0))]
        return open_files(
            (targets.name(place, index), process)
            for place, index in processes
            for process in targets.processes(place, index)
        )

    return await asyncio.to_thread(read)


@contextmanager
def _signals(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """The first signal ends the run, which still reports; the next one kills. Only the main thread handles signals."""
    waiting = [first]

    def on_signal() -> None:
        (waiting.pop() if waiting else second)()

    loop = asyncio.get_running_loop()
    handled = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for number in handled:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def writable(path: Path) -> None:
    """Raise ChaosUsageError before the run where the file cannot be written."""
    try:
        path.touch()
    except OSError as error:
        raise ChaosUsageError(f"{TOOL.both_names('json')}: cannot write {path}: {error.strerror}.") from None
