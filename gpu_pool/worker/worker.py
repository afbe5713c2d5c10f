"""The worker: one supervisor around one model process, from registration to deregistration.

It registers with its first heartbeat, and pops batch ids while its model is ready and heartbeats succeed. On SIGTERM or
SIGINT it lets the running batch end, releases what it cannot finish, and deregisters. No loop here ends because of
Redis, of a model or of one bad batch.
"""

import asyncio
import signal
import time
from contextlib import suppress
from typing import NamedTuple

import structlog

from gpu_pool.backends.openai_endpoint.settings import PREFIX
from gpu_pool.config import WorkerConfig, secrets_of
from gpu_pool.model_process.backend_registry import check_form
from gpu_pool.model_process.handle import ModelLaunch
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.worker.direct_server import DirectBatches, DirectEndpoint
from gpu_pool.worker.execution import Execution
from gpu_pool.worker.gpu import GpuWatch, gpu_of
from gpu_pool.worker.heartbeat import Heartbeat
from gpu_pool.worker.pipeline import BatchPipeline
from gpu_pool.worker.prefetch import AHEAD_MS
from gpu_pool.worker.slow_model import Trials
from gpu_pool.worker.streams import Outgoing
from gpu_pool.worker.traces import BatchTraces
from scheduler.errors import RedisUnavailable
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.batches import Batches, ReadyBatches
from scheduler.protocol.pool_view import GpuReading, WorkerReport
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import IncrementChannel
from scheduler.redis_client.connections import blocking_client, command_client
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Backoff
from scheduler.tracing import Spans


class WorkerReading(NamedTuple):
    """The state of a worker now. `share` (0..1) is the busy share of its model, `address` that of its direct endpoint.

    `model_ms`: see `SlowModel`.
    """

    status: str
    share: float
    in_flight: int
    version: str
    address: str
    gpu: GpuReading | None
    model_pid: int
    model_ms: float


def worker_beat(config: WorkerConfig, execution: Execution, reading: WorkerReading) -> WorkerReport:
    """The content of a heartbeat."""
    item_ms, base_ms = execution.service.fit()
    return WorkerReport(
        id=config.worker_id,
        status=reading.status,
        utilization=reading.share,
        in_flight=reading.in_flight,
        rps=execution.rate_rps,
        service_p95_ms=execution.service_p95_ms,
        backend=config.backend,
        model_version=reading.version,
        direct=reading.address,
        base_ms=round(base_ms, 3),
        item_ms=round(item_ms, 4),
        seen_batch=round(execution.service.seen_batch, 1),
        gpu=reading.gpu,
        padding_waste=round(execution.padding_waste, 3),
        model_pid=reading.model_pid,
        width=execution.width,
        fresh_batch=round(execution.service.fresh_batch, 1),
        served_rps=round(execution.served.rps, 2),
        model_ms=round(reading.model_ms, 1),
        timeout_ms=config.gpu_timeout_ms,
    )


__all__ = ["Worker", "WorkerConfig", "run_worker"]

BLOCK_S = 5.0  # Longest wait of a pop: an idle worker is woken this rarely. `hang_up` and `unblock` end it sooner.
END_POP_S = 0.1  # Between two attempts to end a pop: one that has not reached Redis cannot be ended yet.
CLAIM_POLL_S = 0.25  # How often a loop that may not claim checks whether it should end.
SETTLE_S = 0.75
SLOW_OVER = ("starting", "ready", "down")  # The states of the model in which a slow one is reported as slow.

log = structlog.get_logger()


async def run_worker(config: WorkerConfig, spans: Spans | None = None) -> int:
    """Run one worker until SIGTERM or SIGINT; the exit code. `spans` gets the spans of batches with sampled requests.

    Raises StartError for a backend that no restart can help: an unknown form, a missing module.
    """
    check_form(config.backend)
    commands, blocking = command_client(config.redis_url), blocking_client(config.redis_url)
    keys = Keys.at(config.redis_url, config.pool)
    batches = Batches(commands, keys, lease_ms=config.lease_ms)
    ready, presence = ReadyBatches(blocking, keys, BLOCK_S), Presence(commands, keys)
    worker = Worker(config, batches, ready, presence, IncrementChannel(commands, keys), spans=spans)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, worker.drain)
    try:
        return await worker.run()
    finally:
        await commands.aclose()
        await blocking.aclose()


class Worker:
    """Owns the worker's parts, their tasks, and the order of start and stop."""

    def __init__(
        self,
        config: WorkerConfig,
        batches: Batches,
        ready: ReadyBatches,
        presence: Presence,
        increments: IncrementChannel,
        *,
        spans: Spans | None = None,
    ) -> None:
        self._config = config
        self._batches = batches
        self._ready = ready
        self._presence = presence
        self._draining = asyncio.Event()
        self._broken = False  # A task that must not end has ended.
        self._last_report: WorkerReport | None = None
        self._changing: tuple[object, ...] = ()
        self._idle = False
        """Nothing runs, ran lately, or changes without a call of `_state_changed`: the last report is still valid."""
        self._batches_reported = 0
        secrets = secrets_of(config.backend, config.endpoint)
        launch = ModelLaunch(config.backend, config.device, config.torch_threads, config.dtype, secrets)
        self._supervisor = ModelSupervisor(launch, config.load_timeout_ms / 1000, self._state_changed)
        self._execution = execution = Execution(config, self._supervisor)
        measured = config.measure_at_start and not config.backend.startswith(PREFIX)
        self._trials = Trials(
            execution.slow_model, execution.trial, self._supervisor.ready, self._state_changed, at_start=measured
        )
        execution.slowed = self._trials.became_slow
        self._gpu = GpuWatch(gpu_of(config.backend, config.device), self._state_changed)
        traces = BatchTraces(spans, config.worker_id, config.pool)
        self._direct = DirectBatches(self._execution, self._supervisor, self._rejects_batches, traces)
        self._endpoint = DirectEndpoint(config, self._direct, presence.local_host)
        beat_s = config.heartbeat_ms / 1000
        self._heartbeat = Heartbeat(presence, self._beat, beat_s, ready.hang_up, self._state_changed)
        self._outgoing = Outgoing(increments)
        sending = self._heartbeat.fast_path_request
        self._pipeline = BatchPipeline(config, batches, self._execution, self._outgoing, sending, traces=traces)

    def drain(self) -> None:
        """Claim nothing new, and end when the running batches are done."""
        self._draining.set()

    async def run(self) -> int:
        """Run until `drain`; the exit code: 1 if a task ended that must not, so that the process is restarted.

        Raises StartError.
        """
        log.info("worker starting", worker=self._config.worker_id, pool=self._config.pool, backend=self._config.backend)
        await self._endpoint.start()
        self._require(self._heartbeat.start())
        self._gpu.start()
        self._require(self._supervisor.start())
        trials = asyncio.create_task(self._trials.run(), name="trials")
        self._require(trials)
        outgoing = asyncio.create_task(self._outgoing.run(), name="outgoing")
        pump = asyncio.create_task(self._pump(), name="pump")
        self._require(outgoing)
        self._require(pump)
        try:
            await self._draining.wait()
            await self._finish_running(pump)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            await self._pipeline.close()
            outgoing.cancel()
            trials.cancel()
            await asyncio.gather(outgoing, trials, return_exceptions=True)
            await self._shut_down()
        if self._supervisor.start_error is not None:
            raise self._supervisor.start_error
        log.info("worker drained", worker=self._config.worker_id)
        return int(self._broken)

    def _require(self, task: "asyncio.Task[None]") -> None:
        """Drain if this task ends earlier: without it the worker would look healthy and do nothing."""
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if self._draining.is_set() or self._supervisor.start_error is not None:
            return
        log_fault("task_ended", None if task.cancelled() else task.exception(), task=task.get_name())
        self._broken = True
        self.drain()

    async def _pump(self) -> None:
        backoff = Backoff()
        while not self._draining.is_set():
            try:
                if await self._may_claim():
                    await self._next_batch()
                    backoff.reset()
            except RedisUnavailable:
                await backoff.sleep()
            except Exception as error:
                log.exception("batch not run", error=type(error).__name__)
                await backoff.sleep()

    async def _may_claim(self) -> bool:
        conditions = (
            self._supervisor.ready,
            self._heartbeat.working,
            self._heartbeat.free,
            self._pipeline.can_claim,
            self._gpu.usable,
            self._trials.usable,
        )
        if all(condition.is_set() for condition in conditions):
            return True
        try:
            async with asyncio.timeout(CLAIM_POLL_S):
                for condition in conditions:
                    await condition.wait()
        except TimeoutError:
            return False
        return all(condition.is_set() for condition in conditions)

    async def _next_batch(self) -> None:
        began = time.monotonic()
        batch_id = await self._ready.pop()
        if batch_id is None:
            return
        failpoint("batch_popped")
        if self._status() not in ("ready", "busy") or self._supervisor.model is None:
            failpoint("drain_popped")
            await self._batches.push_back(batch_id)  # If this fails, the reaper pushes it again.
            return
        waited_ms = (time.monotonic() - began) * 1000
        # Less than a batch takes: the worker is busy more than half of the time.
        await self._pipeline.take(batch_id, backlog=waited_ms < max(AHEAD_MS, self._execution.service_p95_ms))

    async def _finish_running(self, pump: "asyncio.Task[None]") -> None:
        """Leases are renewed and heartbeats report "draining" until the last batch is settled."""
        self._supervisor.stop()
        self._endpoint.drain()
        self._idle = False
        self._heartbeat.now()
        self._pipeline.drain()
        until = time.monotonic() + self._config.drain_ms / 1000
        direct = asyncio.create_task(self._direct.settled(self._config.drain_ms / 1000))
        await self._end_pop(pump, until)
        await self._pipeline.settled(max(0.0, until - time.monotonic()))
        await direct
        self._execution.stop()
        await self._pipeline.settled(SETTLE_S)

    async def _end_pop(self, pump: "asyncio.Task[None]", until: float) -> None:
        while not pump.done() and (left_s := until - time.monotonic()) > 0:
            with suppress(RedisUnavailable):
                await self._ready.unblock()
            await asyncio.wait([pump], timeout=min(END_POP_S, left_s))

    async def _shut_down(self) -> None:
        self._gpu.stop()
        await self._endpoint.close()
        await self._direct.close()
        await self._heartbeat.close()
        try:
            if not self._broken:  # A lost worker must be visible in health.
                await self._presence.worker_gone(self._config.worker_id)
        except RedisUnavailable:
            log.warning("redis unavailable; the worker was not deregistered")
        await self._supervisor.close()

    def _state_changed(self, *, at_once: bool = True) -> None:
        if self._supervisor.start_error is not None:
            self.drain()
        self._idle = False
        if at_once:
            self._heartbeat.now()

    def _beat(self) -> WorkerReport:
        """The current report; the same object if nothing has changed."""
        execution = self._execution
        in_flight = self._pipeline.in_flight + self._direct.in_flight
        report, address = self._last_report, self._endpoint.address
        unchanged = self._idle and not in_flight and execution.batches == self._batches_reported
        if unchanged and report is not None and report.direct == address:
            return report
        self._batches_reported = execution.batches
        share = execution.busy.share(time.monotonic())
        version = self._supervisor.version
        reading = WorkerReading(
            self._status(),
            share,
            in_flight,
            version,
            address,
            self._gpu.reading,
            self._supervisor.pid,
            execution.slow_model.model_ms,
        )
        changing = (execution.batches, reading)
        if self._last_report is None or changing != self._changing:
            self._changing, self._last_report = changing, worker_beat(self._config, execution, reading)
        self._idle = not share and not in_flight
        return self._last_report

    def _rejects_batches(self) -> bool:
        if self._draining.is_set() or not self._gpu.usable.is_set() or not self._heartbeat.free.is_set():
            return True
        return self._status() == "starting"

    def _status(self) -> str:
        if self._draining.is_set():
            return "draining"
        if not self._gpu.usable.is_set():
            return "down"
        if (status := self._model_status()) != "ready":
            return status
        if not self._heartbeat.free.is_set():
            return "cordoned"
        return "busy" if self._execution.running else "ready"

    def _model_status(self) -> str:
        status = self._supervisor.status
        if self._execution.slow_model.confirmed and status in SLOW_OVER:
            return "slow"
        return "starting" if status == "ready" and not self._trials.usable.is_set() else status
