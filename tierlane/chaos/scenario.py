"""The scenario of a run: load, faults by the schedule, heal, final load, drain. What came of it is for the checker.

However it ends (time over, Ctrl-C, an error), every fault is healed before this returns. The final load goes on until
every gateway has completed a request, for longer than the checker allows a gateway to be stuck. A stack is drained when
nothing is queued, leased or unwritten, and no row of the audit is open. Recovery is the time from a heal to the first
second in which everything succeeded.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from redis.asyncio import Redis
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ledger.postgres import asyncpg_dsn
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import bounded, command_client
from scheduler.redis_client.keys import Keys
from tierlane.chaos.command import Options
from tierlane.chaos.faults.actions import DOING
from tierlane.chaos.faults.catalogue import schedule
from tierlane.chaos.faults.target import StackTargets, do_fault
from tierlane.chaos.history import Answered, Event, FaultEvent, History, Invoked, Recovery, Target, What
from tierlane.chaos.load import ChaosLoad
from tierlane.up.demo_data import TIERS

ROUND_S = 1.0
RATE = 20.0
FINAL_LOAD_PATIENCE_S = 20.0


async def encore(target: Target, seed: int, history: History) -> None:
    """Send until all serve, or patience is over; the checker says what that means."""
    deadline = time.monotonic() + FINAL_LOAD_PATIENCE_S
    since = len(history.events)
    while time.monotonic() < deadline and _serving(history.events[since:]) < len(target.http_urls):
        await ChaosLoad(target, RATE, ROUND_S, seed, history).run()


def _serving(events: list[Event]) -> int:
    """How many gateways have completed something."""
    gateways = {(event.nonce, event.turn): event.gateway for event in events if isinstance(event, Invoked)}
    answers = (event for event in events if isinstance(event, Answered) and event.status == 200)
    return len({gateways[event.nonce, event.turn] for event in answers if (event.nonce, event.turn) in gateways})


LOOK_S = 0.5
QUIET_LOOKS = 2  # One look at several servers is no snapshot.
ROWS_PATIENCE_S = 1.0
OPEN_ROWS = "SELECT count(*) FROM requests WHERE status IN ('queued', 'processing')"


@dataclass(frozen=True)
class UnfinishedWork:
    """What is not finished yet, or `fault`: why nobody can tell."""

    waiting: int = 0
    unwritten: int = 0
    open_rows: int = 0
    spooled: int = 0
    fault: str = ""

    @property
    def nothing(self) -> bool:
        """Whether all is done."""
        return not (self.waiting or self.unwritten or self.open_rows or self.spooled or self.fault)

    def __str__(self) -> str:
        """As the report says it."""
        return self.fault or (
            f"{self.waiting} waiting or running, {self.unwritten} not written to the audit, "
            f"{self.spooled} spool files, {self.open_rows} open rows"
        )


async def drain(
    redis_url: str, database_url: str, spools: Sequence[Path], within_s: float
) -> tuple[float, UnfinishedWork]:
    """Wait until nothing is left, at most `within_s`; how long it took, and what is left."""
    began = time.monotonic()
    quiet = 0
    while True:
        left = await _look(redis_url, database_url, spools)
        seconds = time.monotonic() - began
        quiet = quiet + 1 if left.nothing else 0
        if quiet >= QUIET_LOOKS or seconds > within_s:
            return seconds, left
        await asyncio.sleep(LOOK_S)


async def _look(redis_url: str, database_url: str, spools: Sequence[Path]) -> UnfinishedWork:
    try:
        waiting, unwritten = await _in_redis(redis_url)
        return UnfinishedWork(
            waiting, unwritten, await _open_rows(database_url), sum(_spooled(spool) for spool in spools)
        )
    except (RedisUnavailable, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        return UnfinishedWork(fault=f"{type(error).__name__}: {error}")


async def _in_redis(redis_url: str) -> tuple[int, int]:
    keys = Keys()
    client = command_client(redis_url)
    try:
        async with bounded(ROWS_PATIENCE_S):
            queues = [await client.llen(key) for key in (keys.batch_queue, *map(keys.queue, TIERS))]
            leases = await client.zcard(keys.leases)
            unwritten = await client.llen(keys.outbox) + await _taken(client, keys)
    finally:
        await client.aclose()
    return sum(queues) + leases, unwritten


async def _taken(client: Redis, keys: Keys) -> int:
    """Audit entries in the hands of auditors, dead ones included."""
    return sum([await client.llen(key) async for key in client.scan_iter(match=keys.auditor_outbox("*"))])


async def _open_rows(database_url: str) -> int:
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=ROWS_PATIENCE_S, command_timeout=5)
    try:
        return int(await connection.fetchval(OPEN_ROWS))
    finally:
        await connection.close(timeout=ROWS_PATIENCE_S)


def _spooled(directory: Path) -> int:
    """Files of the audit spool that hold something."""
    return sum(path.is_file() and path.stat().st_size > 0 for path in directory.glob("spool/*"))


WINDOW_S = 1.0
STEP_S = 0.1
OK_STATUS = 200


def recoveries(events: Iterable[Event], faults: Sequence[FaultEvent], load_ended: float) -> list[Recovery]:
    """One for each fault that was healed without error. Times are those of the tries' sending."""
    sent, failed = _tries(events)
    healed = [fault for fault in faults if fault.what is What.HEAL and not fault.error]
    return [Recovery(fault, _seconds(fault.at, sent, failed, load_ended)) for fault in healed]


def _tries(events: Iterable[Event]) -> tuple[list[float], list[float]]:
    """When tries were sent, and when those that did not succeed were; both in order."""
    sent: dict[tuple[str, int], float] = {}
    succeeded: set[tuple[str, int]] = set()
    for event in events:
        if isinstance(event, Invoked):
            sent[event.nonce, event.turn] = event.at
        elif isinstance(event, Answered) and event.status == OK_STATUS:
            succeeded.add((event.nonce, event.turn))
    return sorted(sent.values()), sorted(at for one, at in sent.items() if one not in succeeded)


def _seconds(healed: float, sent: Sequence[float], failed: Sequence[float], load_ended: float) -> float | None:
    begin = healed
    while begin + WINDOW_S <= load_ended:
        if _count(sent, begin) and not _count(failed, begin):
            return round(begin - healed, 1)
        begin += STEP_S
    return None


def _count(times: Sequence[float], begin: float) -> int:
    return bisect_left(times, begin + WINDOW_S) - bisect_left(times, begin)


REFRESH_S = 0.5
OK_TEXT = "200"


class Screen:
    """Lines on `console`; silent when `quiet`. The bar is drawn on a terminal only, and lines go above it."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet

    def say(self, sentence: str) -> None:
        """Show one line."""
        if not self._quiet:
            self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def fault(self, at_s: float, event: FaultEvent) -> None:
        """Show that a fault began, ended or could not be done; `at_s`: seconds since the load began."""
        tail = f"  (not done: {event.error})" if event.error else f"  {event.details}" if event.details else ""
        self.say(f"{at_s:6.1f} s  {event.what:<5}  {event.name:<18} {event.target}{tail}")

    async def follow(self, load: ChaosLoad, duration_s: float) -> None:
        """Show the load's progress until cancelled."""
        if self._quiet or not self._console.is_terminal:
            return
        # Drawn by us, because rich's own thread would take the processor when it likes.
        with _bar(self._console) as bar, suppress(asyncio.CancelledError):
            task = bar.add_task("", total=duration_s)
            for step in range(int(duration_s / REFRESH_S) + 1):
                bar.update(task, completed=step * REFRESH_S, description=_figures(load))
                bar.refresh()
                await asyncio.sleep(REFRESH_S)


def _bar(console: Console) -> RichProgress:
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return RichProgress(*columns, console=console, auto_refresh=False, transient=True)


def _figures(load: ChaosLoad) -> str:
    succeeded = load.counts[OK_TEXT]
    return f"{load.sent} sent, {succeeded} succeeded, {sum(load.counts.values()) - succeeded} not"


DEADLINE_S = 4.0
GRACE_S = 10.0
SLACK_S = 10.0
DRAIN_WITHIN_S = DEADLINE_S + GRACE_S + SLACK_S


@dataclass
class Conducted:
    """What a run was: its schedule, what was really done, how the stack came back."""

    planned: list[str]
    events: list[FaultEvent] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    drained_s: float | None = None
    left: UnfinishedWork = field(default_factory=UnfinishedWork)
    interrupted: bool = False
    took_s: dict[str, float] = field(default_factory=dict)  # Of each part of the run.


class Conductor:
    """Runs `options` on `ground` under the load of `target`; `interrupt` ends it early, healed and drained."""

    def __init__(
        self, options: Options, ground: StackTargets, target: Target, history: History, screen: Screen
    ) -> None:
        self._options = options
        self._target = target
        self._ground = ground
        self._history = history
        self._screen = screen
        self._began = 0.0
        self._load_ended = 0.0
        self._over = asyncio.Event()
        self._load = ChaosLoad(target, options.rate, options.duration, options.seed, history)
        self._planned = schedule(options.seed, options.duration, options.kinds, ground.targets)
        self._run = Conducted([fault.told(ground.name(fault.place, fault.index)) for fault in self._planned])

    def interrupt(self) -> None:
        """End the load and heal everything."""
        self._run.interrupted = True
        self._over.set()

    async def run(self, spools: Sequence[Path]) -> Conducted:
        """Load and faults, then drain. `spools`: directories of gateways whose audit spool must become empty."""
        with timed(self._run.took_s, "load"):
            await self._under_load()
        with timed(self._run.took_s, "encore"):
            await encore(self._target, self._options.seed, self._history)
        self._screen.say("healed; waiting until everything that was accepted is finished and audited")
        with timed(self._run.took_s, "drain"):
            seconds, self._run.left = await drain(
                self._ground.redis_url, self._ground.database_url, spools, DRAIN_WITHIN_S
            )
        self._run.recoveries = await asyncio.to_thread(
            recoveries, self._history.events, self._run.events, self._load_ended
        )
        self._run.drained_s = round(seconds, 1) if self._run.left.nothing else None
        return self._run

    async def _under_load(self) -> None:
        self._began = time.monotonic()
        load = asyncio.create_task(self._load.run(), name="load")
        faults = asyncio.create_task(self._faults(), name="faults")
        shown = asyncio.create_task(self._screen.follow(self._load, self._options.duration), name="progress")
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([load, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._load_ended = min(time.monotonic(), self._began + self._options.duration)
            self._load.stop()
            for task in (faults, shown, over):
                task.cancel()
            done = await asyncio.gather(load, faults, return_exceptions=True)
        _raise_first(done)

    async def _faults(self) -> None:
        """All faults at their times; returns, or is cancelled, when each of them is healed."""
        async with asyncio.TaskGroup() as group:
            for fault in self._planned:
                await asyncio.sleep(self._began + fault.at_s - time.monotonic())
                group.create_task(do_fault(self._ground, fault, DOING, self._told), name=fault.kind.name)

    def _told(self, event: FaultEvent) -> None:
        self._run.events.append(event)
        self._history.fault(event)
        self._screen.fault(event.at - self._began, event)


@contextmanager
def timed(took_s: dict[str, float], part: str) -> Iterator[None]:
    """Note how long one part of a run took."""
    began = time.monotonic()
    try:
        yield
    finally:
        took_s[part] = round(time.monotonic() - began, 1)


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
