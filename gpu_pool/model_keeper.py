"""Keeps one model process alive: starts it, waits until it is ready, and starts another one when it is lost.

A model that keeps dying is started ever more rarely (0.1 s doubling to 5 s), until it has lived for 10 s.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import structlog

from gpu_pool.model_handle import ModelLaunch, ModelLost, ModelProcess
from scheduler.backoff import Backoff
from scheduler.errors import StartError

FIRST_RESPAWN_S, SLOWEST_RESPAWN_S, HEALTHY_AFTER_S = 0.1, 5.0, 10.0

ModelStatus = Literal["starting", "ready", "down"]
log = structlog.get_logger()


class ModelKeeper:
    """Owner of the model process. `changed` is called whenever `status` or `start_error` changed."""

    def __init__(self, launch: ModelLaunch, load_timeout_s: float, changed: Callable[[], None]) -> None:
        self._launch = launch
        self._load_timeout_s = load_timeout_s
        self._changed = changed
        self._process: ModelProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.status: ModelStatus = "starting"
        self.version = ""
        self.ready = asyncio.Event()
        self.start_error: StartError | None = None

    @property
    def model(self) -> ModelProcess | None:
        """The process, while it is ready for a batch."""
        return self._process if self.ready.is_set() and self._process and not self._process.lost.is_set() else None

    def start(self) -> None:
        """Begin to keep a model alive."""
        self._task = asyncio.create_task(self._keep(), name="model-keeper")

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
        backoff = Backoff(FIRST_RESPAWN_S, SLOWEST_RESPAWN_S, draw=max)  # No jitter: nobody else waits for this
        while not self._stopping:
            ready_at = await self._bring_up()
            if self.start_error is not None:
                return
            if ready_at is not None and time.monotonic() - ready_at >= HEALTHY_AFTER_S:
                backoff.reset()
            await backoff.sleep()

    async def _bring_up(self) -> float | None:
        """Live through one process, from spawn to its end; when it got ready, or None where it never did."""
        ready_at = None
        try:
            process = self._process = await ModelProcess.spawn(self._launch)
            async with asyncio.timeout(self._load_timeout_s):
                self.version = await process.ready()
            ready_at = time.monotonic()
            self._set("ready")
            log.info("model ready", backend=self._launch.backend, version=self.version, pid=process.pid)
            await process.lost.wait()
            self._set("down")
        except StartError as error:
            # Of a model that was ready before, even this is worth another try: a disk may come back.
            self.start_error = None if self.version else error
        except TimeoutError:
            log.warning("model did not load in time", seconds=self._load_timeout_s)
        except OSError as error:
            log.warning("model process cannot be started", error=str(error))
        except ModelLost:
            pass  # Told below, together with how the process ended.
        self._set("down")
        await self._end_process()
        return ready_at

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        await process.close()
        self._process = None  # Not before: a stop in the middle of this begins it again, and reaps.
        if not self._stopping:
            log.error("model lost", pid=process.pid, reason=process.why_lost)

    def _set(self, status: ModelStatus) -> None:
        if status == "ready":
            self.ready.set()
        else:
            self.ready.clear()
        self.status = status
        self._changed()
