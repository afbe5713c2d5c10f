"""Looks at a worker's GPU once a second, in a thread: the driver may take its time, and the event loop has none.

A GPU with a fault stays out until the worker is started anew: what it computes cannot be trusted, and that it answers
again proves nothing. Whether a new start is enough is for the driver to say (`gpu_memory`).
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog

from gpu_pool.worker.gpu import NvmlGpu
from scheduler.protocol.pool_view import GpuReading

EVERY_S = 1.0

log = structlog.get_logger()


class Changed(Protocol):
    """Called on the event loop with each new reading."""

    def __call__(self, *, at_once: bool) -> None: ...


class GpuWatch:
    """The last reading of the GPU that `find` finds. `changed` is told whether others must know at once."""

    def __init__(self, find: Callable[[], NvmlGpu | None], changed: Changed, every_s: float = EVERY_S) -> None:
        self._find = find
        self._changed = changed
        self._every_s = every_s
        self._stopping = threading.Event()
        self.reading: GpuReading | None = None
        self.well = asyncio.Event()
        self.well.set()

    def start(self) -> None:
        """Begin to look. The thread ends with the process, or soon after `stop`."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._look, args=(loop,), name="gpu-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more; does not wait for a call that is under way."""
        self._stopping.set()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        gpu = self._find()
        if gpu is None:
            return
        with suppress(RuntimeError):  # The event loop is closed: nobody is left to be told.
            while not self._stopping.is_set():
                loop.call_soon_threadsafe(self._take, gpu.read())
                gpu.wait(self._every_s, self._stopping.wait)
        gpu.close()

    def _take(self, reading: GpuReading) -> None:
        if reading == self.reading:
            return
        if reading.note and (self.reading is None or reading.note != self.reading.note):
            log.warning("gpu wants to be looked after", note=reading.note)
        self.reading = reading
        falls_out = bool(reading.fault) and self.well.is_set()
        if falls_out:
            self.well.clear()
            log.error("gpu is out; its worker takes nothing more", reason=reading.fault)
        self._changed(at_once=falls_out)
