"""The link of a worker to one cell: all parts that are bound to one Redis. A worker whose heartbeats fail claims nothing.

The first heartbeat, each one with a change, and each one after a failure are sent and awaited by a task. All others are
sent by a timer callback without a task; their reply must be there when the next one is due.

A worker that moves opens a link to the other cell and leaves the present one, whose batches end there. So it has one
present link, and at most one other link to each cell that it left.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from gpu_pool.config import WorkerConfig
from gpu_pool.worker.execution import Execution
from gpu_pool.worker.pipeline import BatchPipeline
from gpu_pool.worker.slot_pipeline import SlotPipeline
from gpu_pool.worker.streams import Outgoing
from gpu_pool.worker.traces import BatchTraces
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import Batches
from scheduler.protocol.increments import IncrementChannel
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import Presence
from scheduler.protocol.ready_batches import ReadyBatches
from scheduler.protocol.stop_signals import StopSignals
from scheduler.protocol.worker_heartbeat import CordonStatus, WorkerBeatReply
from scheduler.redis_client.backoff import Backoff
from scheduler.redis_client.connections import blocking_client, command_client
from scheduler.redis_client.keys import Keys, cell_of
from scheduler.tasks import end_all

MOMENTS = 10
"""All heartbeats of a machine are aligned to this many moments of a period: processes that wake one after another find
the interpreter in the CPU caches, and Redis reads several requests at once.
"""

_EARLY = 0.01  # Timers may fire early by this share of a period; then the moment has not passed.

log = structlog.get_logger()

BLOCK_S = 5.0
"""Longest wait of a pop: an idle worker is woken this rarely. `hang_up` and `unblock` end it sooner."""

DEREGISTER_S = 60.0
"""For how long a worker attempts to deregister from a cell that it left and that does not respond."""


class Heartbeat:
    """Sends what `heartbeat` returns every `every_s` seconds, and at once after `now`. `working`: the last one
    succeeded.

    `on_outage` is called for each failure after another failure. `free` is cleared while replies say that the worker is
    cordoned; `on_cordon_change` is called when that changes. `on_moves` and `on_objective` receive the moves and the objective for
    the milliseconds per token of each reply.
    """

    def __init__(
        self,
        presence: Presence,
        heartbeat: Callable[[], WorkerReport],
        every_s: float,
        *,
        on_outage: Callable[[], None],
        on_cordon_change: Callable[[], None],
        on_moves: Callable[[bytes | None], None],
        on_objective: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._presence = presence
        self._beat = heartbeat
        self._every_s = every_s
        self._on_outage = on_outage
        self._on_cordon_change = on_cordon_change
        self._on_moves = on_moves
        self._on_objective = on_objective
        self._async_heartbeat = presence.async_heartbeat(self.now, self._replied)
        self._due = asyncio.Event()
        self._beat_at = 0.0
        self._within_s = math.inf  # See `within`; until the next one is sent.
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.working = asyncio.Event()
        self.failing_since: float | None = None
        """When the first of the heartbeats failed that have failed in a row, monotonic seconds; None: the last one succeeded."""
        self.free = asyncio.Event()
        self.free.set()

    def start(self) -> "asyncio.Task[None]":
        """Start, with the first heartbeat at once. Returns the task, which ends only by `close`."""
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self._task

    def now(self) -> None:
        """Send the next heartbeat now, since something changed."""
        self._due.set()

    def within(self, seconds: float) -> None:
        """Send the next one within `seconds`, without a change: its reply is wanted sooner."""
        self._within_s = seconds
        self._schedule()

    def fast_path_request(self) -> None:
        """A request to Redis follows: send a heartbeat that is due within half its period along with it."""
        if time.monotonic() - self._beat_at >= self._every_s / 2 and not self._async_heartbeat.pending:
            self._tick()

    async def close(self) -> None:
        """Stop. A heartbeat in progress ends first, so that none arrives after the worker was deregistered."""
        self._stopping = True
        self._due.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._stopping:
            self._due.clear()
            self._beat_at, self._within_s = time.monotonic(), math.inf
            self._async_heartbeat.forget()
            try:
                self._replied(await self._presence.worker_beat(self._beat()))
                if not self.working.is_set():
                    log.info("redis connected")
                self.working.set()
                self.failing_since = None
            except RedisUnavailable:
                self._failed()
            except Exception as error:
                self._failed()
                log.exception("heartbeat failed", error=type(error).__name__)
            self._schedule()
            await self._due.wait()
        self._cancel_timer()
        if self._async_heartbeat.pending:  # Same connection: when this one has arrived, so has the pending one.
            with suppress(RedisUnavailable):
                await self._presence.worker_beat(self._beat())

    def _tick(self) -> None:
        """Send without a task if possible, else wake the task."""
        sent = False
        try:
            pending, waited_s = self._async_heartbeat.pending, time.monotonic() - self._beat_at
            if pending and waited_s < self._every_s / 2 + self._async_heartbeat.distance_s:
                sent = True  # `within` was shorter than the way to Redis and back; the next tick looks again.
            else:
                if pending:
                    self._async_heartbeat.give_up()
                    self._failed()
                if not self._due.is_set() and self.working.is_set() and self._async_heartbeat.send(self._beat()):
                    self._beat_at, self._within_s = time.monotonic(), math.inf
                    sent = True
        except Exception as error:
            self._failed()
            log.exception("heartbeat failed", error=type(error).__name__)
            sent = False
        if sent:
            self._schedule()
        else:
            self._due.set()

    def _replied(self, reply: WorkerBeatReply) -> None:
        self._on_moves(reply.moves)
        self._on_objective(reply.tpot_ms)
        status = reply.cordon
        if status == CordonStatus.UNKNOWN or (status == CordonStatus.FREE) == self.free.is_set():
            return
        if status == CordonStatus.CORDONED:
            log.warning("worker cordoned; it claims nothing more")
            self.free.clear()
        else:
            log.info("worker uncordoned")
            self.free.set()
        self._on_cordon_change()

    def _failed(self) -> None:
        if self.working.is_set():
            log.warning("redis unavailable; nothing is claimed until it responds")
        else:
            self._on_outage()
        self.working.clear()
        if self.failing_since is None:
            self.failing_since = time.monotonic()

    def _schedule(self) -> None:
        self._cancel_timer()
        early_s = _EARLY * self._every_s
        beyond_s = (time.monotonic() + early_s) % (self._every_s / MOMENTS) - early_s
        after_s = min(self._every_s - beyond_s, self._within_s)
        self._timer = asyncio.get_running_loop().call_later(after_s, self._tick)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class CellLink:
    """The link to the cell at `url`. `report` returns the heartbeat's content for a link; `changed`: see `Heartbeat`.

    `on_moves` receives the link and the moves in the reply to each heartbeat.
    """

    def __init__(
        self,
        url: str,
        config: WorkerConfig,
        execution: Execution,
        traces: BatchTraces,
        *,
        report: Callable[["CellLink"], WorkerReport],
        changed: Callable[[], None],
        on_moves: Callable[["CellLink", bytes | None], None],
    ) -> None:
        self.cell = cell_of(url)
        self._config = config
        self._report = report
        self._commands, self._blocking = command_client(url), blocking_client(url)
        keys = Keys.at(url, config.pool)
        self.batches = Batches(self._commands, keys, lease_ms=config.lease_ms)
        self.ready = ReadyBatches(self._blocking, keys, BLOCK_S)
        self.presence = Presence(self._commands, keys, gone_ms=config.gone_ms)
        self.heartbeat = Heartbeat(
            self.presence,
            lambda: report(self),
            config.heartbeat_ms / 1000,
            on_outage=self.ready.hang_up,
            on_cordon_change=changed,
            on_moves=lambda moves: on_moves(self, moves),
            on_objective=execution.slots.set_objective,
        )
        self._outgoing = Outgoing(IncrementChannel(self._commands, keys))
        sending = self.heartbeat.fast_path_request
        self.batch_pipeline = BatchPipeline(config, self.batches, execution, self._outgoing, sending, traces=traces)
        self._stops = blocking_client(url)
        stops = StopSignals(self._stops, keys, config.worker_id, BLOCK_S)
        self.slot_pipeline = SlotPipeline(
            config,
            self.batches,
            execution.slots,
            outgoing=self._outgoing,
            sending=sending,
            stops=stops,
            traces=traces,
        )
        self._slots = execution.slots
        self.left = False
        """The worker has moved: it reports that it is draining here, until its batches have ended."""
        self._sender: asyncio.Task[None] | None = None
        self._closing = self._closed = False

    @property
    def pipeline(self) -> BatchPipeline | SlotPipeline:
        """The one for the present model."""
        return self.slot_pipeline if self._slots.count else self.batch_pipeline

    @property
    def in_flight(self) -> int:
        """Requests that were claimed and have not ended."""
        return self.batch_pipeline.in_flight + self.slot_pipeline.in_flight

    def drain(self) -> None:
        """Start nothing more."""
        self.batch_pipeline.drain()
        self.slot_pipeline.drain()

    async def settled(self, timeout_s: float | None) -> None:
        """Wait until everything that was claimed is settled, for at most `timeout_s`."""
        await asyncio.gather(self.batch_pipeline.settled(timeout_s), self.slot_pipeline.settled(timeout_s))

    async def cancel(self) -> None:
        """Cancel what is left; the reaper retries it."""
        await asyncio.gather(self.batch_pipeline.close(), self.slot_pipeline.close())

    async def register(self) -> None:
        """The first heartbeat. Raises RedisUnavailable: then the link cannot be used."""
        await self.presence.worker_beat(self._report(self))

    def start(self, ended: Callable[["asyncio.Task[None]"], None]) -> None:
        """Send heartbeats and streams. `ended` is called if one of these tasks ends before `close`."""

        def only_early(task: "asyncio.Task[None]") -> None:
            if not self._closing:
                ended(task)

        self._sender = asyncio.create_task(self._outgoing.run(), name="outgoing")
        for task in (self.heartbeat.start(), self._sender):
            task.add_done_callback(only_early)

    async def leave(self) -> None:
        """End the batches of this cell, and close. If it is cancelled, `close` must follow."""
        self.heartbeat.now()
        await self.settled(None)
        await self.close(for_s=DEREGISTER_S)

    async def close(self, *, for_s: float = 0.0, deregister: bool = True) -> None:
        """Cancel batches that have not ended, and deregister, with attempts for `for_s` while Redis does not respond."""
        if self._closed:
            return
        self._closing = True
        await self.cancel()
        await self.heartbeat.close()
        try:
            until, backoff = time.monotonic() + for_s, Backoff()
            while deregister:
                try:
                    await self.presence.worker_gone(self._config.worker_id)
                    break
                except RedisUnavailable:
                    if time.monotonic() >= until:
                        log.warning("redis unavailable; the worker was not deregistered", cell=self.cell)
                        break
                await backoff.sleep()
        finally:
            if self._sender is not None:
                await end_all([self._sender])
            self._closed = True
            await self._commands.aclose()
            await self._blocking.aclose()
            await self._stops.aclose()
