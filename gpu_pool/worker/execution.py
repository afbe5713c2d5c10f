"""Execution of batches on the worker's one model, from the queue and from direct calls, and the outcome of each
request.

Service time and busy share are measured over both. A request is never started when its time left is less than a run needs, or when its body is missing; both get
their outcome without the model. Bodies are passed on as stored.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from gpu_pool.backends.backend import ItemResult
from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.handle import ModelLost, ModelProcess, RunRefused, ignore_pieces, ignore_start
from gpu_pool.model_process.messages import Done, FrameTooLarge
from gpu_pool.model_process.quarantine import BatchVerdict, judge
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.model_process.watchdog import ModelHung, run_watched
from gpu_pool.worker.batch_rates import BusyShare, ServedRate
from gpu_pool.worker.service_time import ServiceTime, cap_ms
from gpu_pool.worker.slot_runs import SlotRuns, log_model_error
from gpu_pool.worker.slow_model import SlowModel
from gpu_pool.worker.streams import BatchStreams
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import ClaimedRequest, Outcome

log = structlog.get_logger()

_NEWEST_WEIGHT = 0.1  # Weight of the newest batch in the mean padding.
_NEARLY = 0.9  # A batch without an item in time has reached the cap after this share of it.
SILENCE_STEP_S = 0.05  # How often the progress of a trial in slots is read.


@dataclass(frozen=True)
class BatchPlan:
    """What of a batch runs, and what ends without running. `longest_ms` is the longest time left of all members.

    `left_ms`: the time left of each request that runs.
    """

    ids: list[str]
    bodies: list[bytes]
    early: list[Outcome]
    longest_ms: float
    left_ms: list[int]


def make_plan(requests: Sequence[ClaimedRequest], needed_ms: float, gone_ms: float) -> BatchPlan:
    """`needed_ms`: the duration of a run; `gone_ms`: the time since the requests' time left was read."""
    least_ms = needed_ms + gone_ms
    times = [request.ms_left for request in requests]
    bodies = [request.body for request in requests]
    longest_ms = max(times, default=0) - gone_ms
    early: list[Outcome] = []
    if not all(bodies) or min(times, default=math.inf) <= least_ms:
        early = [early_outcome(each, least_ms) for each in requests if each.ms_left <= least_ms or not each.body]
        requests = [request for request in requests if request.ms_left > least_ms and request.body]
        times = [request.ms_left for request in requests]
        bodies = [request.body for request in requests]
    return BatchPlan(
        [request.id for request in requests], bodies, early, longest_ms, [int(ms_left - gone_ms) for ms_left in times]
    )


def completed(plan: BatchPlan, results: Sequence[ItemResult], gpu_ms: float, version: str) -> list[Outcome]:
    """The outcomes of the whole batch; `results` are those of the plan's bodies, in order.

    The time of the batch is divided among its requests in proportion to their tokens.
    """
    charged = [result.tokens_used if result.tokens_used > 0 else 1 for result in results]
    token_ms = gpu_ms / max(1, sum(charged))
    ran = [
        Outcome(
            request_id,
            r.error_code,
            gpu_ms,
            r.tokens_used,
            version,
            r.output,
            r.output_tokens,
            r.finish_reason,
            tokens * token_ms,
        )
        for request_id, r, tokens in zip(plan.ids, results, charged, strict=True)
    ]
    return plan.early + ran if plan.early else ran


def rejected_outcomes(plan: BatchPlan, code: ErrorCode, sentence: str) -> list[Outcome]:
    """The outcomes of a batch that cannot be sent to the model."""
    return plan.early + [not_run(request_id, code, sentence) for request_id in plan.ids]


def early_outcome(request: ClaimedRequest, least_ms: float) -> Outcome:
    """The outcome of a request with no more than `least_ms` left, or without a body."""
    if request.ms_left <= least_ms:
        late = "Too little time was left to run this request."
        return not_run(request.id, ErrorCode.DEADLINE_EXCEEDED, late)
    return not_run(request.id, ErrorCode.INVALID_REQUEST, "The stored request cannot be read.")


def not_run(request_id: str, code: str, sentence: str) -> Outcome:
    """The outcome of a request that did not run."""
    return Outcome(request_id, code, -1.0, 0, "", sentence)


async def _longest_silence(model: ModelProcess, body: bytes, limit_ms: float) -> float:
    """The longest time in ms without progress of one request, which ends after `limit_ms`. Raises what `run_watched` raises."""
    longest, began = 0.0, time.monotonic()
    watched = run_watched(
        model, [body], cap_ms=limit_ms, timeout_ms=math.inf, budget_ms=limit_ms, left_ms=[int(limit_ms)]
    )
    run = asyncio.create_task(watched, name="trial")
    try:
        while not run.done():
            longest = max(longest, time.monotonic() - max(began, model.progress_at))
            await asyncio.wait([run], timeout=SILENCE_STEP_S)
        run.result()
    finally:
        run.cancel()
    return longest * 1000


class NotStarted(ModelLost):
    """Nothing of the batch reached the model: it was lost before, is too slow, or the worker is stopping."""


class Execution:
    """Runs batches on the supervisor's model. `resized` is called when the number of concurrent batches changes, `slowed`
    with a request that reached the cap when the model counts as slow.
    """

    def __init__(self, config: WorkerConfig, supervisor: ModelSupervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        self._limit = asyncio.Lock()
        self.slow_model = SlowModel(config.gpu_timeout_ms)
        self.slowed: Callable[[bytes], None] = lambda _: None
        self.slots = SlotRuns(config, supervisor)
        self._hung: ModelProcess | None = None
        self._last_size = 1
        self._largest = 0
        self.service = ServiceTime()
        self.busy = BusyShare()
        self.served = ServedRate()
        self.running = 0
        """Batches on the model now."""
        self.stopped = False
        self.padding_waste = 0.0
        """Share of padding in the positions of recent batches, exponentially weighted."""
        self.batches = 0
        """Number of batches begun; measurements change only with it."""

    @property
    def service_p95_ms(self) -> float:
        """For batches like the last one; 0 while nothing was measured."""
        return self.service.typical_p95_ms(self._last_size)

    @property
    def rate_rps(self) -> float:
        """Requests a second with full batches; 0 while not measured."""
        return self.service.rate_at(self._config.max_batch_size)

    async def run(
        self,
        requests: Sequence[ClaimedRequest],
        read_at: float,
        wanted: Callable[[], bool],
        over: Callable[[], None] = lambda: None,
        streams: BatchStreams | None = None,
    ) -> list[Outcome]:
        """One outcome for each request, in any order, after waiting for the model.

        `read_at`: when the requests' time left was read, on the monotonic clock. Requests with too little time left
        when the model is free are not started. `wanted` is called once at that moment: if it returns False, nothing
        runs and there are no outcomes. Requests of `streams` that were cancelled before get no outcome either. `over`
        is called when the model has answered. Raises ModelLost (NotStarted if nothing ran), ModelHung, and RunRefused.
        """
        if self.slow_model.slow:  # Not after a wait for a trial batch.
            raise NotStarted("The model is too slow.")
        if self.slots.count:
            outcomes = await self.slots.run_all(requests, read_at) if wanted() else []
            over()
            return outcomes
        async with self._limit:
            if not wanted():
                return []
            gone_ms = (time.monotonic() - read_at) * 1000
            requests = streams.waiting(requests) if streams is not None else requests
            plan = make_plan(requests, self.service.needed_ms(len(requests)), gone_ms)
            done = await self._run_model(plan, requests, streams) if plan.bodies else None
            if done is not None:
                self._record(plan.bodies, done)
                if done.fault:
                    log_model_error(plan.ids, done)
        over()
        await asyncio.sleep(0)  # The next batch gets the model before the outcomes are built.
        if done is not None:
            return completed(plan, done.results, done.gpu_ms, self._supervisor.version)
        if plan.bodies:
            sentence = "The batch of this request is too large to be run."
            return rejected_outcomes(plan, ErrorCode.REQUEST_TOO_LARGE, sentence)
        if plan.longest_ms > 0:  # The predicted duration rejected a request, not the wait for the model.
            self.service.forget(len(requests))
        return plan.early

    def stop(self) -> None:
        """Kill what runs and start nothing more: the drain time is over."""
        self.stopped = True
        self.slots.stop()
        model = self._supervisor.model
        if self.running and model is not None:
            model.kill()

    async def trial(self, body: bytes, limit_ms: float) -> float | None:
        """Run a batch of one that is only measured, with another limit than the cap; its time in ms, None if it was lost.

        With slots the cap limits the silence of the model, not a run: then it is the longest time without progress.
        """
        async with self._limit:
            model, started = self._supervisor.model, time.monotonic()
            if model is None:
                return None
            try:
                if self.slots.count:
                    return await _longest_silence(model, body, limit_ms)
                done = await run_watched(model, [body], cap_ms=limit_ms, timeout_ms=limit_ms, budget_ms=limit_ms)
            except RunRefused:
                return None
            except (ModelHung, ModelLost) as error:
                self._supervisor.process_failed()
                return (time.monotonic() - started) * 1000 if isinstance(error, ModelHung) else None
            return done.gpu_ms

    async def _run_model(
        self, plan: BatchPlan, requests: Sequence[ClaimedRequest], streams: BatchStreams | None
    ) -> Done | None:
        """The model's answer; None if the batch is too large to be sent."""
        model, started = self._supervisor.model, time.monotonic()
        if model is None or self.stopped or self.slow_model.slow:
            raise NotStarted("The model process was gone before the batch began, or is too slow.")
        size, timeout_ms = len(plan.bodies), self._config.gpu_timeout_ms
        on_pieces, on_start = (
            (ignore_pieces, ignore_start) if streams is None else (streams.on_pieces, partial(streams.begin, plan.ids))
        )
        self.running += 1
        self.batches += 1
        if self.running == 1:
            self.busy.start(started)
        try:
            return await run_watched(
                model,
                plan.bodies,
                cap_ms=cap_ms(self.service.p99(size), timeout_ms),
                timeout_ms=timeout_ms,
                budget_ms=min(timeout_ms, plan.longest_ms),
                on_pieces=on_pieces,
                left_ms=plan.left_ms,
                on_start=on_start,
            )
        except FrameTooLarge:
            return None
        except (ModelHung, ModelLost) as error:
            self._supervisor.process_failed()
            if isinstance(error, ModelHung):
                self.service.forget(size)
                if model is not self._hung:  # One process may have had several batches.
                    self._hung = model
                    first = all(request.attempt == 1 for request in requests)
                    self._reached_cap(plan.bodies, (time.monotonic() - started) * 1000, first=first)
            raise
        finally:
            self.running -= 1
            if not self.running:
                self.busy.stop(time.monotonic())
            if streams is not None:
                streams.end()

    def _reached_cap(self, bodies: Sequence[bytes], ms: float, *, first: bool) -> None:
        """Not for a batch that was killed earlier because such batches were fast before: the whole cap decides."""
        if ms < _NEARLY * self._config.gpu_timeout_ms:
            return
        if self.slow_model.reached_cap(ms, alone=first and len(bodies) == 1):
            self.slowed(bodies[0])

    def _record(self, bodies: Sequence[bytes], done: Done) -> None:
        self._last_size = size = len(bodies)
        # A backend that works in steps ends its items just before the cap: then nothing was killed, and all are late.
        # Nothing is loaded again for such a batch, so a single one is never sufficient.
        codes = [result.error_code for result in done.results if result.error_code]
        late = codes.count(ErrorCode.GPU_TIMEOUT)
        if not late:
            self.slow_model.ended_in_time()
        elif late == size:
            self._reached_cap(bodies, done.gpu_ms, first=False)
        self.served.ended(time.monotonic(), size)
        if done.largest != self._largest:
            # Larger batches run in several parts from now on, or whole again: their measurements are void.
            log.warning("model batch limit changed", items=done.largest or "unlimited")
            self.service.forget_over(min(filter(None, (self._largest, done.largest))))
            self._largest = done.largest
        if codes:  # A bisected batch is no measurement of service time.
            self._supervisor.batch_ended(judge(done.results))
            return
        self.service.record(size, done.gpu_ms)
        self.padding_waste += _NEWEST_WEIGHT * (done.padding_waste - self.padding_waste)
        self._supervisor.batch_ended(BatchVerdict.GOOD)
