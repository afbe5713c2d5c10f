"""Direct batches run on the same model as those of the queue.

There is no lease and no reaper: the worker itself reruns what a lost model process leaves, first in halves, then one by
one, so that a request that kills the model is finally alone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from gpu_pool.model_process.handle import ModelLost, RunRefused
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.model_process.watchdog import ModelHung
from gpu_pool.worker.execution import Execution, NotStarted, not_run
from gpu_pool.worker.traces import BatchTrace, BatchTraces
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.protocol.batches import RETRY_BUDGET, ClaimedRequest, Outcome
from scheduler.protocol.direct import DirectItem

MOST_WAITING = 4

log = structlog.get_logger()


class BatchRejected(TierlaneError):
    """The batch was not run; the message is the reason for the gateway. Another worker may run it."""


class DirectBatches:
    """Runs the direct batches of all connections; at most MOST_WAITING wait for the model."""

    def __init__(
        self, execution: Execution, supervisor: ModelSupervisor, draining: Callable[[], bool], traces: BatchTraces
    ) -> None:
        self._execution = execution
        self._supervisor = supervisor
        self._draining = draining
        self._traces = traces
        self._waiting = 0
        self._runs: set[asyncio.Task[list[Outcome]]] = set()
        self.in_flight = 0

    async def run(self, items: Sequence[DirectItem]) -> list[Outcome]:
        """One outcome for each item, at the latest when the last item's time is over. Raises BatchRejected."""
        requests = [ClaimedRequest(item.id, item.ms_left, 1, item.body) for item in items]
        if self._execution.slow_model.confirmed:  # Even while its process is being replaced.
            return _ended(requests, ErrorCode.MODEL_TOO_SLOW)
        if self._draining():
            raise BatchRejected("This worker is shutting down.")
        if self._supervisor.model is None:
            raise BatchRejected("The model of this worker is not ready.")
        if self._waiting >= MOST_WAITING:
            raise BatchRejected("Too many direct batches wait for this worker.")
        read_at = time.monotonic()
        longest_s = max((item.ms_left for item in items), default=0) / 1000
        run_task = self._start(requests, read_at)
        # A run past its deadline continues: killing the model for it would cost the next batch more.
        # A run that has not begun will find that no time is left.
        await asyncio.wait([run_task], timeout=longest_s)
        if not run_task.done():
            return [_deadline_exceeded(request.id) for request in requests]
        # Requests that were overdue when the batch ended got an error from their gateway; the outcome must match.
        gone_ms = (time.monotonic() - read_at) * 1000
        late = {request.id for request in requests if request.ms_left <= gone_ms}
        return [_deadline_exceeded(each.id) if each.id in late else each for each in run_task.result()]

    async def settled(self, timeout_s: float | None) -> None:
        """Wait until nothing runs, for at most `timeout_s`."""
        if self._runs:
            await asyncio.wait(self._runs, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel what is left."""
        for run_task in self._runs:
            run_task.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)

    def _start(self, requests: Sequence[ClaimedRequest], read_at: float) -> asyncio.Task[list[Outcome]]:
        self._waiting += 1
        run_task = asyncio.create_task(self._attempt(requests, read_at, 0), name="direct")
        self._runs.add(run_task)
        self.in_flight += len(requests)

        def ended(run_task: asyncio.Task[list[Outcome]]) -> None:
            self._runs.discard(run_task)
            self.in_flight -= len(requests)
            if not run_task.cancelled() and run_task.exception() is not None:
                log.warning("direct batch not run", reason=str(run_task.exception()), size=len(requests))

        run_task.add_done_callback(ended)
        return run_task

    async def _attempt(self, requests: Sequence[ClaimedRequest], read_at: float, losses: int) -> list[Outcome]:
        """Run these requests; after a lost model run them again in smaller parts, while there is time and retry budget.

        The caller has counted them in `_waiting`.
        """
        model = self._execution.slow_model
        if model.slow:
            self._waiting -= 1
            if not model.confirmed and losses == 0:
                raise BatchRejected("The model of this worker is being measured.")
            return _ended(requests, ErrorCode.MODEL_TOO_SLOW)
        try:
            with self._traces.of("", requests, read_at) as trace:
                found = await self._execution.run(
                    trace.requests, read_at, lambda: self._start_running(trace), trace.over
                )
                trace.ended(found)
                return found
        except ModelHung:
            return _ended(requests, ErrorCode.GPU_TIMEOUT)
        except RunRefused as error:
            if losses == 0 and not error.counted:
                raise BatchRejected(str(error)) from error
            losses += 1
        except ModelLost as error:
            if self._execution.stopped or self._draining():
                raise BatchRejected("This worker is shutting down.") from error
            if not isinstance(error, NotStarted):
                losses += 1
            elif losses == 0:
                raise BatchRejected("The model of this worker was lost before the batch began.") from error
        if losses > RETRY_BUDGET:
            return _ended(requests, ErrorCode.WORKER_LOST)
        # The next model process is waited for while any of these requests has time.
        until, is_ready = read_at + max(request.ms_left for request in requests) / 1000, False
        with suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                is_ready = await self._supervisor.ready.wait()
        if not is_ready:
            return _ended(requests, ErrorCode.DEADLINE_EXCEEDED)
        outcomes: list[Outcome] = []
        for part in parts(requests, losses):
            self._waiting += 1
            outcomes += await self._attempt(part, read_at, losses)
        return outcomes

    def _start_running(self, trace: BatchTrace) -> bool:
        self._waiting -= 1
        trace.begins()
        return True


def parts(requests: Sequence[ClaimedRequest], losses: int) -> list[Sequence[ClaimedRequest]]:
    """What runs together after so many lost model processes: two halves, later single requests."""
    size = (len(requests) + 1) // 2 if losses == 1 else 1
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _ended(requests: Sequence[ClaimedRequest], code: ErrorCode) -> list[Outcome]:
    return [not_run(request.id, code, "") for request in requests]


def _deadline_exceeded(request_id: str) -> Outcome:
    return not_run(request_id, ErrorCode.DEADLINE_EXCEEDED, "The deadline of this request came before its response.")
