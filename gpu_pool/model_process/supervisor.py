"""Keeps one model process alive: starts it, waits until it is ready, and starts another one when it is lost.

How soon is decided by `respawn`. Whoever runs batches says how they went; a model in quarantine is ended, and started
again when its time is over, through load and warm-up like any other.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import structlog

from gpu_pool.model_launch import ModelLaunch
from gpu_pool.model_process.handle import ModelLost, ModelProcess
from gpu_pool.quarantine import Quarantine, Verdict
from gpu_pool.respawn import Respawn
from scheduler.errors import StartError

REAPED_WITHIN_S = 5.0  # After SIGKILL; what takes longer hangs in the kernel, and its device with it.

ModelStatus = Literal["starting", "ready", "paused", "away", "down", "quarantined", "failed"]
_LOADED = ("ready", "paused", "away")
log = structlog.get_logger()


class ModelKeeper:
    """Owner of the model process. `changed` is called whenever `status` or `start_error` changed."""

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
        self._aside_s = 0.0
        self._good_batches = 0
        self.status: ModelStatus = "starting"
        self.version = ""
        self.ready = asyncio.Event()
        self.start_error: StartError | None = None

    @property
    def model(self) -> ModelProcess | None:
        """The process, while it is ready for a batch."""
        return self._process if self.ready.is_set() and self._process and not self._process.lost.is_set() else None

    @property
    def pid(self) -> int:
        """Of the process that is there, ready or not; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> "asyncio.Task[None]":
        """Begin to keep a model alive. Returns the task, which ends by `stop` or with `start_error`."""
        self._task = asyncio.create_task(self._keep(), name="model-keeper")
        return self._task

    def batch_ended(self, verdict: Verdict) -> None:
        """A batch was answered; a model that answers nonsense ends here."""
        self._good_batches += verdict is Verdict.GOOD
        self._aside_s = self._quarantine.after(verdict)
        if self._aside_s and self._process is not None:
            log.error("model answers nonsense; it is put into quarantine", seconds=self._aside_s)
            self._set("quarantined")
            self._process.kill()

    def given_up(self) -> None:
        """Its process was killed or lost in the middle of a batch. Until its end is noticed it must get no other one,
        which would be lost with it and would count that as an attempt.
        """
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

    async def _keep(self) -> None:
        while not self._stopping:
            self._aside_s, self._good_batches = 0.0, 0
            ready_s = await self._live()
            if self.start_error is not None:
                return
            delay_s = self._respawn.ended(ready_s, self._good_batches)
            if self._respawn.failed and self.status != "failed":
                log.error("model does not load; it is tried rarely from now on")
                self._set("failed")
            await asyncio.sleep(self._aside_s or delay_s)

    async def _live(self) -> float | None:
        """Live through one process, from spawn to its end; how long it was ready (s), or None where it never was."""
        ready_at = None
        try:
            process = self._process = await ModelProcess.spawn(self._launch, self._availability_changed)
            async with asyncio.timeout(self._load_timeout_s):
                self.version = await process.ready()
            ready_at = time.monotonic()
            self._respawn.loaded()
            self._set(_availability(process))
            log.info("model ready", backend=self._launch.backend, version=self.version, pid=process.pid)
            await process.lost.wait()
        except StartError as error:
            # Of a model that was ready before, even this is worth another try: a disk may come back.
            self.start_error = None if self.version else error
        except TimeoutError:
            log.warning("model did not load in time", seconds=self._load_timeout_s)
        except OSError as error:
            log.warning("model process cannot be started", error=str(error))
        except ModelLost:
            pass  # Told below, together with how the process ended.
        ready_s = None if ready_at is None else time.monotonic() - ready_at
        self._set(self.status if self._aside_s or self._respawn.failed else "down")
        await self._end_process()
        return ready_s

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        self._closing = self._closing or asyncio.create_task(process.close())
        if not (await asyncio.wait([self._closing], timeout=REAPED_WITHIN_S))[0]:
            log.error("model process cannot be ended; its device is out of use", pid=process.pid)
            self._set("quarantined")
            if self._stopping:
                return
        await asyncio.shield(self._closing)
        self._process = self._closing = None  # Not before: a stop in the middle of this waits for the same.
        if not self._stopping:
            log.error("model lost", pid=process.pid, reason=process.why_lost)

    def _availability_changed(self) -> None:
        """The model process wants batches, or no more of them for now; before it is ready that is asked there."""
        process = self._process
        if process is None or self.status not in _LOADED:
            return
        log.info("model wants batches" if not process.unavailable else "model pauses", reason=process.unavailable)
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
