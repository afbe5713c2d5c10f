"""What a worker does with one batch id: claim it, run it, settle it.

The next batch is taken as soon as the model is free: the finish of the last one is under way meanwhile, at most two
of them. Every claimed batch ends in exactly one of these, each idempotent by the batch's token:

    finish      the model answered, or no member could be run
    fail        the model process was lost or hung; members are retried, an attempt is counted
    release     the worker is stopping, or lost its model before the run began; no attempt is counted
    nothing     the lease was lost: somebody else has the batch
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from gpu_pool.busy_share import BusyShare
from gpu_pool.config import WorkerConfig
from gpu_pool.frames import Done, FrameTooLarge
from gpu_pool.lease import Lease
from gpu_pool.model_handle import ModelLost, ModelProcess
from gpu_pool.model_keeper import ModelKeeper
from gpu_pool.outcomes import Plan, completed, make_plan, refused
from gpu_pool.service_time import ServiceTime, cap_ms
from gpu_pool.watchdog import ModelHung, run_watched
from scheduler.backoff import Backoff
from scheduler.batches import Batches, ClaimedBatch, Outcome
from scheduler.errors import ErrorCode, RedisUnavailable

MOST_SETTLING = 2
GIVE_UP_S = 1.0  # A batch not handed back by then has lost its lease: the reaper does the same.
_SLOWEST_RETRY_S = 0.5

log = structlog.get_logger()


class BatchPipeline:
    """One batch in the model, at most two more being settled."""

    def __init__(self, config: WorkerConfig, batches: Batches, keeper: ModelKeeper) -> None:
        self._config = config
        self._batches = batches
        self._keeper = keeper
        self._settling: set[asyncio.Task[None]] = set()
        self._releasing = False
        self._last_size = 1
        self.service = ServiceTime()
        self.busy = BusyShare()
        self.running = False
        self.in_flight = 0
        self.room = asyncio.Event()
        self.room.set()

    @property
    def service_p95_ms(self) -> float:
        """Of batches like the last one; 0 while nothing was measured."""
        return self.service.typical_p95_ms(self._last_size)

    async def take(self, batch_id: str) -> None:
        """Claim and run one batch; returns when the model is free again. Raises RedisUnavailable."""
        token = secrets.token_hex(16)
        asked_at = time.monotonic()
        try:
            batch = await self._batches.claim(batch_id, self._config.worker_id, token)
        except RedisUnavailable:
            # Whether it is ours is not known. If so, no attempt is to be lost for it; if not, it stands in no line.
            self._settle(self._undo_claim(batch_id, token), 0)
            raise
        if batch is not None and batch.requests:
            await self._serve(batch, asked_at)

    def hand_back(self) -> None:
        """The time for draining is up: stop the batch that runs, and give it back uncounted."""
        self._releasing = True
        model = self._keeper.model
        if self.running and model is not None:
            model.kill()

    async def settled(self, timeout_s: float) -> None:
        """Wait until every batch is settled, at most so long."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=timeout_s)

    async def _serve(self, batch: ClaimedBatch, asked_at: float) -> None:
        lease = Lease(self._batches, batch.batch_id, batch.token, self._config.renew_ms / 1000)
        needed_ms = self.service.needed_ms(len(batch.requests))
        plan = make_plan(batch.requests, needed_ms, (time.monotonic() - asked_at) * 1000)
        give_up_at = time.monotonic() + plan.longest_ms / 1000
        self.in_flight += len(batch.requests)
        ending: Coroutine[Any, Any, None]
        try:
            outcomes = await self._outcomes(plan)
            ending = self._finish(batch, lease, outcomes, give_up_at)
        except (ModelLost, ModelHung) as error:
            ending = self._give_back(batch, lease, self._cause(error))
        except BaseException:
            lease.stop()  # A bug, or the end of the worker: the reaper finds the batch when its lease has run out.
            self.in_flight -= len(batch.requests)
            raise
        self._settle(self._close(ending, lease), len(batch.requests))

    async def _outcomes(self, plan: Plan) -> list[Outcome]:
        """Run what of the plan is to run. Raises ModelLost and ModelHung."""
        if not plan.items:
            self.service.forget(len(plan.early))
            return plan.early
        model = self._keeper.model
        if model is None:
            raise _NotStarted("The model process was lost before the batch began.")
        try:
            done = await self._run(model, plan)
        except FrameTooLarge:
            return refused(plan, ErrorCode.REQUEST_TOO_LARGE, "The batch of this request is too large to be run.")
        return completed(plan, done.results, done.gpu_ms, self._keeper.version)

    async def _run(self, model: ModelProcess, plan: Plan) -> Done:
        size, timeout_ms = len(plan.items), self._config.gpu_timeout_ms
        cap = cap_ms(self.service.p99(size), timeout_ms)
        budget_ms = min(timeout_ms, plan.longest_ms)
        self.running = True
        self.busy.start(time.monotonic())
        try:
            done = await run_watched(model, plan.items, cap_ms=cap, timeout_ms=timeout_ms, budget_ms=budget_ms)
        except ModelHung:
            self.service.forget(size)
            raise
        finally:
            self.running = False
            self.busy.stop(time.monotonic())
        self._last_size = size
        if not any(result.error_code for result in done.results):  # A batch taken apart says nothing of service time.
            self.service.record(size, done.gpu_ms)
        return done

    def _cause(self, error: ModelLost | ModelHung) -> ErrorCode | None:
        """The cause to count against the batch; None where it is handed back uncounted."""
        if self._releasing or isinstance(error, _NotStarted):
            return None
        return ErrorCode.GPU_TIMEOUT if isinstance(error, ModelHung) else ErrorCode.WORKER_LOST

    async def _finish(self, batch: ClaimedBatch, lease: Lease, outcomes: list[Outcome], give_up_at: float) -> None:
        """Finish, again and again while Redis is away and somebody may still wait for it."""
        if lease.lost:
            log.warning("batch lost to another worker", batch=batch.batch_id, size=len(batch.requests))
            return
        await self._insist(lambda: self._batches.finish(batch.batch_id, batch.token, outcomes), give_up_at)

    async def _give_back(self, batch: ClaimedBatch, lease: Lease, cause: ErrorCode | None) -> None:
        lease.stop()
        min_left_ms = int(self.service.needed_ms(len(batch.requests)))
        give_up_at = time.monotonic() + GIVE_UP_S
        if cause is None:
            await self._insist(lambda: self._batches.release(batch.batch_id, batch.token), give_up_at)
            log.info("batch handed back", batch=batch.batch_id, size=len(batch.requests))
            return
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

    def _settle(self, ending: Coroutine[Any, Any, None], size: int) -> None:
        task = asyncio.create_task(ending, name="settle")
        self._settling.add(task)
        self._set_room()

        def settled(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            self._set_room()
            self.in_flight -= size
            if not task.cancelled() and task.exception() is not None:
                log.error("batch was not settled", error=type(task.exception()).__name__)

        task.add_done_callback(settled)

    def _set_room(self) -> None:
        if len(self._settling) < MOST_SETTLING:
            self.room.set()
        else:
            self.room.clear()


class _NotStarted(ModelLost):
    """The model was gone before it saw anything of the batch."""
