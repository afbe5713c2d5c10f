"""Keeps one model process alive: starts it, restarts it when it is lost, and quarantines a bad model."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import structlog

from gpu_pool.model_process.handle import ModelLost, ModelProcess
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.quarantine import BatchVerdict, Quarantine
from gpu_pool.model_process.respawn import Respawn
from scheduler.errors import StartError

REAPED_WITHIN_S = 5.0  # After SIGKILL; a process that takes longer hangs in the kernel with its device.

ModelStatus = Literal["starting", "ready", "paused", "away", "down", "quarantined", "failed"]
_LOADED = ("ready", "paused", "away")
log = structlog.get_logger()


class ModelSupervisor:
    """Owns the model process. `changed` is called whenever `status` or `start_error` changed."""

    def __init__(self, launch: ModelLaunch, load_timeout_s: float, changed: Callable[[], None]) -> None:
        self._launch = launch
        self._load_timeout_s = load_timeout_s
        self._changed = changed
        self._process: ModelProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stopping = False
        self._respawn = Respawn()
        self._quarantine = Quarantine()
        self._quarantine_s = 0.0
        self._good_batches = 0
        self._slots = 0
        self.status: ModelStatus = "starting"
        self.version = ""
        self.context_tokens = 0
        self.reason = ""
        """Why the model's server is not available or what is wrong with it, as last reported; "" if nothing is."""
        self.cause = ""
        """The cause of `reason`, as in WorkerReport."""
        self.ready = asyncio.Event()
        self.start_error: StartError | None = None

    @property
    def model(self) -> ModelProcess | None:
        """The process, if it is ready for a batch."""
        return self._process if self.ready.is_set() and self._process and not self._process.lost.is_set() else None

    @property
    def pid(self) -> int:
        """The id of the process, ready or not; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> "asyncio.Task[None]":
        """Start and keep a model process alive. Returns the task, which ends by `stop` or with `start_error`."""
        self._task = asyncio.create_task(self._run(), name="model-supervisor")
        return self._task

    def batch_ended(self, verdict: BatchVerdict) -> None:
        """A batch was answered; too much invalid output ends the process."""
        self._good_batches += verdict is BatchVerdict.GOOD
        self._quarantine_s = self._quarantine.after(verdict)
        if self._quarantine_s and self._process is not None:
            log.error("model quarantined after invalid output", seconds=self._quarantine_s)
            self._set("quarantined")
            self._process.kill()

    def process_failed(self) -> None:
        """The process was lost during a batch: until its end is noticed it must get no other one."""
        if self.status in _LOADED:
            self._set("down")

    def stop(self) -> None:
        """Start no further process."""
        self._stopping = True

    async def close(self) -> None:
        """End the model process and reap it."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_process()

    async def _run(self) -> None:
        while not self._stopping:
            self._quarantine_s, self._good_batches = 0.0, 0
            ready_at = lost = None
            try:
                launch = replace(self._launch, slots=self._slots)
                process = self._process = await ModelProcess.spawn(launch, self._availability_changed)
                async with asyncio.timeout(self._load_timeout_s):
                    self.version = await process.ready()
                self.context_tokens = process.context_tokens
                ready_at = time.monotonic()
                self._respawn.loaded()
                self.reason, self.cause, process.resized = process.note, process.cause, self._changed
                self._set(_availability(process))
                log.info("model ready", backend=self._launch.backend, version=self.version, pid=process.pid)
                await process.lost.wait()
                self._slots, lost = process.slots, process
            except StartError as error:
                # If the model was ready before, even this may be temporary: retry.
                self.start_error, self.reason = None if self.version else error, str(error)
            except TimeoutError:
                log.warning("model did not load in time", seconds=self._load_timeout_s)
            except OSError as error:
                log.warning("model process cannot be started", error=str(error))
            except ModelLost:
                lost = self._process
            ready_s = None if ready_at is None else time.monotonic() - ready_at
            self._set(self.status if self._quarantine_s or self._respawn.failed else "down")
            await self._end_process()
            if self.start_error is not None:
                return
            if lost is not None and not self._stopping and not self._quarantine_s:
                # Only now, because its exit code is known once it has ended.
                self.reason, self.cause = lost.why_lost, ""
                self._changed()
            delay_s = self._respawn.ended(ready_s, self._good_batches)
            if self._respawn.failed and self.status != "failed":
                log.error("model does not load; it is retried rarely from now on")
                self._set("failed")
            await asyncio.sleep(self._quarantine_s or delay_s)

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        self._closing = self._closing or asyncio.create_task(process.close())
        if not (await asyncio.wait([self._closing], timeout=REAPED_WITHIN_S))[0]:
            log.error("model process cannot be killed; its device is out of service", pid=process.pid)
            self._set("quarantined")
            if self._stopping:
                return
        await asyncio.shield(self._closing)
        self._process = self._closing = None  # Not earlier: a concurrent stop waits for the same task.
        if not self._stopping:
            log.error("model lost", pid=process.pid, reason=process.why_lost)

    def _availability_changed(self) -> None:
        """The model process accepts batches, or none for now. Before it is ready, only the reason is of interest."""
        process = self._process
        if process is None:
            return
        before, self.reason, self.cause = self.reason, process.note, process.cause
        if self.status not in _LOADED:
            if self.reason and self.reason != before:
                log.info("model is waiting", reason=self.reason, cause=self.cause)
            self._changed()
            return
        log.info("model available" if not process.unavailable else "model paused", reason=process.unavailable)
        self._set(_availability(process))

    def _set(self, status: ModelStatus) -> None:
        if status == "ready":
            self.ready.set()
        else:
            self.ready.clear()
        self.status = status
        self._changed()


def _availability(process: ModelProcess) -> Literal["ready", "paused", "away"]:
    if not process.unavailable:
        return "ready"
    return "paused" if process.brief else "away"
