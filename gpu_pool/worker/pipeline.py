"""The path of one batch id from the queue: claim, run under a lease, settle.

The next batch is claimed shortly before the model is free (gpu_pool/worker/prefetch.py), and runs while the last one is
being finished, at most two of them. Every claimed batch ends in exactly one of these ways, each idempotent by the
batch's token:

    finish      the model answered, or no member could be run
    fail        the model process was lost or hung; members are retried, an attempt is counted
    release     the worker stops, or lost its model, before the run began or could end, or the model hands the batch
                back; no attempt is counted
    nothing     the lease was lost: another worker has the batch
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.handle import ModelLost, RunRefused
from gpu_pool.model_process.watchdog import ModelHung
from gpu_pool.worker.execution import Execution, NotStarted
from gpu_pool.worker.lease import Lease
from gpu_pool.worker.prefetch import Prefetch, PrefetchSlot
from gpu_pool.worker.streams import BatchStreams, Outgoing
from gpu_pool.worker.traces import BatchTrace, BatchTraces
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.protocol.batches import Batches, ClaimedBatch, Outcome
from scheduler.redis_client.backoff import Backoff

MOST_SETTLING = 2
GIVE_UP_S = 1.0  # At least; by then the lease has expired and the reaper requeues the batch.
_SLOWEST_RETRY_S = 0.5

log = structlog.get_logger()


class BatchPipeline:
    """One running batch, one prefetched, and a few being settled. `can_claim`: another
    batch may be claimed. `sending` is called when the end of a batch is about to be sent to Redis.
    """

    def __init__(
        self,
        config: WorkerConfig,
        batches: Batches,
        execution: Execution,
        outgoing: Outgoing,
        sending: Callable[[], None],
        *,
        traces: BatchTraces,
    ) -> None:
        self._config = config
        self._outgoing = outgoing
        self._sending = sending
        self._traces = traces
        self._batches = batches
        self._execution = execution
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = 0
        self._prefetch = Prefetch(self._update_can_claim)
        self.in_flight = 0
        self.can_claim = asyncio.Event()
        self.can_claim.set()

    async def take(self, batch_id: str, *, backlog: bool = True) -> None:
        """Claim one batch and start serving it. Raises RedisUnavailable.

        `backlog`: it came soon, so the next one may be prefetched. Otherwise prefetching would only cost a wake-up.
        """
        token = secrets.token_hex(16)
        claimed_at = time.monotonic()
        try:
            batch = await self._batches.claim(batch_id, self._config.worker_id, token)
        except RedisUnavailable:
            # The claim may have succeeded: then no attempt must be lost; if not, the id is in no queue.
            self._start(self._undo_claim(batch_id, token), 0)
            raise
        if batch is not None and batch.requests:
            failpoint("batch_claimed")
            streams = BatchStreams(batch.requests, self._outgoing)
            lease = Lease(self._batches, batch.batch_id, batch.token, self._config.renew_ms / 1000, streams)
            slot = self._prefetch.slot(ahead=backlog)
            self._start(self._serve(batch, lease, streams, slot, claimed_at), len(batch.requests))

    def drain(self) -> None:
        """Start nothing more; a prefetched batch is handed back."""
        self._prefetch.stop()

    async def settled(self, timeout_s: float | None) -> None:
        """Wait until every batch is settled, for at most `timeout_s`. Each is bounded by its requests' deadlines."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel what is left; the reaper requeues it when its lease expires."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, batch: ClaimedBatch, lease: Lease, streams: BatchStreams, slot: PrefetchSlot, claimed_at: float
    ) -> None:
        # The lease is renewed from the claim on, also while other batches or direct batches have the model.
        # Not claiming meanwhile would let a series of direct batches starve the queue. The wait is bounded:
        # the model serves batches in order of arrival, few batches wait, and the watchdog ends each.
        give_up_at = claimed_at + max([request.ms_left for request in batch.requests]) / 1000
        outcomes: list[Outcome] | None = None
        cause: ErrorCode | None = None  # Of a lost batch whose attempt is counted.
        with self._traces.of(batch.batch_id, batch.requests, claimed_at) as trace:
            batch = batch._replace(requests=trace.requests)
            try:
                outcomes = await self._outcomes(batch, lease, streams, slot, trace)
                trace.ended(outcomes)
                failpoint("batch_ran")
            except (ModelLost, ModelHung, RunRefused) as error:
                streams.lost()
                refused = isinstance(error, RunRefused) and not error.counted
                if not (self._execution.stopped or refused or isinstance(error, NotStarted)):
                    cause = ErrorCode.GPU_TIMEOUT if isinstance(error, ModelHung) else ErrorCode.WORKER_LOST
                trace.lost(cause)
            except BaseException:
                lease.stop()  # A bug, or a cancelled task: the reaper requeues the batch when its lease expires.
                raise
            finally:
                slot.release()
            with self._settles():
                try:
                    if outcomes is None:
                        await self._hand_back(batch, lease, cause)
                    elif lease.lost:
                        log.warning("lease lost; result dropped", batch=batch.batch_id, size=len(batch.requests))
                    else:
                        self._sending()
                        finish = partial(self._batches.finish, batch.batch_id, batch.token, outcomes)
                        await self._retry(finish, give_up_at)  # A client may still wait until then.
                        failpoint("batch_finished")
                finally:
                    await lease.close()

    async def _outcomes(
        self, batch: ClaimedBatch, lease: Lease, streams: BatchStreams, slot: PrefetchSlot, trace: BatchTrace
    ) -> list[Outcome]:
        def over() -> None:
            trace.over()
            slot.release()

        def begins() -> bool:
            slot.started(self._execution.service.predicted_ms(len(batch.requests)))
            if lease.lost:
                return False
            trace.begins()
            return True

        if not await slot.granted:
            raise NotStarted("The worker is stopping.")
        return await self._execution.run(batch.requests, trace.began, begins, over, streams)

    async def _hand_back(self, batch: ClaimedBatch, lease: Lease, cause: ErrorCode | None) -> None:
        lease.stop()
        min_left_ms = int(self._execution.service.needed_ms(len(batch.requests)))
        give_up_at = self._give_up_at()
        if cause is None:
            failpoint("drain_unreleased")
            await self._retry(lambda: self._batches.release(batch.batch_id, batch.token), give_up_at)
            log.info("batch handed back", batch=batch.batch_id, size=len(batch.requests))
            return
        failpoint("loss_unreported")
        await self._retry(lambda: self._batches.fail(batch.batch_id, batch.token, cause, min_left_ms), give_up_at)
        log.warning("batch failed", batch=batch.batch_id, size=len(batch.requests), cause=str(cause))

    async def _undo_claim(self, batch_id: str, token: str) -> None:
        async def undo() -> None:
            if not await self._batches.release(batch_id, token):
                await self._batches.push_back(batch_id)

        with self._settles():
            await self._retry(undo, self._give_up_at())

    def _give_up_at(self) -> float:
        return time.monotonic() + max(GIVE_UP_S, self._config.lease_ms / 1000)

    async def _retry(self, call: Callable[[], Awaitable[object]], give_up_at: float) -> None:
        backoff = Backoff(most_s=_SLOWEST_RETRY_S)
        while True:
            try:
                await call()
                return
            except RedisUnavailable:
                delay_s = backoff.next_s()
                if time.monotonic() + delay_s >= give_up_at:
                    log.warning("redis unavailable; the reaper will requeue the batch")
                    return
            await asyncio.sleep(delay_s)

    @contextmanager
    def _settles(self) -> Iterator[None]:
        """A batch is being settled."""
        self._settling += 1
        self._update_can_claim()
        try:
            yield
        finally:
            self._settling -= 1
            self._update_can_claim()

    def _start(self, work: Coroutine[Any, Any, None], size: int) -> None:
        task = asyncio.create_task(work, name="batch")
        self._tasks.add(task)
        self.in_flight += size

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.in_flight -= size
            if not task.cancelled() and task.exception() is not None:
                log.error("batch not settled", error=type(task.exception()).__name__)

        task.add_done_callback(ended)

    def _update_can_claim(self) -> None:
        if self._settling < MOST_SETTLING and self._prefetch.wants_next:
            self.can_claim.set()
        else:
            self.can_claim.clear()
