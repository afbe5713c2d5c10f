"""The path of batch ids from the queue of a worker with slots: claim, start each request, end each request by itself.

A batch is only how ids travel: its requests start at once, and none waits for another one. The outcomes of those that ended
between two calls of `finish_part` go in one call, without a timer. All leases are renewed in one call.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.messages import Piece, Refused
from gpu_pool.model_process.watchdog import ModelHung
from gpu_pool.worker.execution import early_outcome, not_run
from gpu_pool.worker.slot_runs import SlotEnd, SlotRun, SlotRuns
from gpu_pool.worker.streams import Outgoing
from gpu_pool.worker.traces import BatchTrace, BatchTraces
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.batches import (
    HANDED_BACK,
    WITHDRAWN,
    Batches,
    ClaimedRequest,
    FreeSlots,
    MemberEnd,
    Outcome,
    OwnedBatch,
    lost,
)
from scheduler.protocol.increments import LOST, Increment, IncrementTarget, read_address
from scheduler.protocol.stop_signals import StopSignal, StopSignals
from scheduler.redis_client.backoff import Backoff
from scheduler.tasks import end_all

SLOWEST_RETRY_S = 0.5

log = structlog.get_logger()


@dataclass
class _Claimed:
    """A batch of this worker. `unfinished`: requests whose end Redis has not confirmed yet."""

    owned: OwnedBatch
    running: dict[str, SlotRun] = field(default_factory=dict)
    unfinished: int = 0
    is_lost: bool = False


class SlotPipeline:
    """The batches of one cell of a worker with slots. `can_claim`: a slot is free. `sending`: see `BatchPipeline`."""

    def __init__(
        self,
        config: WorkerConfig,
        batches: Batches,
        runs: SlotRuns,
        *,
        outgoing: Outgoing,
        sending: Callable[[], None],
        stops: StopSignals,
        traces: BatchTraces,
    ) -> None:
        self._config = config
        self._batches = batches
        self._runs = runs
        self._outgoing = outgoing
        self._sending = sending
        self._stops = stops
        self._traces = traces
        self._claimed: dict[str, _Claimed] = {}
        self._ends: list[tuple[_Claimed, Outcome]] = []
        self._has_ends = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._renewal: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._is_draining = False
        self.in_flight = 0
        self.can_claim = asyncio.Event()

    async def take(self, batch_id: str, *, backlog: bool = True) -> None:  # noqa: ARG002 - as of `BatchPipeline`
        """Claim one batch and start its requests. Raises RedisUnavailable."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._finish_forever(), name="finish"),
                asyncio.create_task(self._stop_forever(), name="stops"),
            ]
        if self._runs.free <= 0 or self._is_draining:  # The number of slots fell while the id was popped.
            await self._batches.push_back(batch_id)
            return
        token, claimed_at = secrets.token_hex(16), time.monotonic()
        slots = FreeSlots(self._runs.free, self._runs.count)
        self._runs.is_claiming = True
        try:
            batch = await self._batches.claim(batch_id, self._config.worker_id, token, slots)
        except RedisUnavailable:
            # The claim may have succeeded: then no attempt must be lost; if not, the id is in no queue.
            with suppress(RedisUnavailable):
                if not await self._batches.release(batch_id, token):
                    await self._batches.push_back(batch_id)
            raise
        finally:
            self._runs.is_claiming = False
        if batch is None or not batch.requests:
            return
        claimed = _Claimed(OwnedBatch(batch.batch_id, batch.token), unfinished=len(batch.requests))
        self._claimed[batch.batch_id] = claimed
        self._settled.clear()
        self._renew_later()
        self.in_flight += len(batch.requests)
        for request in batch.requests:
            gone_ms = (time.monotonic() - claimed_at) * 1000
            if request.ms_left <= gone_ms or not request.body:
                self._end(claimed, early_outcome(request, gone_ms))
            elif self._runs.free <= 0:  # The batch was formed before the slots were known, or there are fewer now.
                self._end(claimed, not_run(request.id, HANDED_BACK, ""))
            else:
                self._start(claimed, request, int(request.ms_left - gone_ms), claimed_at)
        self.update()

    def update(self) -> None:
        """The number of free slots may have changed."""
        if self._runs.free > 0 and not self._is_draining:
            self.can_claim.set()
        else:
            self.can_claim.clear()

    def drain(self) -> None:
        """Start nothing more."""
        self._is_draining = True
        self.update()

    async def settled(self, timeout_s: float | None) -> None:
        """Wait until every request is settled, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()

    async def close(self) -> None:
        """Cancel what is left; the reaper retries it when its lease expires."""
        if self._renewal is not None:
            self._renewal.cancel()
        tasks = [*self._tasks, *([self._renewing] if self._renewing is not None else [])]
        await end_all(tasks)

    def _start(self, claimed: _Claimed, request: ClaimedRequest, left_ms: int, claimed_at: float) -> None:
        trace = self._traces.of(claimed.owned.id, [request], claimed_at)
        (request,) = trace.requests
        trace.__enter__()
        trace.begins()
        member = _SlotMember(request, self._outgoing, self._runs, trace, lambda outcome: self._end(claimed, outcome))
        run = self._runs.start(request, left_ms, member.ended, member.piece)
        if run.seq:
            claimed.running[request.id] = run

    def _end(self, claimed: _Claimed, outcome: Outcome) -> None:
        claimed.running.pop(outcome.id, None)
        self._ends.append((claimed, outcome))
        self._has_ends.set()

    async def _finish_forever(self) -> None:
        """Send the ends of requests to Redis; never returns."""
        while True:
            await self._has_ends.wait()
            await asyncio.sleep(0)  # What ended in the same step of the model goes in the same call.
            self._has_ends.clear()
            ends, self._ends = self._ends, []
            with LoggedFaults("requests not finished"):
                await self._finish([end for end in ends if not end[0].is_lost])
            for claimed, _ in ends:
                claimed.unfinished -= 1
                self.in_flight -= 1
                if not claimed.unfinished:
                    self._claimed.pop(claimed.owned.id, None)
            if not self._claimed:
                self._settled.set()

    async def _finish(self, ends: list[tuple[_Claimed, Outcome]]) -> None:
        """Retry while Redis is unavailable: each call is idempotent, and the reaper retries requests of an expired lease."""
        if not ends:
            return
        backoff = Backoff(most_s=SLOWEST_RETRY_S)
        members = [MemberEnd(claimed.owned, outcome) for claimed, outcome in ends]
        give_up_at = time.monotonic() + self._config.lease_ms / 1000
        while True:
            slots = FreeSlots(None if self._runs.is_claiming else self._runs.free, self._runs.count)
            self._sending()
            try:
                await self._batches.finish_part(self._config.worker_id, members, slots)
            except RedisUnavailable:
                if time.monotonic() >= give_up_at and all(claimed.is_lost for claimed, _ in ends):
                    log.warning("redis unavailable; the reaper will retry the requests", count=len(ends))
                    return
                await backoff.sleep()
                continue
            return

    async def _stop_forever(self) -> None:
        """End the runs of requests whose clients have left; never returns."""
        backoff = Backoff()
        while True:
            with LoggedFaults("runs not stopped"), suppress(RedisUnavailable):
                if (signal := await self._stops.pop()) is not None:
                    claimed = self._claimed.values()
                    running = {request_id: run for each in claimed for request_id, run in each.running.items()}
                    for request_id in signal.ids:
                        if request_id in running:
                            self._runs.drop(running[request_id])
                    self._runs.withdraw(to_withdraw(list(running.values()), signal))
                backoff.reset()
                continue
            await backoff.sleep()

    def _renew_later(self) -> None:
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(self._config.renew_ms / 1000, self._renew_due)

    def _renew_due(self) -> None:
        self._renewal = None
        if self._claimed:
            self._renewing = asyncio.create_task(self._renew(), name="leases")

    async def _renew(self) -> None:
        held = [claimed for claimed in self._claimed.values() if not claimed.is_lost]
        try:
            found = await self._batches.renew_all([each.owned._replace(known=each.unfinished) for each in held])
        except RedisUnavailable:
            found = []  # The next renewal is the retry; the lease spans several.
        for claimed, left in zip(held, found, strict=False):
            if left is False:
                claimed.is_lost = True
                if claimed.running:  # Otherwise its last request has just ended.
                    log.warning("lease lost; its results are dropped", batch=claimed.owned.id)
            for request_id, run in list(claimed.running.items()):
                if left is False or (isinstance(left, frozenset) and request_id not in left):
                    self._runs.drop(run)
        self._renew_later()


def to_withdraw(runs: Sequence[SlotRun], signal: StopSignal) -> list[SlotRun]:
    """The youngest runs without output, of the first queues of the signal; each request is withdrawn at most once."""

    def may_leave(run: SlotRun) -> bool:
        is_kept = (
            run.has_sent or run.is_dropped or run.is_withdrawn or run.request.was_withdrawn or run.request.attempt > 1
        )
        return not is_kept and run.request.queue in signal.queues

    allowed = sorted(filter(may_leave, runs), key=lambda run: (signal.queues.index(run.request.queue), -run.start.at_s))
    return allowed[: signal.withdraw]


class _SlotMember:
    """One request of a claimed batch, while it runs. `on_end` receives its outcome."""

    def __init__(
        self,
        request: ClaimedRequest,
        outgoing: Outgoing,
        runs: SlotRuns,
        trace: BatchTrace,
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._request = request
        self._outgoing = outgoing
        self._runs = runs
        self._trace = trace
        self._on_end = on_end
        self._target: IncrementTarget | None = None

    def piece(self, _: SlotRun, piece: Piece) -> None:
        """The model added text."""
        self._target = self._target or read_address(piece.stream)
        self._send(piece.offset, piece.text)

    def ended(self, run: SlotRun, end: SlotEnd) -> None:
        """The run is over."""
        self._trace.over()
        if isinstance(end, Outcome):
            outcome = end._replace(error_code=ErrorCode.CANCELLED, output="") if run.is_dropped else end
            self._trace.ended([outcome])
        else:
            if isinstance(end, Refused):
                code = lost(ErrorCode.WORKER_LOST) if end.counted else WITHDRAWN if run.is_withdrawn else HANDED_BACK
            elif self._runs.stopped:
                code = HANDED_BACK
            else:
                code = lost(ErrorCode.GPU_TIMEOUT if isinstance(end, ModelHung) else ErrorCode.WORKER_LOST)
            outcome = not_run(self._request.id, code, "")
            self._trace.lost(None if outcome.error_code in (HANDED_BACK, WITHDRAWN) else ErrorCode.WORKER_LOST)
            if run.has_sent:
                self._send(LOST, "")
        self._trace.__exit__(None, None, None)
        self._on_end(outcome)

    def _send(self, offset: int, text: str) -> None:
        if (target := self._target) is not None:
            request = self._request
            self._outgoing.add(target, Increment(request.id, target.nonce, request.attempt, offset, text))
