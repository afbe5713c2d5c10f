"""The requests that run in the slots of a worker's model, from start to end, each by itself.

A request of the queue and one of a direct call run in the same way. The model process is lost if it sends nothing for the
cap of a batch while requests run; then all of them have lost their run.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from gpu_pool.backends.backend import MODEL_ERRORS, ItemResult
from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.handle import ModelLost, RunRefused
from gpu_pool.model_process.messages import Done, FrameTooLarge, Piece, Refused
from gpu_pool.model_process.quarantine import judge
from gpu_pool.model_process.stall_detector import GAP_S
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.model_process.watchdog import ModelHung
from gpu_pool.worker.service_time import ServiceTime
from gpu_pool.worker.slot_usage import SlotUsage
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.protocol.batches import ClaimedRequest, Outcome

NEWEST_WEIGHT = 0.1
"""Of the newest answer in the mean padding."""

WATCH_S = 0.25
"""How often the model process is checked for progress while requests run."""

GONE = Refused(0, "The model process was gone before the request began.")
LOGGED_IDS = 5
TOO_LARGE = ItemResult("The request is too large to be run.", 0, ErrorCode.REQUEST_TOO_LARGE)

SlotEnd = Outcome | Refused | TierlaneError

log = structlog.get_logger()


def log_model_error(ids: Sequence[str], done: Done) -> None:
    """Log why the model failed at some of these requests: the class of the first exception, never its text or an input."""
    failed = [id_ for id_, result in zip(ids, done.results, strict=True) if result.error_code in MODEL_ERRORS]
    if failed:
        log.warning("the model failed at a request", reason=done.fault, ids=failed[:LOGGED_IDS])


class SlotRun:
    """One request in a slot. `on_end` is called once, after it was measured: with its result, with Refused, or with the error
    that lost it.
    """

    def __init__(
        self,
        runs: "SlotRuns",
        request: ClaimedRequest,
        on_end: Callable[["SlotRun", "SlotEnd"], None],
        on_piece: Callable[["SlotRun", Piece], None],
    ) -> None:
        self._runs = runs
        self.on_end = on_end
        self._piece = on_piece
        self.request = request
        self.start = runs.usage.start(time.monotonic())
        self.seq = 0
        self.is_dropped = False
        """Its client has left: the model process is ending it."""
        self.is_withdrawn = False
        """The model process is returning it, unless it has sent something."""
        self.has_sent = False
        """A part of its output has left the worker."""

    def on_piece(self, piece: Piece) -> None:
        """The model added text."""
        self.has_sent = True
        self._piece(self, piece)

    def over(self, answer: Done | Refused | TierlaneError) -> None:
        """The model answered, or handed it back, or its process is lost."""
        self._runs.over(self, answer)


def ignore_piece(_: SlotRun, __: Piece) -> None:
    """For requests without a stream."""


class SlotRuns:
    """All requests in slots of one worker. `changed` is called when a slot became free or their number changed."""

    def __init__(self, config: WorkerConfig, supervisor: ModelSupervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        self._runs: set[SlotRun] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._watch_due = 0.0
        self._watched_from = 0.0
        self.usage = SlotUsage()
        self.service = ServiceTime()
        self.padding_waste = 0.0
        """Share of padding in the positions that the model computed lately, exponentially weighted."""
        self.started = 0
        """Number of requests begun; measurements change only with it."""
        self.changed: Callable[[], None] = lambda: None
        self.stopped = False
        self.is_claiming = False
        """A claim is in progress, whose requests do not count yet."""

    @property
    def count(self) -> int:
        """Requests that may run at a time; 0: the model runs batches, or is not ready."""
        model = self._supervisor.model
        return model.slots if model is not None else 0

    @property
    def free(self) -> int:
        """How many more may start; negative after the number of slots fell."""
        return self.count - len(self._runs)

    @property
    def source(self) -> str:
        """The evidence for the number of slots."""
        model = self._supervisor.model
        return model.slots_source if model is not None else ""

    def start(
        self,
        request: ClaimedRequest,
        left_ms: int,
        on_end: Callable[[SlotRun, SlotEnd], None],
        on_piece: Callable[[SlotRun, Piece], None] = ignore_piece,
    ) -> SlotRun:
        """Start a request; a fault ends it like one of a run."""
        run, model = SlotRun(self, request, on_end, on_piece), self._supervisor.model
        self.started += 1
        self._runs.add(run)
        if model is None or self.stopped:
            self.over(run, GONE)
            return run
        try:
            run.seq = model.start(request.body, left_ms, run)
            if self._watch is None:
                self._watched_from = time.monotonic()
                self._watch_again()
        except FrameTooLarge:
            self.over(run, Done(0, 0.0, [TOO_LARGE]))
        except ModelLost:
            self.over(run, GONE)
        return run

    def drop(self, run: SlotRun) -> None:
        """End this run: its client has left, or has a response."""
        model = self._supervisor.model
        if run in self._runs and not run.is_dropped and model is not None:
            run.is_dropped = True
            model.drop(run.seq)

    def withdraw(self, runs: Sequence[SlotRun]) -> None:
        """Withdraw these runs, so that others can run first; those that have sent something meanwhile continue."""
        model = self._supervisor.model
        if model is None or not runs:
            return
        for run in runs:
            run.is_withdrawn = True
        model.withdraw([run.seq for run in runs])

    async def run_all(self, requests: Sequence[ClaimedRequest], read_at: float) -> list[Outcome]:
        """The outcomes of a direct call's requests, once all have ended. Raises ModelLost or RunRefused if a run was lost."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[SlotEnd]] = [loop.create_future() for _ in requests]

        def note(future: "asyncio.Future[SlotEnd]") -> Callable[[SlotRun, SlotEnd], None]:
            return lambda _, end: None if future.done() else future.set_result(end)

        gone_ms = (time.monotonic() - read_at) * 1000
        for request, future in zip(requests, ends, strict=True):
            self.start(request, int(request.ms_left - gone_ms), note(future))
        found = await asyncio.gather(*ends)
        for end in found:
            if isinstance(end, Refused):
                raise RunRefused(end.reason, counted=end.counted)
            if isinstance(end, TierlaneError):
                raise end
        return [end for end in found if isinstance(end, Outcome)]

    def set_objective(self, tpot_ms: float) -> None:
        """The objective of the pool for the milliseconds per token; 0: none."""
        model = self._supervisor.model
        if model is not None:
            model.set_objective(tpot_ms)

    def stop(self) -> None:
        """Kill what runs and start nothing more."""
        self.stopped = True
        model = self._supervisor.model
        if self._runs and model is not None:
            model.kill()

    def over(self, run: SlotRun, answer: Done | Refused | TierlaneError) -> None:
        """A request has ended."""
        now = time.monotonic()
        self._runs.discard(run)
        end: SlotEnd
        if isinstance(answer, Done):
            result, life_ms = answer.results[0], (now - run.start.at_s) * 1000
            if answer.fault:
                log_model_error([run.request.id], answer)
            cost_ms = self.usage.end(now, run.start, self.count)
            if not run.is_dropped:
                self.service.record(1, life_ms)
                self.padding_waste += NEWEST_WEIGHT * (answer.padding_waste - self.padding_waste)
                self._supervisor.batch_ended(judge(answer.results))
            end = Outcome(
                run.request.id,
                result.error_code,
                life_ms,
                result.tokens_used,
                self._supervisor.version,
                result.output,
                result.output_tokens,
                result.finish_reason,
                cost_ms,
            )
        else:
            end = answer
            self.usage.leave(now)
        if not self._runs and self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if isinstance(answer, ModelLost | ModelHung):
            self._supervisor.process_failed()
        run.on_end(run, end)
        self.changed()

    def _watch_again(self) -> None:
        self._watch_due = time.monotonic() + WATCH_S
        self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._check)

    def _check(self) -> None:
        now, model = time.monotonic(), self._supervisor.model
        if now - self._watch_due > GAP_S:
            self._watched_from = now  # This process was suspended, and has observed nothing meanwhile.
        timeout_s = self._config.gpu_timeout_ms / 1000
        if model is not None and now - max(self._watched_from, model.progress_at) > timeout_s:
            model.give_up(ModelHung(f"The model process sent nothing for {self._config.gpu_timeout_ms} ms."))
        if self._runs:
            self._watch_again()
