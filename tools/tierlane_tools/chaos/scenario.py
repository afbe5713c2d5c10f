"""The scenario of a run: load, batches and faults by the schedule, heal, final load, saturating load, drain.

Every fault is healed before this returns, also after Ctrl-C or an error. The final load lasts until every gateway has
completed a request, for longer than the checker allows a gateway to be stuck. The saturating load, which is left out after
Ctrl-C, shows whether customers of one tier get their shares. A stack is drained when nothing is queued, leased or unwritten,
and no audit row is open. Recovery is the time from a heal to the first second in which all requests succeed.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from rich.console import Console

from ledger.postgres import asyncpg_dsn
from scheduler.errors import RedisUnavailable
from tierlane_tools.chaos.checker.evidence import leftovers_of_cells
from tierlane_tools.chaos.command import Options
from tierlane_tools.chaos.faults.actions import ACTIONS
from tierlane_tools.chaos.faults.catalogue import schedule
from tierlane_tools.chaos.faults.target import StackTargets, inject_fault
from tierlane_tools.chaos.history import (
    Answered,
    Event,
    FaultEvent,
    FaultPhase,
    History,
    Invoked,
    Recovery,
    RunInfo,
    Target,
)
from tierlane_tools.chaos.load.batches import BatchLoad
from tierlane_tools.chaos.load.chats import ChatLoad
from tierlane_tools.chaos.load.requests import ChaosLoad
from tierlane_tools.chaos.load.saturation import SaturatingLoad, saturating_customers

ROUND_S = 1.0
RATE = 20.0
FINAL_LOAD_PATIENCE_S = 20.0


def load_of(target: Target, rate: float, duration_s: float, seed: int, history: History) -> ChaosLoad:
    """The load for the backend of this target."""
    return (ChatLoad if target.is_engine else ChaosLoad)(target, rate, duration_s, seed, history)


async def final_load(target: Target, seed: int, history: History) -> None:
    """Send requests until every gateway serves, or the time is over."""
    deadline = time.monotonic() + FINAL_LOAD_PATIENCE_S
    since = len(history.events)
    while time.monotonic() < deadline and _serving(history.events[since:]) < len(target.http_urls):
        await load_of(target, RATE, ROUND_S, seed, history).run()


def _serving(events: list[Event]) -> int:
    """The number of gateways that have completed a request."""
    gateways = {(event.nonce, event.turn): event.gateway for event in events if isinstance(event, Invoked)}
    answers = (event for event in events if isinstance(event, Answered) and event.status == 200)
    return len({gateways[event.nonce, event.turn] for event in answers if (event.nonce, event.turn) in gateways})


POLL_S = 0.5
QUIET_READS = 2  # Reads of several servers are no snapshot.
ROWS_PATIENCE_S = 1.0
OPEN_ROWS = "SELECT count(*) FROM requests WHERE status IN ('queued', 'processing')"


@dataclass(frozen=True)
class UnfinishedWork:
    """Unfinished work, or `fault`: why it is unknown."""

    in_redis: int = 0
    open_rows: int = 0
    spooled: int = 0
    fault: str = ""

    @property
    def nothing(self) -> bool:
        """Whether there is none."""
        return not (self.in_redis or self.open_rows or self.spooled or self.fault)

    def __str__(self) -> str:
        """The text in the report."""
        return self.fault or (
            f"{self.in_redis} requests, batches and audit records in Redis, {self.spooled} spool files, "
            f"{self.open_rows} open rows"
        )


async def drain(
    redis_urls: Sequence[str], database_url: str, spools: Sequence[Path], within_s: float
) -> tuple[float, UnfinishedWork]:
    """Wait until no work is left, at most `within_s`; returns the seconds, and the work that is left."""
    began = time.monotonic()
    quiet = 0
    while True:
        left = await _read_unfinished(redis_urls, database_url, spools)
        seconds = time.monotonic() - began
        quiet = quiet + 1 if left.nothing else 0
        if quiet >= QUIET_READS or seconds > within_s:
            return seconds, left
        await asyncio.sleep(POLL_S)


async def _read_unfinished(redis_urls: Sequence[str], database_url: str, spools: Sequence[Path]) -> UnfinishedWork:
    try:
        left = await leftovers_of_cells(redis_urls)
        return UnfinishedWork(
            in_redis=len(left.open_requests) + sum(left.lengths.values()),
            open_rows=await _open_rows(database_url),
            spooled=sum(
                path.stat().st_size > 0 for spool in spools for path in spool.glob("spool/*") if path.is_file()
            ),
        )
    except (RedisUnavailable, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        return UnfinishedWork(fault=f"{type(error).__name__}: {error}")


async def _open_rows(database_url: str) -> int:
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=ROWS_PATIENCE_S, command_timeout=5)
    try:
        return int(await connection.fetchval(OPEN_ROWS))
    finally:
        await connection.close(timeout=ROWS_PATIENCE_S)


WINDOW_S = 1.0
STEP_S = 0.1
OK_STATUS = 200


def recoveries(events: Iterable[Event], faults: Sequence[FaultEvent], load_ended: float) -> list[Recovery]:
    """The recovery of each fault that was healed without error, by the sending times of tries."""
    sent, failed = _tries(events)
    healed = [fault for fault in faults if fault.what is FaultPhase.HEAL and not fault.error]
    return [Recovery(fault, _seconds(fault.at, sent, failed, load_ended)) for fault in healed]


def _tries(events: Iterable[Event]) -> tuple[list[float], list[float]]:
    """The sending times of all tries, and of those that did not succeed, in order."""
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


class RunDisplay:
    """Lines on `console`, none when `quiet`."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet

    def show(self, line: str) -> None:
        """Show a line."""
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def fault(self, at_s: float, event: FaultEvent) -> None:
        """Show an event of a fault; `at_s`: seconds since the load began."""
        tail = f"  (not injected: {event.error})" if event.error else f"  {event.details}" if event.details else ""
        self.show(f"{at_s:6.1f} s  {event.what:<5}  {event.name:<18} {event.target}{tail}")


DEADLINE_S = 4.0
GRACE_S = 10.0
LINES_S = 20.0  # After the end of a batch: by then the rows of lines whose records were lost are written.
SLACK_S = 10.0
DRAIN_WITHIN_S = max(DEADLINE_S + GRACE_S, LINES_S) + SLACK_S


class Scenario:
    """Runs the faults of `options` on `targets` under the load of `target`; `interrupt` ends it early.

    `info` is the run in the report; `left`: the work that is unfinished after the drain.
    """

    def __init__(
        self, options: Options, targets: StackTargets, target: Target, history: History, display: RunDisplay
    ) -> None:
        self._options = options
        self._target = target
        self._targets = targets
        self._history = history
        self._display = display
        self._began = 0.0
        self._load_ended = 0.0
        self._over = asyncio.Event()
        self._load = load_of(target, options.rate, options.duration, options.seed, history)
        self._batches = BatchLoad(target, options.seed, history)
        self._saturation = SaturatingLoad(target, options.seed, history) if saturating_customers(target) else None
        self._planned = schedule(options.seed, options.duration, options.kinds, targets.counts)
        self.info = RunInfo(options.seed, options.duration, options.rate, options.stack)
        self.info.schedule = [fault.text(targets.name(fault.place, fault.index)) for fault in self._planned]
        self.left = UnfinishedWork()

    def interrupt(self) -> None:
        """End the load and heal everything."""
        self.info.interrupted = True
        self._over.set()
        if self._saturation:
            self._saturation.stop()

    async def run(self, spools: Sequence[Path]) -> None:
        """Run load and faults, then drain. `spools`: data directories of gateways whose spool must become empty."""
        batches = asyncio.create_task(self._batches.run(), name="batches")
        try:
            with timed(self.info.took_s, "load"):
                await self._under_load()
            with timed(self.info.took_s, "encore"):
                await final_load(self._target, self._options.seed, self._history)
            self._batches.stop()
            with timed(self.info.took_s, "batches"):
                await batches
        finally:
            batches.cancel()
        if self._saturation and not self.info.interrupted:
            with timed(self.info.took_s, "saturation"):
                await self._saturation.run()
        self._display.show("healed; waiting until all accepted requests have ended and are audited")
        with timed(self.info.took_s, "drain"):
            seconds, self.left = await drain(
                self._targets.redis_urls, self._targets.database_url, spools, DRAIN_WITHIN_S
            )
        self.info.recoveries = await asyncio.to_thread(
            recoveries, self._history.events, self.info.events, self._load_ended
        )
        self.info.drained_s = round(seconds, 1) if self.left.nothing else None

    async def _under_load(self) -> None:
        self._began = time.monotonic()
        load = asyncio.create_task(self._load.run(), name="load")
        faults = asyncio.create_task(self._faults(), name="faults")
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([load, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._load_ended = min(time.monotonic(), self._began + self._options.duration)
            self._load.stop()
            for task in (faults, over):
                task.cancel()
            done = await asyncio.gather(load, faults, return_exceptions=True)
        _raise_first(done)

    async def _faults(self) -> None:
        """Inject all faults at their times; returns or is cancelled when each is healed."""
        async with asyncio.TaskGroup() as group:
            for fault in self._planned:
                await asyncio.sleep(self._began + fault.at_s - time.monotonic())
                group.create_task(inject_fault(self._targets, fault, ACTIONS, self._report), name=fault.kind.name)

    def _report(self, event: FaultEvent) -> None:
        self.info.events.append(event)
        self._history.add(event)
        self._display.fault(event.at - self._began, event)


@contextmanager
def timed(took_s: dict[str, float], part: str) -> Iterator[None]:
    """Record the duration of one part of the run."""
    began = time.monotonic()
    try:
        yield
    finally:
        took_s[part] = round(time.monotonic() - began, 1)


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
