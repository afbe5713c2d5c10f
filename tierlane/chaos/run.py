"""One run from checked options to a result: home directory, stack, scenario, verdict of the checker.

The home is a temporary directory that is gone afterwards, or one that the user has named. The orphan guard kills
whatever is started when this process ends, in whatever way. The report names the versions of Tierlane, of Python and of
the servers.
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
from tierlane.chaos import report
from tierlane.chaos.checker import checker, evidence
from tierlane.chaos.checker.case import InvariantResults
from tierlane.chaos.checker.evidence import Evidence, FileCount
from tierlane.chaos.command import TOOL, ChaosUsageError, Options
from tierlane.chaos.external_stack import ExternalStack
from tierlane.chaos.faults.catalogue import FaultTarget
from tierlane.chaos.faults.target import StackTargets
from tierlane.chaos.history import History, RunInfo, Sources, Target
from tierlane.chaos.scenario import Conducted, Conductor, Screen, UnfinishedWork, timed
from tierlane.chaos.stack import ChaosStack
from tierlane.settings.declaration import PREFIX
from tierlane.up.data_dir import DataDir, LogLines
from tierlane.up.orphan_guard import MARK_VARIABLE, REMOVABLE_PREFIX, OrphanGuard

LOG = "roles.log"
DATABASE = "postgres"


@dataclass(frozen=True)
class Home:
    """The directory, the leash over it, and the log of all roles."""

    data_dir: DataDir
    leash: OrphanGuard
    lines: LogLines

    @property
    def path(self) -> Path:
        """The directory."""
        return self.data_dir.path


@contextmanager
def home(keep: Path | None) -> Iterator[Home]:
    """Make the directory; afterwards it is removed, or at least the database in it. Raises UsageError."""
    _forget_settings()
    data_dir = DataDir(_made(keep) if keep else _temporary())
    os.environ[MARK_VARIABLE] = secrets.token_hex(16)  # Inherited by every process that is started from here on.
    leash = OrphanGuard(data_dir)
    if not keep:
        leash.remove_at_end(data_dir.path)
    try:
        with (data_dir.path / LOG).open("ab", buffering=0) as log:
            yield Home(data_dir, leash, LogLines(log, coloured=False))
    finally:
        leash.release()
        data_dir.release()
        shutil.rmtree(data_dir.path / DATABASE if keep else data_dir.path, ignore_errors=True)


def _forget_settings() -> None:
    """What is set for another stack must not reach this one."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]


def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix=REMOVABLE_PREFIX))
    _let_through(path)
    return path


def _made(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise ChaosUsageError(f"{TOOL.both_names('keep')}: {path} exists already; name a new directory.") from None
    except OSError as error:
        raise ChaosUsageError(f"{TOOL.both_names('keep')}: cannot make {path}: {error.strerror}.") from None
    _let_through(path)
    return path


def _let_through(path: Path) -> None:
    if os.geteuid() == 0:
        path.chmod(0o711)  # PostgreSQL is another user then, who must be able to pass through but not to list.


PATIENCE_S = 2.0


async def versions(redis_url: str, database_url: str) -> dict[str, str]:
    """By name. Raises RedisUnavailable, and what asyncpg raises."""
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


HELD, BREACHED = 0, 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HISTORY = "history.jsonl"
EVIDENCE = "evidence.json"
MIN_WIDTH = 130
ROLES = (FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER)


@dataclass(frozen=True)
class Site:
    """A stack that works, and all that a run on it needs. `stop_now`: what a second Ctrl-C does.

    `took_s`: how long each part of the run took, so far.
    """

    ground: StackTargets
    target: Target
    sources: Sources
    spools: Sequence[Path]
    stop_now: Callable[[], None]
    took_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """What came of one run."""

    info: RunInfo
    verdicts: InvariantResults
    document: report.Document

    def show(self) -> None:
        """Print the table, and the breaches."""
        # A table that is wider than the terminal is better broken by it than cut by us.
        report.show(Console(width=max(MIN_WIDTH, Console().width)), self.info, self.verdicts)


def run(options: Options) -> int:
    """Run and report; return the exit code. Raises UsageError, StackError, EmbeddedServerError."""
    if options.json:
        writable(options.json)
    result = judged(options)
    result.show()
    if options.json:
        write(options.json, result.document)
    return HELD if result.verdicts.hold else BREACHED


def judged(options: Options) -> RunResult:
    """Run, and judge what came of it. Raises UsageError, StackError, EmbeddedServerError."""
    screen = Screen(Console(), quiet=options.quiet)
    if options.against:
        return uvloop.run(_run_outside(options, options.against, screen))
    return uvloop.run(_run_inside(options, screen))


async def _run_outside(options: Options, file: Path, screen: Screen) -> RunResult:
    stack = ExternalStack(file)
    screen.say(f"seed {options.seed}: against {file}")
    site = Site(stack, await stack.target(), stack.sources(time.time()), (), lambda: None)
    return await _judged(options, site, History(), screen)


async def _run_inside(options: Options, screen: Screen) -> RunResult:
    with home(options.keep) as place:
        stack = ChaosStack(place.data_dir, options.shape, place.leash, place.lines, tls=options.tls_to_redis)
        try:
            screen.say(f"seed {options.seed}: starting {options.stack}")
            took_s: dict[str, float] = {}
            with timed(took_s, "start"):
                await stack.start()
            screen.say(f"ready in {took_s['start']:.1f} s")
            site = Site(stack, stack.target, stack.sources(time.time()), stack.spools, stack.kill, took_s)
            with History(place.path / HISTORY) as history:
                return await _judged(options, site, history, screen)
        finally:
            await stack.stop()


async def _judged(options: Options, site: Site, history: History, screen: Screen) -> RunResult:
    """One run with its verdict."""
    shown = await versions(site.ground.redis_url, site.ground.database_url)
    screen.say(", ".join(f"{name} {version}" for name, version in shown.items()))
    conductor = Conductor(options, site.ground, site.target, history, screen)
    before = await _open_files(site.ground)
    with _signals(conductor.interrupt, site.stop_now):
        conducted = await conductor.run(site.spools)
    files = evidence.compared(before, await _open_files(site.ground))
    # In a thread: our loop carries the stack's connections, and to hold it up would be another fault.
    with timed(site.took_s, "evidence"):
        found = await asyncio.to_thread(_collected, site, files, conducted.left)
    with timed(site.took_s, "check"):
        verdicts = checker.check(history.events, found, conducted.recoveries)
    info = _run_info(options, shown, conducted, {**site.took_s, **conducted.took_s})
    if options.keep:
        write(options.keep / EVIDENCE, found)
    return RunResult(info, verdicts, report.document(info, history.events, found, verdicts))


def _collected(site: Site, files: Sequence[FileCount], left: UnfinishedWork) -> Evidence:
    unfinished = "" if left.nothing else f"Not drained: {left}."
    return asyncio.run(evidence.collect(site.sources, site.target.customers, files, unfinished))


def write(path: Path, value: object) -> None:
    """Write it as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _run_info(options: Options, shown: dict[str, str], conducted: Conducted, took_s: dict[str, float]) -> RunInfo:
    """What the report says of the run itself."""
    return RunInfo(
        seed=options.seed,
        duration_s=options.duration,
        rate=options.rate,
        versions=shown,
        shape=options.stack,
        schedule=conducted.planned,
        events=conducted.events,
        recoveries=conducted.recoveries,
        drained_s=conducted.drained_s,
        interrupted=conducted.interrupted,
        took_s=took_s,
    )


async def _open_files(ground: StackTargets) -> evidence.Files:
    """Of all roles, by name."""

    def read() -> evidence.Files:
        everybody = [(place, index) for place in ROLES for index in range(ground.targets.get(place, 0))]
        return evidence.open_files(
            (ground.name(place, index), process)
            for place, index in everybody
            for process in ground.processes(place, index)
        )

    return await asyncio.to_thread(read)


@contextmanager
def _signals(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """The first signal ends the run, which still reports; the next one kills. Only the main thread can ask for them."""
    waiting = [first]

    def on_signal() -> None:
        (waiting.pop() if waiting else second)()

    loop = asyncio.get_running_loop()
    wanted = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for number in wanted:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)


def writable(path: Path) -> None:
    """Raise UsageError now rather than after a long run."""
    try:
        path.touch()
    except OSError as error:
        raise ChaosUsageError(f"{TOOL.both_names('json')}: cannot write {path}: {error.strerror}.") from None
