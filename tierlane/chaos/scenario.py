"""One run on a stack that works: load, faults by the schedule, heal, drain. What came of it is for the checker.

However it ends (time over, Ctrl-C, an error), every fault is healed before this returns.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tierlane.chaos.drain import Left, drain
from tierlane.chaos.encore import encore
from tierlane.chaos.faults.actions import DOING
from tierlane.chaos.faults.target import do_fault
from tierlane.chaos.ground import Ground
from tierlane.chaos.history import History
from tierlane.chaos.load import Load
from tierlane.chaos.options import Options
from tierlane.chaos.plan import FaultEvent, Recovery, Target
from tierlane.chaos.recovery import recoveries
from tierlane.chaos.schedule import schedule
from tierlane.chaos.screen import Screen

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
    left: Left = field(default_factory=Left)
    interrupted: bool = False
    took_s: dict[str, float] = field(default_factory=dict)  # Of each part of the run.


class Conductor:
    """Runs `options` on `ground` under the load of `target`; `interrupt` ends it early, healed and drained."""

    def __init__(self, options: Options, ground: Ground, target: Target, history: History, screen: Screen) -> None:
        self._options = options
        self._target = target
        self._ground = ground
        self._history = history
        self._screen = screen
        self._began = 0.0
        self._load_ended = 0.0
        self._over = asyncio.Event()
        self._load = Load(target, options.rate, options.duration, options.seed, history)
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
