"""The scenario of a run: load, batches and faults by the schedule, heal, final load, saturating load, drain.

Every fault is healed before this returns, also after Ctrl-C or an error. The final load lasts for longer than the checker
allows a gateway to be stuck. The saturating load, which is left out after Ctrl-C, shows whether customers of one tier get
their shares.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierlane_tools.chaos.display import RunDisplay
from tierlane_tools.chaos.drain import UnfinishedWork, drain
from tierlane_tools.chaos.faults.actions import ACTIONS
from tierlane_tools.chaos.faults.schedule import schedule
from tierlane_tools.chaos.faults.target import StackTargets, inject_fault
from tierlane_tools.chaos.history import FaultEvent, History, RunInfo, Target
from tierlane_tools.chaos.load.batches import BatchLoad
from tierlane_tools.chaos.load.final import final_load, load_of
from tierlane_tools.chaos.load.saturation import SaturatingLoad, saturating_customers
from tierlane_tools.chaos.options import Options
from tierlane_tools.chaos.recovery import recoveries

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
                for result in done:
                    if isinstance(result, Exception):
                        raise result
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
