"""One run from the first request to the last audit row: what is measured and when, its timeline and progress bar.

The timeline is read from the tallies, so no request pays for it. The bar is shown on a terminal only.
"""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from secrets import token_hex

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tierlane_local.stack_file import StackFileError, StackInfo, read_stack
from tierlane_tools.bench.load import BenchLoad, Phase, Traffic
from tierlane_tools.bench.measurement.batch_use import BatchUse, MeasuredRows, read_batches
from tierlane_tools.bench.measurement.echo_cost import EchoResult, echo_seconds, measure_echo
from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.bench.measurement.padding import read_padding
from tierlane_tools.bench.measurement.resources import CpuUse, ProcessCpu, cpu_between, read_cpu, rss_by_role
from tierlane_tools.bench.measurement.statistics import TierStatistics, UnansweredCause, new_tallies
from tierlane_tools.bench.plan.inputs import TAG_CHARACTERS, Inputs
from tierlane_tools.bench.plan.objectives import good_bounds
from tierlane_tools.bench.plan.plan import BenchPlan, EchoMode, TargetAddress
from tierlane_tools.bench.tier_keys import keys_for, read_keys
from tierlane_tools.bench.trace_load import TraceLoad, replay_load
from tierlane_tools.bench.verification.audit import AuditResult, AuditWindow, check_audit, key_id
from tierlane_tools.bench.verification.output_check import OutputCheck

STEP_S = 1.0

REFRESH_S = 0.5
LINE_EVERY_S = 5.0  # Where no bar can be drawn.


@dataclass(frozen=True)
class TierInterval:
    """One tier in one step. `p99_s` of its 200s, None without one."""

    completed: int
    failed: int
    p99_s: float | None


@dataclass(frozen=True)
class Interval:
    """One step, by tier in the order of the mix. `at_s`: its end, in seconds since the first request."""

    at_s: float
    length_s: float
    tiers: tuple[TierInterval, ...]


class Timeline:
    """The steps of a run so far."""

    def __init__(self, warmup: Sequence[TierStatistics], measured: Sequence[TierStatistics]) -> None:
        self.steps: list[Interval] = []
        self._pairs = list(zip(warmup, measured, strict=True))
        self._seen = [self._now(number) for number in range(len(self._pairs))]
        self._at_s = 0.0

    async def follow(self, load: BenchLoad) -> None:
        """Take a step each second until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            self.step(load.elapsed_s())

    def step(self, at_s: float) -> None:
        """What came back since the last step."""
        now = [self._now(number) for number in range(len(self._pairs))]
        tiers = []
        for before, after in zip(self._seen, now, strict=True):
            new = after[0].since(before[0])
            tiers.append(TierInterval(new.count, after[1] - before[1], new.quantile(0.99)))
        self.steps.append(Interval(round(at_s, 3), round(at_s - self._at_s, 3), tuple(tiers)))
        self._seen, self._at_s = now, at_s

    def _now(self, tier: int) -> tuple[Histogram, int]:
        tallies = self._pairs[tier]
        return Histogram.merged(counters.latency for counters in tallies), sum(t.failures + t.missing for t in tallies)


@dataclass
class Measurement:
    """Everything that one run found."""

    started_at: datetime
    window_began_at: datetime
    warmup: list[TierStatistics]
    measured: list[TierStatistics]
    lag: Histogram = field(default_factory=Histogram)
    window_s: float = 0.0  # How long the window was measured in truth.
    window_answers: int = 0  # Answers that came in it, which its CPU seconds are divided by.
    window_completed: list[tuple[int, int]] = field(default_factory=list)  # By tier: 200 answers in it, good ones.
    window_tokens: list[int] = field(default_factory=list)  # By tier: tokens of streams that ended in it.
    cpu: CpuUse = field(default_factory=CpuUse)
    own_cpu_s: float = 0.0
    rss: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))  # Bytes by role, at both ends.
    echo: EchoResult | None = None
    batches: BatchUse | None = None
    padding_waste: float | None = None  # Share of the late batches' positions; None where it is not known.
    timeline: list[Interval] = field(default_factory=list)
    waited_for_connection: int = 0
    verify: str = ""
    verified: int = 0
    crossed: int = 0
    strays: int = 0
    repeated_ids: int = 0
    without_id: int = 0
    details: dict[UnansweredCause, str] = field(default_factory=dict)
    audit: AuditResult | None = None
    interrupted: bool = False


class ProgressDisplay:
    """Follows a load on `console`: a bar on a terminal, else a line now and then."""

    def __init__(self, console: Console, total_s: float) -> None:
        self._console = console
        self._total_s = total_s

    async def follow(self, load: BenchLoad, measured: Sequence[TierStatistics]) -> None:
        """Show the load until cancelled."""
        if not self._console.is_terminal:
            at_s, answers = 0.0, 0
            while True:
                await asyncio.sleep(LINE_EVERY_S)
                now_s, now_answers = load.elapsed_s(), load.answers
                rate = (now_answers - answers) / max(now_s - at_s, REFRESH_S)
                at_s, answers = now_s, now_answers
                self.say(f"{min(now_s, self._total_s):.0f} of {self._total_s:.0f} s: {_figures(rate, measured)}")
        # Drawn by us, because rich's own thread would take the processor when it likes.
        with _bar(self._console) as bar, suppress(asyncio.CancelledError):
            task = bar.add_task("", total=self._total_s)
            at_s, answers = 0.0, 0
            while True:
                now_s, now_answers = load.elapsed_s(), load.answers
                rate = (now_answers - answers) / max(now_s - at_s, REFRESH_S)
                at_s, answers = now_s, now_answers
                bar.update(task, completed=min(now_s, self._total_s), description=_figures(rate, measured))
                bar.refresh()
                await asyncio.sleep(REFRESH_S)

    @asynccontextmanager
    async def waiting(self, sentence: str, seconds: float) -> AsyncIterator[None]:
        """Show what is done in the block, which takes about so many seconds."""
        if not self._console.is_terminal:
            self.say(f"{sentence}, {seconds:.0f} s ...")
            yield
            return
        with _bar(self._console) as bar:
            task = bar.add_task(sentence, total=seconds)
            drawing = asyncio.create_task(_advance(bar, task), name="progress")
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)

    def say(self, sentence: str) -> None:
        """Show one line."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)


async def _advance(bar: RichProgress, task: TaskID) -> None:
    while True:
        bar.update(task, advance=0.0)
        bar.refresh()
        await asyncio.sleep(REFRESH_S)
        bar.advance(task, REFRESH_S)


def _bar(console: Console) -> RichProgress:
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return RichProgress(*columns, console=console, auto_refresh=False, transient=True)


def _figures(rate: float, measured: Sequence[TierStatistics]) -> str:
    ok = sum(counters.ok for counters in measured)
    errors = sum(counters.failures + counters.missing for counters in measured)
    if not ok + errors:
        return f"{rate:.0f}/s, warm-up"
    p95 = Histogram.merged(counters.latency for counters in measured).quantile(0.95)
    return f"{rate:.0f}/s, {ok} ok, {errors} errors, p95 {(p95 or 0) * 1000:.0f} ms"


@dataclass(frozen=True)
class CounterReading:
    """The counters at the begin or end of the measured window."""

    at_s: float
    answers: int
    completed: list[tuple[int, int]]  # By tier: 200 answers, and good ones among them.
    tokens: list[int]  # By tier.
    own_cpu_s: float


async def measure(plan: BenchPlan, address: TargetAddress, stack: StackInfo, progress: ProgressDisplay) -> Measurement:
    """Run the plan. Raises StackError or UsageError where the keys cannot be used."""
    return await _Run(plan, address, stack, progress).measure()


class _Run:
    def __init__(self, plan: BenchPlan, address: TargetAddress, stack: StackInfo, progress: ProgressDisplay) -> None:
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
        traffic = Traffic(plan, self._keys, inputs, self._check)
        self._load: BenchLoad
        if plan.requests:
            self._load = replay_load(traffic, address, self._phases)
        else:
            self._load = traffic.load(address, self._phases)
        self._timeline = Timeline(self._found.warmup, self._found.measured)

    async def measure(self) -> Measurement:
        found, load = self._found, self._load
        gateways = sum(process.role == "gateway" for process in self._stack.processes)
        wanted = self._plan.echo
        if wanted is EchoMode.ON or (wanted is EchoMode.AUTO and gateways):
            async with self._progress.waiting("First the same load on a bare echo server", echo_seconds(self._plan)):
                with _no_collector():
                    found.echo = await measure_echo(self._plan, self._keys, gateways or 1)
        with _no_collector(), _interruptible(self._interrupt):
            await load.pool.open_spare()
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
        found.lag = load.sent_lag if isinstance(load, TraceLoad) else self._phases[1].lag
        found.waited_for_connection = load.pool.waited
        found.strays = load.pool.strays
        found.verify = "reversed" if self._check.active else "off"
        found.verified, found.crossed = self._check.verified, self._check.crossed
        found.repeated_ids, found.without_id = load.ids.repeated(), load.ids.without_id
        found.details = load.details
        found.timeline = self._timeline.steps
        await self._audit()
        return found

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
        found.window_tokens = [late - early for early, late in zip(begin.tokens, end.tokens, strict=True)]
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

    def _reading(self) -> CounterReading:
        completed = [
            (early.ok + late.ok, early.good + late.good)
            for early, late in zip(self._found.warmup, self._found.measured, strict=True)
        ]
        tokens = [
            early.tokens + late.tokens for early, late in zip(self._found.warmup, self._found.measured, strict=True)
        ]
        return CounterReading(self._load.elapsed_s(), self._load.answers, completed, tokens, time.process_time())

    def _read_processes(self) -> list[ProcessCpu]:
        # Read anew, because a process may have been replaced meanwhile.
        try:
            return read_cpu(read_stack(self._plan.stack).processes)
        except StackFileError:
            return []

    async def _audit(self) -> None:
        if not self._stack.database_url:
            return
        self._progress.say("Waiting for the audit rows ...")
        found, url = self._found, self._stack.database_url
        found.padding_waste = await read_padding(self._stack.http_url, self._stack.service_token)
        key_ids = tuple(key_id(key) for of_tier in self._keys for key in of_tier)
        # Ids carry whole milliseconds.
        begin = found.started_at.replace(microsecond=found.started_at.microsecond // 1000 * 1000)
        window = AuditWindow(begin, datetime.now(UTC), key_ids)
        found.audit = await check_audit(url, window, self._load.ids, self._plan.audit_wait)
        ended_to = found.window_began_at + timedelta(seconds=found.window_s)
        span = MeasuredRows(begin, window.end, key_ids, found.window_began_at, ended_to)
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
