"""The worker: one supervisor around one model process, from registration to deregistration.

It registers with its first heartbeat, and pops batch ids while its model is ready and heartbeats succeed. If its configuration
is wrong, it ends, and its last heartbeat stays for five minutes, with the reason. On SIGTERM or
SIGINT it lets what runs end, within the drain time or until a second signal, releases the rest, and deregisters. No loop
here ends because of Redis, of a model or of one bad batch.

With several cells it decides before each pop, and while it is idle, whether it moves (`scheduler/cells/moves.py`); it also
leaves a cell whose Redis does not respond. Then only its link to the cell changes; the model process and all that is known
of it stay.
"""

import asyncio
import os
import signal
import socket
import time
from contextlib import suppress

import structlog

from gpu_pool.backends.openai_endpoint.settings import SERVERS
from gpu_pool.config import WorkerConfig, secrets_of
from gpu_pool.model_process.backend_registry import check_form
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.report import with_measurements
from gpu_pool.worker.cell_link import BLOCK_S, CellLink
from gpu_pool.worker.direct_batches import DirectBatches
from gpu_pool.worker.direct_server import DirectEndpoint
from gpu_pool.worker.execution import Execution
from gpu_pool.worker.gpu_watch import GpuWatch
from gpu_pool.worker.nvml_gpu import gpu_of
from gpu_pool.worker.prefetch import AHEAD_MS
from gpu_pool.worker.slow_model import Trials
from gpu_pool.worker.traces import BatchTraces
from scheduler.cells.moves import LOST_S, PERIOD_S, MoveDecision
from scheduler.errors import RedisUnavailable, TierlaneError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.protocol.pool_view import WorkerReport
from scheduler.redis_client.backoff import Backoff
from scheduler.redis_client.connections import server_url
from scheduler.redis_client.keys import cell_of
from scheduler.tasks import end_all
from scheduler.tracing import Spans

__all__ = ["BLOCK_S", "Worker", "WorkerConfig", "run_worker"]

END_POPS_S = 3.0  # For ending the pop of a worker that stops; its loop does not start another one.
END_POP_S = 0.1  # Between two attempts to end a pop: one that has not reached Redis cannot be ended yet.
CLAIM_POLL_S = 0.25  # How often a loop that may not claim checks whether it should end.
SETTLE_S = 0.75
BROKEN_DRAIN_S = 3.0  # The drain of a worker of which a task has ended.
LOOK_S = 1.0  # How often a worker that stops checks whether it should go on waiting.
REPORT_EVERY = 10  # Checks between two log lines about what is still open.
REDIS_AWAY_S = 3.0  # Without Redis for so long, results are not waited for: their leases have expired.
LEAVE_S = 0.5  # In which a worker that stops deregisters from cells that it left.
SLOW_OVER = ("starting", "ready", "down")  # The states of the model in which a slow one is reported as slow.

log = structlog.get_logger()


async def run_worker(config: WorkerConfig, spans: Spans | None = None) -> int:
    """Run one worker until SIGTERM or SIGINT; a second one ends its drain. Returns the exit code.

    `spans` gets the spans of batches with sampled requests. Raises StartError for a backend that no restart can help: an
    unknown form, a missing module.
    """
    check_form(config.backend)
    worker = Worker(config, spans=spans)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, worker.stop)
    return await worker.run()


class Worker:
    """Owns the worker's parts, their tasks, and the order of start and stop."""

    def __init__(self, config: WorkerConfig, *, spans: Spans | None = None) -> None:
        self._config = config
        self._host = socket.gethostname()
        self._draining = asyncio.Event()
        self._hurried = asyncio.Event()  # The drain ends at once.
        self._broken = False  # A task that must not end has ended.
        self._signalled = False
        self._last_report: WorkerReport | None = None
        self._changing: tuple[object, ...] = ()
        self._idle = False
        """Nothing runs, ran lately, or changes without a call of `_state_changed`: the last report is still valid."""
        self._batches_reported = 0
        secrets = secrets_of(config.backend, config.endpoint)
        launch = ModelLaunch(
            config.backend, config.device, config.torch_threads, config.dtype, secrets, config.max_batch_size
        )
        self._supervisor = ModelSupervisor(launch, config.load_timeout_ms / 1000, self._state_changed)
        self._execution = execution = Execution(config, self._supervisor)
        measured = config.measure_at_start and not config.backend.startswith(SERVERS)
        self._trials = Trials(
            execution.slow_model,
            execution.trial,
            self._supervisor.ready,
            self._state_changed,
            at_start=measured,
            by_silence=lambda: bool(execution.slots.count),
        )
        execution.slowed = self._trials.became_slow
        execution.slots.changed = self._update_slots
        self._gpu = GpuWatch(gpu_of(config.backend, config.device), self._state_changed)
        self._traces = BatchTraces(spans, config.worker_id, config.pool)
        self._direct = DirectBatches(self._execution, self._supervisor, self._rejects_batches, self._traces)
        self._decision = MoveDecision(config.redis_url)
        self._servers: dict[str, str] = {}
        """URLs of cells that responded, with the scheme of a cluster if they are one."""
        self._destination: str | None = None  # The URL of the cell to which the worker is about to move.
        self._popping = False
        self._pop_ended: asyncio.Future[None] | None = None  # Of the pop that is being ended for a move.
        self._ending_pop: asyncio.Task[None] | None = None
        self._left: dict[str, tuple[CellLink, asyncio.Task[None]]] = {}  # By cell: links whose batches have not ended.
        self._link = self._new_link(config.redis_url)
        self._endpoint = DirectEndpoint(config, self._direct, self._local_host)

    def _new_link(self, url: str) -> CellLink:
        return CellLink(
            url,
            self._config,
            self._execution,
            self._traces,
            report=self._beat,
            changed=self._state_changed,
            on_moves=self._moves_received,
        )

    def _update_slots(self) -> None:
        for link in self._links:
            link.slot_pipeline.update()

    def _local_host(self) -> str:
        return self._link.presence.local_host()

    def drain(self) -> None:
        """Claim nothing new, and end when the running batches are done."""
        self._draining.set()

    def stop(self) -> None:
        """Drain; if called again, return what runs to the queue."""
        if self._signalled:
            self._hurried.set()
        self._signalled = True
        self.drain()

    async def run(self) -> int:
        """Run until `drain`; the exit code: 1 if a task ended that must not, so that the process is restarted.

        Raises StartError.
        """
        log.info("worker starting", worker=self._config.worker_id, pool=self._config.pool, backend=self._config.backend)
        await self._endpoint.start()
        self._link.start(self._ended)
        self._gpu.start()
        self._require(self._supervisor.start())
        trials = asyncio.create_task(self._trials.run(), name="trials")
        self._require(trials)
        pump = asyncio.create_task(self._pump(), name="pump")
        self._require(pump)
        try:
            await self._draining.wait()
            await self._finish_running(pump)
        finally:
            await end_all([pump, trials, *([self._ending_pop] if self._ending_pop else [])])
            links = self._links
            await asyncio.gather(*(link.cancel() for link in links))
            self._gpu.stop()
            await self._endpoint.close()
            await self._direct.close()
            leaving = [task for _, task in self._left.values()]
            if leaving:
                await asyncio.wait(leaving, timeout=LEAVE_S)
                await end_all(leaving)
            not_started = self._supervisor.start_error is not None
            if not_started:  # The last heartbeat has the reason.
                with suppress(RedisUnavailable):
                    await self._link.register()
            # A lost worker, and why one cannot start, must be visible in health.
            await asyncio.gather(*(link.close(deregister=not (self._broken or not_started)) for link in links))
            await self._supervisor.close()
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
                if not await self._may_claim():
                    self._destination = None
                    since, model = self._link.heartbeat.failing_since, self._supervisor.model
                    # The Redis of this cell has not responded for LOST_S; another cell may be known.
                    is_lost = since is not None and time.monotonic() - since >= LOST_S and model is not None
                    if is_lost and (url := self._decision.refuge(self._link.cell)) is not None:
                        await self._move(url)
                    continue
                if self._destination is None and self._decision.would_draw(time.monotonic()):
                    # The present document decides: others may have moved by the last one.
                    self._decision.receive(await self._link.presence.moves())
                if (url := self._decided()) is not None:
                    await self._move(url)
                else:
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
            self._link.heartbeat.working,
            self._link.heartbeat.free,
            self._link.pipeline.can_claim,
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
        began, link = time.monotonic(), self._link
        self._popping = True
        try:
            batch_id = await link.ready.pop()
        finally:
            self._popping = False
            if self._pop_ended is not None:
                self._pop_ended.set_result(None)
                self._pop_ended = None
        if batch_id is None:
            return
        failpoint("batch_popped")
        if self._destination or self._status() not in ("ready", "busy") or self._supervisor.model is None:
            failpoint("drain_popped")
            await link.batches.push_back(batch_id)  # If this fails, the reaper pushes it again.
            return
        waited_ms = (time.monotonic() - began) * 1000
        # Less than a batch takes: the worker is busy more than half of the time.
        await link.pipeline.take(batch_id, backlog=waited_ms < max(AHEAD_MS, self._execution.service_p95_ms))

    def _moves_received(self, link: CellLink, moves: bytes | None) -> None:
        """An idle worker decides at once; a busy one before its next pop."""
        if link is not self._link:
            return
        self._decision.receive(moves)
        is_idle = self._popping and not link.in_flight and not self._draining.is_set()
        if not is_idle or self._destination is not None:
            return
        if self._decided() is None:
            if self._decision.is_moving:
                link.heartbeat.within(PERIOD_S)
        else:
            self._pop_ended = asyncio.get_running_loop().create_future()
            ending = self._end_pop(link, self._pop_ended, time.monotonic() + BLOCK_S)
            self._ending_pop = asyncio.create_task(ending, name="end pop")

    def _decided(self) -> str | None:
        """The URL of the cell to which the worker moves now; None: it stays."""
        if self._destination is None:
            self._destination = self._decision.destination(time.monotonic())
        return self._destination

    async def _move(self, url: str) -> None:
        """Serve another cell from now on; batches of this one end meanwhile. If its Redis does not respond, stay here."""
        self._destination, began, old = None, time.monotonic(), self._link
        link, leaving = self._left.get(cell_of(url), (None, None))
        if link is not None and leaving is not None:
            # A former link to that cell could deregister the worker later.
            if link.in_flight:
                return
            del self._left[link.cell]
            await end_all([leaving])
            await link.close()
        server = self._servers.get(url) or await server_url(url)
        new = self._new_link(server)
        if not old.heartbeat.free.is_set():
            new.heartbeat.free.clear()
        try:
            await new.register()
        except TierlaneError as error:
            log.warning("the worker cannot move", destination=new.cell, error=str(error))
            await new.close(deregister=False)
            return
        if self._draining.is_set():
            await new.close()
            return
        self._link, self._servers[url] = new, server
        new.start(self._ended)
        self._leave(old)
        ms = round((time.monotonic() - began) * 1000, 1)
        log.info("worker moved", worker=self._config.worker_id, source=old.cell, destination=new.cell, ms=ms)

    def _leave(self, link: CellLink) -> None:
        """Its batches end in the background."""

        def ended(leaving: "asyncio.Task[None]") -> None:
            if link.cell in self._left and self._left[link.cell][1] is leaving:
                del self._left[link.cell]
            if not leaving.cancelled() and leaving.exception() is not None:
                log_fault("leaving a cell failed", leaving.exception(), cell=link.cell)

        link.left = True
        leaving = asyncio.create_task(link.leave(), name=f"leave {link.cell}")
        self._left[link.cell] = (link, leaving)
        leaving.add_done_callback(ended)

    async def _finish_running(self, pump: "asyncio.Task[None]") -> None:
        """Wait until everything that was claimed is settled, at most for the drain time, or until `stop` or a loss of Redis.

        Meanwhile leases are renewed and heartbeats report "draining".
        """
        self._supervisor.stop()
        self._endpoint.drain()
        self._idle = False
        self._link.heartbeat.now()
        for link in self._links:
            link.drain()
        drain_s = self._config.drain_ms / 1000
        if self._broken:  # What runs may never end, and the restart is what helps.
            drain_s = min(BROKEN_DRAIN_S, drain_s)
        until = time.monotonic() + drain_s
        await self._end_pop(self._link, pump, time.monotonic() + min(END_POPS_S, drain_s))
        work = asyncio.create_task(self._settled(None))
        hurried = asyncio.create_task(_event(self._hurried))
        looks = 0
        try:
            while (left_s := until - time.monotonic()) > 0:
                since = self._link.heartbeat.failing_since
                runs = self._execution.running or self._execution.slots.usage.running or self._direct.in_flight
                if not runs and since is not None and time.monotonic() - since > REDIS_AWAY_S:
                    break  # Redis has not responded for so long that the reaper has what ended.
                if (open_requests := self._open_requests) and looks % REPORT_EVERY == 0:
                    log.info("worker draining", open=open_requests, left_s=round(left_s))
                looks += 1
                ended, _ = await asyncio.wait(
                    [work, hurried], timeout=min(LOOK_S, left_s), return_when=asyncio.FIRST_COMPLETED
                )
                if ended:
                    break
        finally:
            await end_all([work, hurried])
            if self._open_requests:
                log.warning("drain ended early; requests are returned to the queue", open=self._open_requests)
        self._execution.stop()
        await self._settled(SETTLE_S)

    @property
    def _open_requests(self) -> int:
        return sum(link.in_flight for link in self._links) + self._direct.in_flight

    @property
    def _links(self) -> list[CellLink]:
        """The present one first."""
        return [self._link, *(link for link, _ in self._left.values())]

    async def _settled(self, timeout_s: float | None) -> None:
        await asyncio.gather(*(link.settled(timeout_s) for link in self._links), self._direct.settled(timeout_s))

    async def _end_pop(self, link: CellLink, ended: "asyncio.Future[None]", until: float) -> None:
        while not ended.done() and (left_s := until - time.monotonic()) > 0:
            with suppress(RedisUnavailable):
                await link.ready.unblock()
            await asyncio.wait([ended], timeout=min(END_POP_S, left_s))

    def _state_changed(self, *, at_once: bool = True) -> None:
        if self._supervisor.start_error is not None:
            self.drain()
        self._idle = False
        self._update_slots()
        if at_once:
            self._link.heartbeat.now()

    def _beat(self, link: CellLink) -> WorkerReport:
        """The current report to a cell; the same object if nothing has changed."""
        execution = self._execution
        if link.left:
            return with_measurements(self._report("draining", link.in_flight, 0.0, ""), execution)
        in_flight = link.in_flight + self._direct.in_flight
        report, address = self._last_report, self._endpoint.address
        begun = execution.batches + execution.slots.started
        unchanged = self._idle and not in_flight and begun == self._batches_reported
        if unchanged and report is not None and report.direct == address:
            return report
        self._batches_reported = begun
        now, slots = time.monotonic(), execution.slots
        share = min(1.0, slots.usage.recent_running(now) / slots.count) if slots.count else execution.busy.share(now)
        report = self._report(self._status(), in_flight, share, address)
        changing = (begun, report, slots.count, slots.free)
        if self._last_report is None or changing != self._changing:
            self._changing, self._last_report = changing, with_measurements(report, execution)
        self._idle = not share and not in_flight
        return self._last_report

    def _report(self, status: str, in_flight: int, share: float, address: str) -> WorkerReport:
        """A report without measurements; `share` (0..1) is the busy share of the model."""
        return WorkerReport(
            id=self._config.worker_id,
            status=status,
            utilization=share,
            in_flight=in_flight,
            rps=0.0,
            service_p95_ms=0.0,
            backend=self._config.backend,
            model_version=self._supervisor.version,
            direct=address,
            gpu=self._gpu.reading,
            model_pid=self._supervisor.pid,
            model_ms=round(self._execution.slow_model.model_ms, 1),
            timeout_ms=self._config.gpu_timeout_ms,
            context_tokens=self._supervisor.context_tokens,
            reason=self._supervisor.reason,
            cause=self._supervisor.cause,
            host=self._host,
            pid=os.getpid(),
        )

    def _rejects_batches(self) -> bool:
        if self._draining.is_set() or not self._gpu.usable.is_set() or not self._link.heartbeat.free.is_set():
            return True
        return self._status() == "starting"

    def _status(self) -> str:
        if self._draining.is_set() or self._supervisor.start_error is not None:
            return "draining" if self._supervisor.start_error is None else "failed"
        if not self._gpu.usable.is_set():
            return "down"
        status = self._supervisor.status
        if self._execution.slow_model.confirmed and status in SLOW_OVER:
            return "slow"
        if status != "ready" or not self._trials.usable.is_set():
            return "starting" if status == "ready" else status
        if not self._link.heartbeat.free.is_set():
            return "cordoned"
        return "busy" if self._execution.running or self._execution.slots.usage.running else "ready"


async def _event(event: asyncio.Event) -> None:
    await event.wait()
