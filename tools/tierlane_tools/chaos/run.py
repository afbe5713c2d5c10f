"""One run from checked options to a result: home directory, stack, scenario, checker.

The home is a temporary directory that is removed afterwards, or one that the user has named. The orphan guard kills all
started processes when this process ends. The report has the versions of Tierlane, of Python and of the servers.
"""

import asyncio
import os
import platform
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import asyncpg
import msgspec
import uvloop
from rich.console import Console

from ledger.postgres import asyncpg_dsn
from scheduler.redis_client.connections import bounded, command_client
from tierlane.settings.declaration import PREFIX
from tierlane_local.up.data_dir import DataDir, LogLines
from tierlane_local.up.orphan_guard import MARK_VARIABLE, REMOVABLE_PREFIX, OrphanGuard
from tierlane_tools.chaos import report
from tierlane_tools.chaos.checker import checker, evidence
from tierlane_tools.chaos.checker.case import InvariantResults
from tierlane_tools.chaos.checker.evidence import Evidence, FileCount
from tierlane_tools.chaos.command import TOOL, ChaosUsageError, Options
from tierlane_tools.chaos.external_stack import ExternalStack
from tierlane_tools.chaos.faults.catalogue import FaultTarget
from tierlane_tools.chaos.faults.target import StackTargets
from tierlane_tools.chaos.history import History, RunInfo, Sources, Target
from tierlane_tools.chaos.scenario import RunDisplay, Scenario, UnfinishedWork, timed
from tierlane_tools.chaos.stack import ChaosStack

LOG = "roles.log"
DATABASE = "postgres"


@dataclass(frozen=True)
class Home:
    """The directory, the guard over it, and the log of all roles."""

    data_dir: DataDir
    guard: OrphanGuard
    lines: LogLines

    @property
    def path(self) -> Path:
        """The directory."""
        return self.data_dir.path


@contextmanager
def home(keep: Path | None) -> Iterator[Home]:
    """Create the directory; afterwards it is removed, or with --keep only its database. Raises ChaosUsageError."""
    _unset_settings()
    data_dir = DataDir(_created(keep) if keep else _temporary())
    os.environ[MARK_VARIABLE] = secrets.token_hex(16)  # Inherited by every process that is started from now on.
    guard = OrphanGuard(data_dir)
    if not keep:
        guard.remove_at_end(data_dir.path)
    try:
        with (data_dir.path / LOG).open("ab", buffering=0) as log:
            yield Home(data_dir, guard, LogLines(log, coloured=False))
    finally:
        guard.release()
        data_dir.release()
        shutil.rmtree(data_dir.path / DATABASE if keep else data_dir.path, ignore_errors=True)


def _unset_settings() -> None:
    """Remove the settings of another stack from the environment."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]


def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix=REMOVABLE_PREFIX))
    _make_traversable(path)
    return path


def _created(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise ChaosUsageError(f"{TOOL.both_names('keep')}: {path} exists already; name a new directory.") from None
    except OSError as error:
        raise ChaosUsageError(f"{TOOL.both_names('keep')}: cannot make {path}: {error.strerror}.") from None
    _make_traversable(path)
    return path


def _make_traversable(path: Path) -> None:
    if os.geteuid() == 0:
        path.chmod(0o711)  # PostgreSQL runs as another user then, who must traverse the directory.


PATIENCE_S = 2.0


async def versions(redis_url: str, database_url: str) -> dict[str, str]:
    """Versions by name. Raises RedisUnavailable and errors of asyncpg."""
    return {
        "tierlane": version("tierlane"),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        **await _redis(redis_url),
        "postgresql": await _postgres(database_url),
    }


async def _redis(url: str) -> dict[str, str]:
    client = command_client(url)
    try:
        async with bounded(PATIENCE_S):
            info = await client.info("server")
    finally:
        await client.aclose()
    if "valkey_version" in info:
        return {"valkey": str(info["valkey_version"])}
    return {"redis": str(info["redis_version"])}


async def _postgres(url: str) -> str:
    connection = await asyncpg.connect(asyncpg_dsn(url), timeout=PATIENCE_S)
    try:
        return str(await connection.fetchval("SHOW server_version")).partition(" ")[0]
    finally:
        await connection.close(timeout=PATIENCE_S)


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
    display = RunDisplay(Console(), quiet=options.quiet)
    if options.against:
        return uvloop.run(_run_on_external_stack(options, options.against, display))
    return uvloop.run(_run_on_own_stack(options, display))


async def _run_on_external_stack(options: Options, file: Path, display: RunDisplay) -> RunResult:
    stack = ExternalStack(file)
    display.show(f"seed {options.seed}: against {file}")
    setup = RunSetup(stack, await stack.target(), stack.sources(time.time()), (), lambda: None)
    return await _run_scenario(options, setup, History(), display)


async def _run_on_own_stack(options: Options, display: RunDisplay) -> RunResult:
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
    files = evidence.compared(before, await _open_files(setup.targets))
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
    return asyncio.run(evidence.collect(setup.sources, setup.target.customers, files, unfinished))


def write(path: Path, value: object) -> None:
    """Write it as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


async def _open_files(targets: StackTargets) -> evidence.Files:
    """The open files of all roles."""

    def read() -> evidence.Files:
        processes = [(place, index) for place in ROLES for index in range(targets.counts.get(place, 0))]
        return evidence.open_files(
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
