"""What a worker does with a direct batch: run it on the model that the queue uses too, while somebody waits for it.

There is no lease and no reaper here, and nobody else who could try again: what a lost model process leaves is run again
by this worker, first in halves, then one by one, so that a request that kills the model is alone at its end.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from gpu_pool.model_process.handle import ModelLost, RunRefused
from gpu_pool.model_process.supervisor import ModelKeeper
from gpu_pool.outcomes import not_run
from gpu_pool.watchdog import ModelHung
from gpu_pool.worker.execution import Execution, NotStarted
from gpu_pool.worker.traces import BatchTrace, BatchTraces
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.protocol.batches import RETRY_BUDGET, ClaimedRequest, Outcome
from scheduler.protocol.direct import DirectItem

MOST_WAITING = 4

log = structlog.get_logger()


class NotTaken(TierlaneError):
    """The batch was not run, and why in one sentence for the gateway; another worker may take it."""


class DirectBatches:
    """Runs direct batches of all connections; at most MOST_WAITING wait for the model."""

    def __init__(
        self, execution: Execution, keeper: ModelKeeper, draining: Callable[[], bool], traces: BatchTraces
    ) -> None:
        self._execution = execution
        self._keeper = keeper
        self._draining = draining
        self._traces = traces
        self._waiting = 0
        self._works: set[asyncio.Task[list[Outcome]]] = set()
        self.in_flight = 0

    async def run(self, items: Sequence[DirectItem]) -> list[Outcome]:
        """One outcome for each item, at the latest when the last one's time is over. Raises NotTaken."""
        self._check()
        read_at = time.monotonic()
        requests = [ClaimedRequest(item.id, item.ms_left, 1, item.body) for item in items]
        longest_s = max((item.ms_left for item in items), default=0) / 1000
        work = self._start(requests, read_at)
        # A run that nobody waits for any more goes on to its end: killing the model for it would cost the next one.
        # One that did not begin yet will find, when its turn comes, that it has no time left.
        await asyncio.wait([work], timeout=longest_s)
        if not work.done():
            return [_overdue(request.id) for request in requests]
        return _in_time(work.result(), requests, (time.monotonic() - read_at) * 1000)

    async def settled(self, timeout_s: float) -> None:
        """Wait until nothing runs, at most so long."""
        if self._works:
            await asyncio.wait(self._works, timeout=timeout_s)

    async def close(self) -> None:
        """Drop what is left."""
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)

    def _check(self) -> None:
        if self._draining():
            raise NotTaken("This worker is shutting down.")
        if self._keeper.model is None:
            raise NotTaken("The model of this worker is not ready.")
        if self._waiting >= MOST_WAITING:
            raise NotTaken("Too many direct batches wait for this worker.")

    def _start(self, requests: Sequence[ClaimedRequest], read_at: float) -> asyncio.Task[list[Outcome]]:
        self._waiting += 1
        work = asyncio.create_task(self._attempt(requests, read_at, 0), name="direct")
        self._works.add(work)
        self.in_flight += len(requests)

        def ended(work: asyncio.Task[list[Outcome]]) -> None:
            self._works.discard(work)
            self.in_flight -= len(requests)
            if not work.cancelled() and work.exception() is not None:
                log.warning("direct batch not run", reason=str(work.exception()), size=len(requests))

        work.add_done_callback(ended)
        return work

    async def _attempt(self, requests: Sequence[ClaimedRequest], read_at: float, losses: int) -> list[Outcome]:
        """Run these; what kills the model is run again in smaller parts, as long as there is time and budget.

        Whoever calls this has counted them among those that wait.
        """
        try:
            return await self._run(requests, read_at)
        except ModelHung:
            return _ended(requests, ErrorCode.GPU_TIMEOUT)
        except RunRefused as error:
            if losses == 0 and not error.counted:
                raise NotTaken(str(error)) from error
            losses += 1
        except ModelLost as error:
            if self._execution.stopped or self._draining():
                raise NotTaken("This worker is shutting down.") from error
            if not isinstance(error, NotStarted):
                losses += 1
            elif losses == 0:
                raise NotTaken("The model of this worker was lost before the batch began.") from error
        if losses > RETRY_BUDGET:
            return _ended(requests, ErrorCode.WORKER_LOST)
        if not await self._model_back(requests, read_at):
            return _ended(requests, ErrorCode.DEADLINE_EXCEEDED)
        outcomes: list[Outcome] = []
        for part in parts(requests, losses):
            self._waiting += 1
            outcomes += await self._attempt(part, read_at, losses)
        return outcomes

    async def _run(self, requests: Sequence[ClaimedRequest], read_at: float) -> list[Outcome]:
        with self._traces.of("", requests, read_at) as trace:
            outcomes = await self._execution.run(trace.requests, read_at, lambda: self._leave_line(trace), trace.over)
            trace.ended(outcomes)
            return outcomes

    def _leave_line(self, trace: BatchTrace) -> bool:
        self._waiting -= 1
        trace.begins()
        return True

    async def _model_back(self, requests: Sequence[ClaimedRequest], read_at: float) -> bool:
        """Wait for the next model process, as long as any of these has time; whether it came."""
        until = read_at + max(request.ms_left for request in requests) / 1000
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await self._keeper.ready.wait()
        except TimeoutError:
            return False


def parts(requests: Sequence[ClaimedRequest], losses: int) -> list[Sequence[ClaimedRequest]]:
    """What runs together after so many lost model processes: two halves, later each alone."""
    size = (len(requests) + 1) // 2 if losses == 1 else 1
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _in_time(outcomes: Sequence[Outcome], requests: Sequence[ClaimedRequest], gone_ms: float) -> list[Outcome]:
    """Whoever's time was over before the batch was has been told so by its gateway; its end must be the same here."""
    late = {request.id for request in requests if request.ms_left <= gone_ms}
    return [_overdue(outcome.id) if outcome.id in late else outcome for outcome in outcomes]


def _ended(requests: Sequence[ClaimedRequest], code: ErrorCode) -> list[Outcome]:
    return [not_run(request.id, code, "") for request in requests]


def _overdue(request_id: str) -> Outcome:
    return not_run(request_id, ErrorCode.DEADLINE_EXCEEDED, "The time of this request was over before its answer.")
