"""One run from the first request to the last audit row: what is measured, and when."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from secrets import token_hex

from tierlane.bench.batches import Span, read_batches
from tierlane.bench.echo import measure_echo
from tierlane.bench.inputs import TAG_CHARACTERS, Inputs
from tierlane.bench.load import Phase
from tierlane.bench.measurement import Measurement
from tierlane.bench.output_check import OutputCheck
from tierlane.bench.padding import read_padding
from tierlane.bench.plan import Address, Echo, Plan
from tierlane.bench.progress import Progress
from tierlane.bench.resources import ProcessCpu, cpu_between, read_cpu, rss_by_role
from tierlane.bench.stack_info import StackError, StackInfo, keys_for, read_keys, read_stack
from tierlane.bench.statistics import good_bounds
from tierlane.bench.tally import new_tallies
from tierlane.bench.timeline import Timeline
from tierlane.bench.traffic import Traffic
from tierlane.bench.verification import Window, check_audit, key_id


@dataclass(frozen=True)
class Reading:
    """The counters at the begin or end of the measured window."""

    at_s: float
    answers: int
    completed: list[tuple[int, int]]  # By tier: 200 answers, and good ones among them.
    own_cpu_s: float


async def measure(plan: Plan, address: Address, stack: StackInfo, progress: Progress) -> Measurement:
    """Run the plan. Raises StackError or UsageError where the keys cannot be used."""
    return await _Run(plan, address, stack, progress).measure()


class _Run:
    def __init__(self, plan: Plan, address: Address, stack: StackInfo, progress: Progress) -> None:
        self._plan = plan
        self._stack = stack
        self._progress = progress
        good_s = good_bounds(plan.slo, plan.mix.tiers)
        now, warmup, measured = (
            datetime.now(UTC),
            new_tallies(plan.mix.tiers, good_s),
            new_tallies(plan.mix.tiers, good_s),
        )
        self._found = Measurement(now, now, warmup, measured)
        inputs = Inputs(token_hex(TAG_CHARACTERS // 2), plan.filler)
        tiers = plan.mix.tiers
        self._keys = read_keys(plan.keys, tiers) if plan.keys else keys_for(stack, tiers)
        self._check = OutputCheck(plan.verify, inputs)
        self._end_s = plan.warmup + plan.duration
        self._phases = [Phase(plan.warmup, self._found.warmup), Phase(self._end_s, self._found.measured)]
        self._load = Traffic(plan, self._keys, inputs, self._check).load(address, self._phases)
        self._timeline = Timeline(self._found.warmup, self._found.measured)

    async def measure(self) -> Measurement:
        found, load = self._found, self._load
        await self._echo()
        with _no_collector(), _interruptible(self._interrupt):
            found.started_at = datetime.now(UTC)
            load.begin()
            finished = asyncio.create_task(load.finish(), name="load")
            watching = [
                asyncio.create_task(self._progress.follow(load, found.measured), name="progress"),
                asyncio.create_task(self._timeline.follow(load), name="timeline"),
            ]
            try:
                await self._window(finished)
                await finished
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)
        self._collect()
        await self._audit()
        return found

    async def _echo(self) -> None:
        gateways = sum(process.role == "gateway" for process in self._stack.processes)
        wanted = self._plan.echo
        if wanted is Echo.ON or (wanted is Echo.AUTO and gateways):
            self._progress.say("Measuring a bare echo ...")
            with _no_collector():
                self._found.echo = await measure_echo(self._plan, self._keys, gateways or 1)

    def _interrupt(self) -> None:
        self._found.interrupted = True
        self._load.stop()

    async def _window(self, finished: "asyncio.Task[None]") -> None:
        """Take readings at both ends of the measured window; an interrupted run has it end early."""
        await self._until(self._plan.warmup, finished)
        before = await asyncio.to_thread(self._read_processes)
        self._found.window_began_at = datetime.now(UTC)
        begin = self._reading()
        await self._until(self._end_s, finished)
        end = self._reading()
        after = await asyncio.to_thread(self._read_processes)
        found = self._found
        found.window_s = end.at_s - begin.at_s
        found.window_answers = end.answers - begin.answers
        found.window_completed = [
            (late[0] - early[0], late[1] - early[1]) for early, late in zip(begin.completed, end.completed, strict=True)
        ]
        found.cpu = cpu_between(before, after)
        found.own_cpu_s = end.own_cpu_s - begin.own_cpu_s
        found.rss = (rss_by_role(before), rss_by_role(after))

    async def _until(self, at_s: float, finished: "asyncio.Task[None]") -> None:
        # The load may be through before its time is: the last request of a low rate is early.
        while not self._found.interrupted and (left_s := at_s - self._load.elapsed_s()) > 0:
            if finished.done():
                await asyncio.sleep(left_s)
            else:
                await asyncio.wait([finished], timeout=left_s)

    def _reading(self) -> Reading:
        completed = [
            (early.ok + late.ok, early.good + late.good)
            for early, late in zip(self._found.warmup, self._found.measured, strict=True)
        ]
        return Reading(self._load.elapsed_s(), self._load.answers, completed, time.process_time())

    def _read_processes(self) -> list[ProcessCpu]:
        # Read anew, because a process may have been replaced meanwhile.
        try:
            return read_cpu(read_stack(self._plan.stack).processes)
        except StackError:
            return []

    def _collect(self) -> None:
        found, load = self._found, self._load
        found.lag = self._phases[1].lag
        found.waited_for_connection = load.pool.waited
        found.strays = load.pool.strays
        found.verify = "reversed" if self._check.active else "off"
        found.verified, found.crossed = self._check.verified, self._check.crossed
        found.repeated_ids, found.without_id = load.ids.repeated(), load.ids.without_id
        found.details = load.details
        found.timeline = self._timeline.steps

    async def _audit(self) -> None:
        if not self._stack.database_url:
            return
        self._progress.say("Waiting for the audit rows ...")
        found, url = self._found, self._stack.database_url
        found.padding_waste = await read_padding(self._stack.http_url, self._stack.service_token)
        key_ids = tuple(key_id(key) for of_tier in self._keys for key in of_tier)
        # Ids carry whole milliseconds.
        begin = found.started_at.replace(microsecond=found.started_at.microsecond // 1000 * 1000)
        window = Window(begin, datetime.now(UTC), key_ids)
        found.audit = await check_audit(url, window, self._load.ids, self._plan.audit_wait)
        ended_to = found.window_began_at + timedelta(seconds=found.window_s)
        span = Span(begin, window.end, key_ids, found.window_began_at, ended_to)
        workers = sum(process.role == "worker" for process in self._stack.processes)
        found.batches = await read_batches(url, span, self._plan.model or "", workers)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without the cyclic garbage collector: its pauses would look like the server's, and nothing here makes cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C ends the load and still reports; only the main thread can ask for signals."""
    loop = asyncio.get_running_loop()
    main = threading.current_thread() is threading.main_thread()
    if main:
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        if main:
            loop.remove_signal_handler(signal.SIGINT)
