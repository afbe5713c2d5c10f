"""Batches of queued requests on the connections to all workers, one at a time on each.

A batch is sent once the accepted records of its requests are on disk. A busy worker's batch returns to the head of the
queue, and the connection pauses briefly. The batch of a lost call also returns, and is then sent in single requests, as is a
batch whose model hung. After the third loss a request fails.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import structlog

from gateway.circuit_breaker import BreakerState
from gateway.direct.completion import END_MARGIN_S, DirectCompletion
from gateway.direct.queue import DirectEntry, DirectQueue
from gateway.direct.worker_connection import WorkerBusy, WorkerConnection
from ratelimit.request_limits import FUNCTION, LANGUAGE_MODEL, limits_of_workers
from scheduler.errors import ErrorCode
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.batches import RETRY_BUDGET, Outcome
from scheduler.protocol.direct import DirectError, DirectItem, Hello
from scheduler.protocol.pool_view import WorkerView

PAUSE_S = 0.02
SLOW_PAUSE_S = 0.5  # Before the next batch of a worker whose model is too slow, while others serve.
RESPONSE_MARGIN_S = 0.05  # After the deadline of a batch: time in which the worker reports that it is overdue.
MIN_TIMEOUT_S = 1.0
TIMEOUT_RUNS = 8  # Runs of p95 duration: one running batch and four queued ones may be served first.

log = structlog.get_logger("gateway")


def call_timeout_s(worker: WorkerView) -> float:
    """Seconds for a call. The answer of a language model may take many times the usual one: only its deadline ends it."""
    if limits_of_workers([worker], FUNCTION) == LANGUAGE_MODEL:
        return math.inf
    return max(MIN_TIMEOUT_S, TIMEOUT_RUNS * worker.service_p95_ms / 1000)


class WorkerConnections:
    """The connections to all workers while direct mode is on, one task each. `clock`: monotonic seconds."""

    def __init__(
        self, queue: DirectQueue, hello: Hello, completion: DirectCompletion, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._hello = hello
        self._completion = completion
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
        batch = [entry for entry in self._queue.pick(connection.max_batch) if self._completion.may_run(entry)]
        if batch:
            await self._serve(connection, batch)
        elif not len(self._queue):
            self._work.clear()

    async def _serve(self, connection: WorkerConnection, batch: list[DirectEntry]) -> None:
        try:
            batch = await self._completion.record_accepted(batch)
            outcomes = await self._call(connection, batch) if batch else []
        except WorkerBusy:
            self._return(batch)
            await asyncio.sleep(PAUSE_S)
        except DirectError as error:
            self._failed(connection, str(error))
            for entry in batch:
                entry.attempts += 1
            self._return([entry for entry in batch if entry.attempts <= RETRY_BUDGET])
            for entry in batch:
                if entry.attempts > RETRY_BUDGET:
                    self._completion.give_up(entry, ErrorCode.WORKER_LOST)
        except asyncio.CancelledError:  # The connection is closed; its requests stay open.
            self._return(batch)
            raise
        else:
            self._ran(connection, batch, outcomes)

    async def _call(self, connection: WorkerConnection, batch: list[DirectEntry]) -> list[Outcome]:
        now = self._clock()
        for entry in batch:
            entry.started_at = now
        items = [
            DirectItem(
                entry.id,
                max(1, int((entry.pending.deadline - now - END_MARGIN_S) * 1000)),
                entry.pending.submission.body,
            )
            for entry in batch
        ]
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

    def _ran(self, connection: WorkerConnection, batch: list[DirectEntry], outcomes: list[Outcome]) -> None:
        by_id = {outcome.id: outcome for outcome in outcomes}
        retried: list[DirectEntry] = []
        refused: list[DirectEntry] = []  # By this worker; another one may run them.
        if outcomes:
            connection.slow = all(outcome.error_code == ErrorCode.MODEL_TOO_SLOW for outcome in outcomes)
        for entry in batch:
            outcome = by_id.get(entry.id)
            if outcome is None:
                self._completion.give_up(entry, ErrorCode.INTERNAL_ERROR)
            elif outcome.error_code == ErrorCode.GPU_TIMEOUT and self._may_retry(entry):
                retried.append(entry)
            elif outcome.error_code == ErrorCode.MODEL_TOO_SLOW and self._others_serve(connection):
                refused.append(entry)
            else:
                self._completion.ran(entry, outcome, connection.worker_id, len(batch))
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
        return entry.attempts <= RETRY_BUDGET and in_time and self._completion.may_run(entry)
