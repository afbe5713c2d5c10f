"""Reads the worker's GPU once a second, in a thread, since driver calls may be slow."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog

from gpu_pool.worker.nvml_gpu import NvmlGpu
from scheduler.protocol.pool_view import GpuReading

log = structlog.get_logger()

EVERY_S = 1.0


class ReadingListener(Protocol):
    """Called on the event loop with each new reading."""

    def __call__(self, *, at_once: bool) -> None: ...


class GpuWatch:
    """The last reading of the GPU that `find` returns. `changed` is called for each change, `at_once` for a new fault."""

    def __init__(self, find: Callable[[], NvmlGpu | None], changed: ReadingListener, every_s: float = EVERY_S) -> None:
        self._find = find
        self._changed = changed
        self._every_s = every_s
        self._stopping = threading.Event()
        self.reading: GpuReading | None = None
        self.usable = asyncio.Event()
        self.usable.set()

    def start(self) -> None:
        """Start the thread. It ends with the process, or soon after `stop`."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="gpu-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop reading; does not wait for a driver call in progress."""
        self._stopping.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        gpu = self._find()
        if gpu is None:
            return
        with suppress(RuntimeError):  # The event loop is closed.
            while not self._stopping.is_set():
                loop.call_soon_threadsafe(self._take, gpu.read())
                gpu.wait(self._every_s, self._stopping.wait)
        gpu.close()

    def _take(self, reading: GpuReading) -> None:
        if reading == self.reading:
            return
        if reading.note and (self.reading is None or reading.note != self.reading.note):
            log.warning("gpu needs attention", note=reading.note)
        self.reading = reading
        out_of_service = bool(reading.fault) and self.usable.is_set()
        if out_of_service:
            self.usable.clear()
            log.error("gpu is out of service; the worker claims nothing more", reason=reading.fault)
        self._changed(at_once=out_of_service)
