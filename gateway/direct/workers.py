"""Connections to the workers' direct endpoints: one batch at a time on each, and a probe while they are not needed.

A connection starts with a hello (scheduler/protocol/direct.py has the wire format). A batch is sent once the accepted
records of its requests are on disk. A busy worker's batch returns to the head of the queue, and the connection pauses
briefly. The batch of a lost call also returns, and is then sent in single requests, as is a batch whose model hung. After
the third loss a request fails.

The probe detects an address that cannot be reached, or a wrong token, before direct mode needs the endpoint. One probe
runs per second, and each worker is probed every 30 seconds. A failed probe is retried sooner, and reported after the
second failure.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import structlog

from gateway.circuit_breaker import Breaker, BreakerState
from gateway.direct.queue import DirectEntry, DirectQueue
from gateway.inference.deadlines import LEAD_S
from ratelimit.request_limits import FUNCTION, LANGUAGE_MODEL, limits_of_workers
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.fault_log import LoggedFaults
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
"""For the connection, and again for the worker's welcome."""


NO_WELCOME = (
    "closed the connection without a welcome: its TIERLANE_DIRECT_TOKEN differs from this gateway's, it has an older "
    "version, or it is shutting down."
)


class WorkerBusy(TierlaneError):
    """The worker did not run the batch; it may be sent to another worker."""


class WorkerConnection:
    """A connection and its circuit breaker. An error closes the connection, and the next call opens another."""

    def __init__(self, worker_id: str, address: str, hello: Hello) -> None:
        self.worker_id = worker_id
        self.address = address
        self.breaker = Breaker(max_failures=1, silence_s=None)
        self.max_batch = 1
        self.slow = False  # In its last response, the worker reported that its model is too slow.
        self._hello = pack(hello)
        self._seq = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Connect, and receive the welcome. Raises DirectError."""
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
            raise DirectError(f"The worker at {self.address} {NO_WELCOME}") from error
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} cannot be called: {type(error).__name__}.") from error
        except BaseException:
            self.close()
            raise
        if not isinstance(welcome, Welcome):
            self.close()
            raise DirectError(f"The worker at {self.address} sent no welcome.")
        self.max_batch = max(1, welcome.max_batch)

    async def call(self, items: Sequence[DirectItem], timeout_s: float) -> list[Outcome]:
        """Run a batch. Raises WorkerBusy if it did not run, DirectError if its result is not known."""
        self._seq += 1
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(pack(DirectBatch(self._seq, list(items))))
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} was lost: {type(error).__name__}.") from error
        except BaseException:  # After a cancelled call, the next response on this connection belongs to that call.
            self.close()
            raise
        if isinstance(answer, Welcome) or answer.seq != self._seq:
            self.close()
            raise DirectError(f"The worker at {self.address} sent a response to another request.")
        if isinstance(answer, DirectBusy):
            raise WorkerBusy(answer.reason)
        return answer.outcomes

    def close(self) -> None:
        """Close the connection."""
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


PAUSE_S = 0.02
SLOW_PAUSE_S = 0.5  # Before the next batch of a worker whose model is too slow, while others serve.
END_MARGIN_S = LEAD_S + 0.075  # Before the deadline sweep: time to write the audit to disk.
RESPONSE_MARGIN_S = 0.05  # After the deadline of a batch: time in which the worker reports that it is overdue.
MIN_TIMEOUT_S = 1.0
TIMEOUT_RUNS = 8  # Runs of p95 duration: one running batch and four queued ones may be served first.

log = structlog.get_logger("gateway")


def call_timeout_s(worker: WorkerView) -> float:
    """Seconds for a call. The answer of a language model may take many times the usual one: only its deadline ends it."""
    if limits_of_workers([worker], FUNCTION) == LANGUAGE_MODEL:
        return math.inf
    return max(MIN_TIMEOUT_S, TIMEOUT_RUNS * worker.service_p95_ms / 1000)


class BatchEvents(Protocol):
    """Receives the results of requests. A protocol, because `DirectCompletion` imports this module."""

    def may_run(self, entry: DirectEntry) -> bool: ...

    async def record_accepted(self, batch: list[DirectEntry]) -> list[DirectEntry]: ...

    def ran(self, entry: DirectEntry, outcome: Outcome, worker_id: str, batch_size: int) -> None: ...

    def give_up(self, entry: DirectEntry, code: ErrorCode) -> None: ...


class WorkerConnections:
    """The connections to all workers while direct mode is on, one task each. `clock`: monotonic seconds."""

    def __init__(self, queue: DirectQueue, hello: Hello, events: BatchEvents, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._hello = hello
        self._events = events
        self._clock = clock
        self._connections: dict[str, tuple[WorkerConnection, asyncio.Task[None]]] = {}
        self._work = asyncio.Event()
        self._timeouts_s: dict[str, float] = {}

    @property
    def available(self) -> int:
        """The number of workers whose circuit breaker is closed."""
        return sum(connection.breaker.state is BreakerState.CLOSED for connection, _ in self._connections.values())

    def breakers(self) -> dict[str, str]:
        """The state of each worker's breaker."""
        return {connection.worker_id: connection.breaker.state.value for connection, _ in self._connections.values()}

    def update(self, workers: Sequence[WorkerView]) -> None:
        """Connect to each worker that has an endpoint. No connection is closed: a Redis that returned may list fewer workers."""
        for worker in workers:
            if worker.direct and worker.direct not in self._connections:
                self._timeouts_s[worker.direct] = call_timeout_s(worker)
                connection = WorkerConnection(worker.id, worker.direct, self._hello)
                task = asyncio.get_running_loop().create_task(
                    self._run(connection), name=f"direct connection {worker.id}"
                )
                self._connections[worker.direct] = connection, task

    def wake(self) -> None:
        """Requests are queued."""
        self._work.set()

    def close_all(self) -> list["asyncio.Task[None]"]:
        """Cancel the tasks of all connections. Returns the tasks."""
        tasks = [task for _, task in self._connections.values()]
        self._connections.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def _run(self, connection: WorkerConnection) -> None:
        try:
            while True:
                await self._work.wait()
                with LoggedFaults("a direct call failed"):
                    await self._step(connection)
                    continue
                await asyncio.sleep(PAUSE_S)
        finally:
            connection.close()

    async def _step(self, connection: WorkerConnection) -> None:
        """Connect if necessary, then take a batch from the queue and serve it."""
        if not connection.breaker.may_call(self._clock()):
            await asyncio.sleep(PAUSE_S)
            return
        try:
            await connection.connect()
        except DirectError as error:
            self._failed(connection, str(error))
            return
        connection.breaker.succeeded()
        if connection.slow and self._others_serve(connection):
            await asyncio.sleep(SLOW_PAUSE_S)
        batch = [entry for entry in self._queue.pick(connection.max_batch) if self._events.may_run(entry)]
        if batch:
            await self._serve(connection, batch)
        elif not len(self._queue):
            self._work.clear()

    async def _serve(self, connection: WorkerConnection, batch: list[DirectEntry]) -> None:
        try:
            batch = await self._events.record_accepted(batch)
            outcomes = await self._call(connection, batch) if batch else []
        except WorkerBusy:
            self._return(batch)
            await asyncio.sleep(PAUSE_S)
        except DirectError as error:
            self._failed(connection, str(error))
            self._retry_lost(batch)
        except asyncio.CancelledError:  # The connection is closed; its requests stay open.
            self._return(batch)
            raise
        else:
            self._ran(connection, batch, outcomes)

    async def _call(self, connection: WorkerConnection, batch: list[DirectEntry]) -> list[Outcome]:
        now = self._clock()
        for entry in batch:
            entry.started_at = now
        items = [_item(entry, now) for entry in batch]
        longest_s = max(item.ms_left for item in items) / 1000 + RESPONSE_MARGIN_S
        return await connection.call(items, min(longest_s, self._timeouts_s[connection.address]))

    def _failed(self, connection: WorkerConnection, reason: str) -> None:
        connection.breaker.failed(self._clock())
        log.warning("direct call failed", worker=connection.worker_id, reason=reason)

    def _return(self, batch: list[DirectEntry]) -> None:
        for entry in batch:
            entry.started_at = None
        self._queue.put_back(batch)
        self._work.set()

    def _retry_lost(self, batch: list[DirectEntry]) -> None:
        for entry in batch:
            entry.attempts += 1
        self._return([entry for entry in batch if entry.attempts <= RETRY_BUDGET])
        for entry in batch:
            if entry.attempts > RETRY_BUDGET:
                self._events.give_up(entry, ErrorCode.WORKER_LOST)

    def _ran(self, connection: WorkerConnection, batch: list[DirectEntry], outcomes: list[Outcome]) -> None:
        by_id = {outcome.id: outcome for outcome in outcomes}
        retried: list[DirectEntry] = []
        refused: list[DirectEntry] = []  # By this worker; another one may run them.
        if outcomes:
            connection.slow = all(outcome.error_code == ErrorCode.MODEL_TOO_SLOW for outcome in outcomes)
        for entry in batch:
            outcome = by_id.get(entry.id)
            if outcome is None:
                self._events.give_up(entry, ErrorCode.INTERNAL_ERROR)
            elif outcome.error_code == ErrorCode.GPU_TIMEOUT and self._may_retry(entry):
                retried.append(entry)
            elif outcome.error_code == ErrorCode.MODEL_TOO_SLOW and self._others_serve(connection):
                refused.append(entry)
            else:
                self._events.ran(entry, outcome, connection.worker_id, len(batch))
        if retried or refused:
            self._return([*retried, *refused])

    def _others_serve(self, slow: WorkerConnection) -> bool:
        """Whether another worker that can be called has not reported that its model is too slow."""
        others = (connection for connection, _ in self._connections.values() if connection is not slow)
        return any(other.breaker.state is BreakerState.CLOSED and not other.slow for other in others)

    def _may_retry(self, entry: DirectEntry) -> bool:
        """Count a loss of a request whose model hung. Returns whether to run it again, alone."""
        entry.attempts += 1
        in_time = entry.pending.deadline - self._clock() > END_MARGIN_S + PAUSE_S
        return entry.attempts <= RETRY_BUDGET and in_time and self._events.may_run(entry)


def _item(entry: DirectEntry, now: float) -> DirectItem:
    left_s = entry.pending.deadline - now - END_MARGIN_S
    return DirectItem(entry.id, max(1, int(left_s * 1000)), entry.pending.submission.body)


FIRST_PROBE_S = 5.0
PROBE_INTERVAL_S = 1.0
HEALTHY_INTERVAL_S, FAILED_INTERVAL_S = 30.0, 5.0  # Until the next probe of a worker.
MIN_FAILURES = 2


class Unreachable(NamedTuple):
    """A worker whose direct endpoint this gateway cannot use, and the reason in one sentence."""

    worker_id: str
    address: str
    why: str


class _Probed(NamedTuple):
    due: float
    failures: int = 0
    why: str = ""


class DirectProbe:
    """Probes direct endpoints. `workers`: the known workers; `enabled`: whether to probe; `clock`: monotonic seconds."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerView]],
        enabled: Callable[[], bool],
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._enabled = enabled
        self._hello = hello
        self._clock = clock
        self._probed: dict[tuple[str, str], _Probed] = {}

    @property
    def unreachable(self) -> tuple[Unreachable, ...]:
        """Workers whose last two probes or more failed."""
        return tuple(Unreachable(*key, each.why) for key, each in self._probed.items() if each.failures >= MIN_FAILURES)

    async def run(self) -> None:
        """Probe one worker a second; never returns."""
        await asyncio.sleep(FIRST_PROBE_S)
        while True:
            with LoggedFaults("probing direct endpoints failed"):
                await self.probe_next()
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def probe_next(self) -> None:
        """Probe the worker whose probe is due for the longest time, if any."""
        known = {(worker.id, worker.direct) for worker in self._workers() if worker.healthy and worker.direct}
        self._probed = {key: each for key, each in self._probed.items() if key in known}
        now = self._clock()
        due = {key: self._probed.get(key, _Probed(0.0)) for key in known}
        key = min(due, key=lambda each: due[each].due, default=None)
        if key is None or due[key].due > now or not self._enabled():
            return
        before, connection = due[key], WorkerConnection(*key, self._hello)
        try:
            await connection.connect()
        except DirectError as error:
            self._probed[key] = _Probed(now + FAILED_INTERVAL_S, before.failures + 1, str(error))
        else:
            self._probed[key] = _Probed(now + HEALTHY_INTERVAL_S)
        finally:
            connection.close()
