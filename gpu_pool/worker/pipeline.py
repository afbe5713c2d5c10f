"""What a worker does with one batch id from the queue: claim it, run it under a lease, settle it.

The next batch is claimed shortly before the model is free (gpu_pool/worker/prefetch.py), and runs while the last one is
being finished, at most two of them. Every claimed batch ends in exactly one of these, each idempotent by the batch's
token:

    finish      the model answered, or no member could be run
    fail        the model process was lost or hung; members are retried, an attempt is counted
    release     the worker stops, or lost its model, before the run began or could end, or the model hands the batch
                back; no attempt is counted
    nothing     the lease was lost: somebody else has the batch

The lease is renewed from claim until the end is in Redis; renewal reports clients that left. It never outlives the
model's cap: the watchdog ends a batch without progress, and with it this lease.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.handle import ModelHung, ModelLost, RunRefused
from gpu_pool.worker.execution import Execution, NotStarted
from gpu_pool.worker.prefetch import Prefetch, PrefetchSlot
from gpu_pool.worker.streams import BatchStreams, Outgoing
from gpu_pool.worker.traces import BatchTrace, BatchTraces
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.protocol.batches import Batches, ClaimedBatch, Outcome
from scheduler.redis_client.pipeline import Backoff


class Lease:
    """Renews every `every_s` seconds, from its making until `stop`. A batch that ends before that costs a timer only."""

    def __init__(self, batches: Batches, batch_id: str, token: str, every_s: float, streams: BatchStreams) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._token = token
        self._every_s = every_s
        self._streams = streams
        self._renewal: asyncio.Task[None] | None = None
        self._stopped = False
        self.lost = False
        """The batch belongs to somebody else by now: its work must be dropped."""
        self._wait()

    def stop(self) -> None:
        """Renew no more."""
        self._stopped = True
        self._timer.cancel()

    async def close(self) -> None:
        """Stop, and let a renewal that is under way end."""
        self.stop()
        if self._renewal is not None:
            await self._renewal

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._renewal = asyncio.create_task(self._renew(), name="lease")

    async def _renew(self) -> None:
        with suppress(RedisUnavailable):  # The next tick is the retry; the lease spans several.
            found = await self._batches.renew(self._batch_id, self._token, len(self._streams.members))
            self.lost = found is False
            if isinstance(found, frozenset):
                self._streams.only(found)
        if not self.lost and not self._stopped:
            self._wait()


MOST_SETTLING = 2
GIVE_UP_S = 1.0  # A batch not handed back by then has lost its lease: the reaper does the same.
_SLOWEST_RETRY_S = 0.5

log = structlog.get_logger()


class BatchPipeline:
    """One batch that runs (or several, where the model takes them), one claimed ahead, at most as many being settled. `room`: another one may be claimed.

    `sending` is called when the end of a batch is about to be sent to Redis.
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
        self._ahead = Prefetch(self._set_room)
        execution.resized = self._ahead.resize
        self.in_flight = 0
        self.room = asyncio.Event()
        self.room.set()

    async def take(self, batch_id: str, *, pressed: bool = True) -> None:
        """Claim one batch, and begin to serve it. Raises RedisUnavailable.

        `pressed`: it came soon, so the next one may be claimed ahead. Else that would bring nothing but a wake-up.
        """
        token = secrets.token_hex(16)
        asked_at = time.monotonic()
        try:
            batch = await self._batches.claim(batch_id, self._config.worker_id, token)
        except RedisUnavailable:
            # Whether it is ours is not known. If so, no attempt is to be lost for it; if not, it stands in no line.
            self._start(self._settle(self._undo_claim(batch_id, token)), 0)
            raise
        if batch is not None and batch.requests:
            failpoint("batch_claimed")
            streams = BatchStreams(batch.requests, self._outgoing)
            lease = Lease(self._batches, batch.batch_id, batch.token, self._config.renew_ms / 1000, streams)
            place = self._ahead.place(ahead=pressed)
            self._start(self._traced(batch, lease, streams, place, asked_at), len(batch.requests))

    def drain(self) -> None:
        """Begin nothing more: what was claimed ahead is handed back."""
        self._ahead.stop()

    async def settled(self, timeout_s: float) -> None:
        """Wait until every batch is settled, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Drop what is left: the reaper finds it when its leases have run out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _traced(
        self, batch: ClaimedBatch, lease: Lease, streams: BatchStreams, place: PrefetchSlot, asked_at: float
    ) -> None:
        with self._traces.of(batch.batch_id, batch.requests, asked_at) as trace:
            await self._serve(batch._replace(requests=trace.requests), lease, streams, place, trace)

    async def _serve(
        self, batch: ClaimedBatch, lease: Lease, streams: BatchStreams, place: PrefetchSlot, trace: BatchTrace
    ) -> None:
        # Renewed from the claim on, so also while another batch or direct batches have the model. Not to claim meanwhile
        # would be no better: a stream of direct batches would shut the queue out. The wait is bounded: turns go by order
        # of coming, few batches wait, and the watchdog ends each.
        give_up_at = trace.began + max(request.ms_left for request in batch.requests) / 1000
        ending: Coroutine[Any, Any, None]
        try:
            outcomes = await self._outcomes(batch, lease, streams, place, trace)
            trace.ended(outcomes)
            failpoint("batch_ran")
            ending = self._finish(batch, lease, outcomes, give_up_at)
        except (ModelLost, ModelHung, RunRefused) as error:
            streams.lost()
            cause = self._cause(error)
            trace.lost(cause)
            ending = self._give_back(batch, lease, cause)
        except BaseException:
            lease.stop()  # A bug, or the end of the worker: the reaper finds the batch when its lease has run out.
            raise
        finally:
            place.over()
        await self._settle(self._close(ending, lease))

    async def _outcomes(
        self, batch: ClaimedBatch, lease: Lease, streams: BatchStreams, place: PrefetchSlot, trace: BatchTrace
    ) -> list[Outcome]:
        def over() -> None:
            trace.over()
            place.over()

        def begins() -> bool:
            place.begins(self._execution.service.predicted_ms(len(batch.requests)))
            if lease.lost:
                return False
            trace.begins()
            return True

        if not await place.granted:
            raise NotStarted("The worker is stopping.")
        return await self._execution.run(batch.requests, trace.began, begins, over, streams)

    def _cause(self, error: ModelLost | ModelHung | RunRefused) -> ErrorCode | None:
        """The cause to count against the batch; None where it is handed back uncounted."""
        uncounted = isinstance(error, NotStarted) or (isinstance(error, RunRefused) and not error.counted)
        if self._execution.stopped or uncounted:
            return None
        return ErrorCode.GPU_TIMEOUT if isinstance(error, ModelHung) else ErrorCode.WORKER_LOST

    async def _finish(self, batch: ClaimedBatch, lease: Lease, outcomes: list[Outcome], give_up_at: float) -> None:
        """Finish, again and again while Redis is away and somebody may still wait for it."""
        if lease.lost:
            log.warning("batch lost to another worker", batch=batch.batch_id, size=len(batch.requests))
            return
        self._sending()
        await self._insist(lambda: self._batches.finish(batch.batch_id, batch.token, outcomes), give_up_at)
        failpoint("batch_finished")

    async def _give_back(self, batch: ClaimedBatch, lease: Lease, cause: ErrorCode | None) -> None:
        lease.stop()
        min_left_ms = int(self._execution.service.needed_ms(len(batch.requests)))
        give_up_at = time.monotonic() + GIVE_UP_S
        if cause is None:
            failpoint("drain_unreleased")
            await self._insist(lambda: self._batches.release(batch.batch_id, batch.token), give_up_at)
            log.info("batch handed back", batch=batch.batch_id, size=len(batch.requests))
            return
        failpoint("loss_untold")
        await self._insist(lambda: self._batches.fail(batch.batch_id, batch.token, cause, min_left_ms), give_up_at)
        log.warning("batch failed", batch=batch.batch_id, size=len(batch.requests), cause=str(cause))

    async def _undo_claim(self, batch_id: str, token: str) -> None:
        async def undo() -> None:
            if not await self._batches.release(batch_id, token):
                await self._batches.push_back(batch_id)

        await self._insist(undo, time.monotonic() + GIVE_UP_S)

    async def _insist(self, call: Callable[[], Awaitable[object]], give_up_at: float) -> None:
        backoff = Backoff(most_s=_SLOWEST_RETRY_S)
        while True:
            try:
                await call()
                return
            except RedisUnavailable:
                delay_s = backoff.next_s()
                if time.monotonic() + delay_s >= give_up_at:
                    log.warning("batch left to the reaper; redis is away")
                    return
            await asyncio.sleep(delay_s)

    async def _close(self, ending: Coroutine[Any, Any, None], lease: Lease) -> None:
        try:
            await ending
        finally:
            await lease.close()

    async def _settle(self, ending: Coroutine[Any, Any, None]) -> None:
        self._settling += 1
        self._set_room()
        try:
            await ending
        finally:
            self._settling -= 1
            self._set_room()

    def _start(self, work: Coroutine[Any, Any, None], size: int) -> None:
        task = asyncio.create_task(work, name="batch")
        self._tasks.add(task)
        self.in_flight += size

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.in_flight -= size
            if not task.cancelled() and task.exception() is not None:
                log.error("batch was not settled", error=type(task.exception()).__name__)

        task.add_done_callback(ended)

    def _set_room(self) -> None:
        if self._settling < max(MOST_SETTLING, self._ahead.width) and self._ahead.wants_next:
            self.room.set()
        else:
            self.room.clear()
