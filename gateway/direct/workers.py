"""Connections to the workers' direct endpoints: one batch at a time on each, and a probe while they are not needed.

A connection begins with a hello (scheduler/protocol/direct.py has the wire format). A batch is sent once the audit has
the beginning of each of its requests. A busy worker's batch goes back to the head of the queue, and that connection
pauses for a moment. A lost call's batch does the same and goes on in single requests, and so does one whose model hung;
after the third loss a request is given up.

The probe finds an address that nobody can connect to, or a wrong token, before the outage that direct mode is for. One
runs at a time, one a second, each worker's every half minute. A failed one is retried soon and reported from the second
failure on.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import structlog

from gateway.circuit_breaker import Breaker, BreakerState
from gateway.direct.queue import DirectEntry, DirectQueue
from gateway.inference.deadlines import LEAD_S
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import log_fault
from scheduler.protocol.batches import RETRY_BUDGET, Outcome
from scheduler.protocol.direct import (
    HEADER,
    DirectBatch,
    DirectBusy,
    DirectError,
    DirectItem,
    Hello,
    ToGateway,
    Welcome,
    body_length,
    pack,
    read_by_gateway,
)
from scheduler.protocol.pool_view import WorkerView

CONNECT_S = 0.25
"""For the connection, and once more for the worker's welcome."""


REFUSED = (
    "closed the connection without a welcome: its TIERLANE_DIRECT_TOKEN is not the one of this gateway, it is of an older version, "
    "or it is shutting down."
)


class WorkerBusy(TierlaneError):
    """The worker did not run the batch; another one may take it."""


class WorkerConnection:
    """The connection and its breaker; what breaks a call closes the connection, and the next call makes another."""

    def __init__(self, worker_id: str, address: str, hello: Hello) -> None:
        self.worker_id = worker_id
        self.address = address
        self.breaker = Breaker(max_failures=1, silence_s=None)
        self.max_batch = 1
        self._hello = pack(hello)
        self._seq = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Be connected and welcome. Raises DirectError."""
        if self._streams is not None and not self._streams[0].at_eof():
            return
        self.close()
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                self._streams = await asyncio.open_connection(host.strip("[]"), int(port))
            async with asyncio.timeout(CONNECT_S):
                welcome = await self._exchange(self._hello)
        except asyncio.IncompleteReadError as error:
            self.close()
            raise DirectError(f"The worker at {self.address} {REFUSED}") from error
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} cannot be called: {type(error).__name__}.") from error
        except BaseException:
            self.close()
            raise
        if not isinstance(welcome, Welcome):
            self.close()
            raise DirectError(f"The worker at {self.address} did not say welcome.")
        self.max_batch = max(1, welcome.max_batch)

    async def call(self, items: Sequence[DirectItem], timeout_s: float) -> list[Outcome]:
        """Run a batch. Raises WorkerBusy where it did not run, DirectError where what became of it is not known."""
        self._seq += 1
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(pack(DirectBatch(self._seq, list(items))))
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} was lost: {type(error).__name__}.") from error
        except BaseException:  # A cancelled call, too, leaves a connection whose next answer is not ours.
            self.close()
            raise
        if isinstance(answer, Welcome) or answer.seq != self._seq:
            self.close()
            raise DirectError(f"The worker at {self.address} answered something that was not asked.")
        if isinstance(answer, DirectBusy):
            raise WorkerBusy(answer.reason)
        return answer.outcomes

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _exchange(self, frame: bytes) -> ToGateway:
        if self._streams is None:
            raise DirectError(f"There is no connection to {self.address}.")
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        length = body_length(await reader.readexactly(HEADER.size))
        return read_by_gateway(await reader.readexactly(length))


REST_S = 0.02
END_MARGIN_S = LEAD_S + 0.075  # Before the deadline sweep steps in: for the audit's way to the disk.
ANSWER_S = 0.05  # A worker answers for what is overdue, too; it may take so long to say it.
LEAST_PATIENCE_S = 1.0
RUNS_OF_PATIENCE = 8  # Before our batch a running one and four waiting ones may have their turn.

log = structlog.get_logger("gateway")


class BatchEvents(Protocol):
    """Who is told what became of the requests."""

    def may_run(self, entry: DirectEntry) -> bool: ...

    async def begin(self, batch: list[DirectEntry]) -> list[DirectEntry]: ...

    def ran(self, entry: DirectEntry, outcome: Outcome, worker_id: str, batch_size: int) -> None: ...

    def given_up(self, entry: DirectEntry, code: ErrorCode) -> None: ...


class WorkerConnections:
    """One task for each worker while direct mode is on. `clock` is monotonic seconds."""

    def __init__(self, queue: DirectQueue, hello: Hello, ends: BatchEvents, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._hello = hello
        self._ends = ends
        self._clock = clock
        self._lines: dict[str, tuple[WorkerConnection, asyncio.Task[None]]] = {}
        self._work = asyncio.Event()
        self._patience_s: dict[str, float] = {}
        self.lost_calls = 0
        self.busy_answers = 0

    @property
    def able(self) -> int:
        """Workers that can be called as far as is known."""
        return sum(line.breaker.state is BreakerState.CLOSED for line, _ in self._lines.values())

    def breakers(self) -> dict[str, str]:
        """The state of each worker's breaker."""
        return {line.worker_id: line.breaker.state.value for line, _ in self._lines.values()}

    def follow(self, workers: Sequence[WorkerView]) -> None:
        """Have a line to each worker with an endpoint. None is dropped: a Redis that came back may know fewer."""
        for worker in workers:
            if worker.direct and worker.direct not in self._lines:
                self._patience_s[worker.direct] = max(LEAST_PATIENCE_S, RUNS_OF_PATIENCE * worker.service_p95_ms / 1000)
                line = WorkerConnection(worker.id, worker.direct, self._hello)
                task = asyncio.get_running_loop().create_task(self._run(line), name=f"direct line {worker.id}")
                self._lines[worker.direct] = line, task

    def wake(self) -> None:
        """Somebody waits."""
        self._work.set()

    def hang_up(self) -> list["asyncio.Task[None]"]:
        """Let all lines go; returns their tasks, for who wants to see their end."""
        tasks = [task for _, task in self._lines.values()]
        self._lines.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def _run(self, line: WorkerConnection) -> None:
        try:
            while True:
                await self._work.wait()
                try:
                    await self._turn(line)
                except Exception as error:  # noqa: BLE001  # no fault may end this loop
                    log_fault("a direct call failed", error)
                    await asyncio.sleep(REST_S)
        finally:
            line.close()

    async def _turn(self, line: WorkerConnection) -> None:
        """Connect where that is to be done, take a batch, serve it."""
        if not line.breaker.may_call(self._clock()):
            await asyncio.sleep(REST_S)
            return
        try:
            await line.connect()
        except DirectError as error:
            self._failed(line, str(error))
            return
        line.breaker.succeeded()
        batch = [entry for entry in self._queue.pick(line.max_batch) if self._ends.may_run(entry)]
        if batch:
            await self._serve(line, batch)
        elif not len(self._queue):
            self._work.clear()

    async def _serve(self, line: WorkerConnection, batch: list[DirectEntry]) -> None:
        try:
            batch = await self._ends.begin(batch)
            outcomes = await self._call(line, batch) if batch else []
        except WorkerBusy:
            self.busy_answers += 1
            self._return(batch)
            await asyncio.sleep(REST_S)
        except DirectError as error:
            self._failed(line, str(error))
            self._lost(batch)
        except asyncio.CancelledError:  # The line is let go, the requests are not.
            self._return(batch)
            raise
        else:
            self._ran(line, batch, outcomes)

    async def _call(self, line: WorkerConnection, batch: list[DirectEntry]) -> list[Outcome]:
        now = self._clock()
        for entry in batch:
            entry.started_at = now
        items = [_item(entry, now) for entry in batch]
        longest_s = max(item.ms_left for item in items) / 1000 + ANSWER_S
        return await line.call(items, min(longest_s, self._patience_s[line.address]))

    def _failed(self, line: WorkerConnection, reason: str) -> None:
        line.breaker.failed(self._clock())
        log.warning("direct call failed", worker=line.worker_id, reason=reason)

    def _return(self, batch: list[DirectEntry]) -> None:
        for entry in batch:
            entry.started_at = None
        self._queue.put_back(batch)
        self._work.set()

    def _lost(self, batch: list[DirectEntry]) -> None:
        self.lost_calls += 1
        for entry in batch:
            entry.attempts += 1
        self._return([entry for entry in batch if entry.attempts <= RETRY_BUDGET])
        for entry in batch:
            if entry.attempts > RETRY_BUDGET:
                self._ends.given_up(entry, ErrorCode.WORKER_LOST)

    def _ran(self, line: WorkerConnection, batch: list[DirectEntry], outcomes: list[Outcome]) -> None:
        by_id = {outcome.id: outcome for outcome in outcomes}
        again: list[DirectEntry] = []
        for entry in batch:
            outcome = by_id.get(entry.id)
            if outcome is None:
                self._ends.given_up(entry, ErrorCode.INTERNAL_ERROR)
            elif outcome.error_code == ErrorCode.GPU_TIMEOUT and self._again(entry):
                again.append(entry)
            else:
                self._ends.ran(entry, outcome, line.worker_id, len(batch))
        if again:
            self.lost_calls += 1
            self._return(again)

    def _again(self, entry: DirectEntry) -> bool:
        """The model hung with it: whether it is run again, by another worker or the next model of this one, alone."""
        entry.attempts += 1
        in_time = entry.pending.deadline - self._clock() > END_MARGIN_S + REST_S
        return entry.attempts <= RETRY_BUDGET and in_time and self._ends.may_run(entry)


def _item(entry: DirectEntry, now: float) -> DirectItem:
    left_s = entry.pending.deadline - now - END_MARGIN_S
    return DirectItem(entry.id, max(1, int(left_s * 1000)), entry.pending.submission.body)


FIRST_S = 5.0
EVERY_S = 1.0
WELL_S, ILL_S = 30.0, 5.0  # Until a worker is probed again.
FAILURES = 2


class Unreachable(NamedTuple):
    """A worker whose direct endpoint cannot be used from here, and why in one sentence."""

    worker_id: str
    address: str
    why: str


class _Probed(NamedTuple):
    due: float
    failures: int = 0
    why: str = ""


class DirectProbe:
    """The loop. `workers` gives those that are known now, `wanted` whether to probe at all; `clock` is monotonic seconds."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerView]],
        wanted: Callable[[], bool],
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._wanted = wanted
        self._hello = hello
        self._clock = clock
        self._probed: dict[tuple[str, str], _Probed] = {}

    @property
    def unreachable(self) -> tuple[Unreachable, ...]:
        """Those that failed more than once in a row."""
        return tuple(Unreachable(*key, each.why) for key, each in self._probed.items() if each.failures >= FAILURES)

    async def run(self) -> None:
        """Probe for ever."""
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001  # no fault may end this loop
                log_fault("probing direct endpoints failed", error)
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Probe the worker that is longest due, if any."""
        known = {(worker.id, worker.direct) for worker in self._workers() if worker.healthy and worker.direct}
        self._probed = {key: each for key, each in self._probed.items() if key in known}
        now = self._clock()
        due = {key: self._probed.get(key, _Probed(0.0)) for key in known}
        key = min(due, key=lambda each: due[each].due, default=None)
        if key is None or due[key].due > now or not self._wanted():
            return
        before, line = due[key], WorkerConnection(*key, self._hello)
        try:
            await line.connect()
        except DirectError as error:
            self._probed[key] = _Probed(now + ILL_S, before.failures + 1, str(error))
        else:
            self._probed[key] = _Probed(now + WELL_S)
        finally:
            line.close()
