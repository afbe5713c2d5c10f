"""The GPU of a worker as NVML shows it: utilisation, memory, and whether it can still be trusted.

It is read once a second in a thread, since calls into the driver may take long. `nvidia-ml-py` is optional: without it,
without a driver, or for a model on the CPU there is nothing to read. A GPU with a fault stays out until the worker is
started anew.

The count of uncorrectable memory errors is the driver's volatile one: it is reset when the driver is loaded or the GPU
is reset, and by no new process. So a worker compares with the count that it began with. An error since then may be in
what its model holds: the GPU is out for this worker. One from before is history: from Ampere's data center GPUs on the
driver lets nobody have that page again, and the reset that remaps its row can wait for a quiet hour. Older GPUs retire
a page only with that reset: until then it may be given to anybody.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import structlog

from scheduler.protocol.pool_view import GpuReading

ECC = "its memory had an error that ECC cannot correct since this worker began"
WANTS_RESET = "a broken page of its memory is in use until the GPU is reset"
BEFORE = "uncorrectable errors of its memory from before this worker began"
TO_REMAP = "a row of its memory is remapped at the next reset: it can wait for a quiet hour"
NOT_REMAPPED = "a row of its memory could not be remapped: have it replaced"


class FaultCounts(NamedTuple):
    """What the driver says; what a GPU does not have is 0 or False.

    `errors`: uncorrectable, since the driver was loaded. `retiring`: a page's retirement waits for a reset. `remapping`,
    `not_remapped`: a row's remapping does, or failed once.
    """

    errors: int = 0
    retiring: bool = False
    remapping: bool = False
    not_remapped: bool = False


def fault_of(began: FaultCounts, now: FaultCounts) -> str:
    """Why the GPU must get no more work from this worker, or ""."""
    if now.errors > began.errors:
        return ECC
    return WANTS_RESET if now.retiring else ""


def note_of(now: FaultCounts) -> str:
    """What the one who looks after the machine should know, or ""; the most urgent of it."""
    if now.not_remapped:
        return NOT_REMAPPED
    if now.remapping:
        return TO_REMAP
    return BEFORE if now.errors else ""


FATAL_XIDS = {
    48: "Xid 48: its memory had an error of two bits",
    79: "Xid 79: it fell off the bus; its machine is out until it restarts",
    94: "Xid 94: a contained ECC error",
    95: "Xid 95: an uncontained ECC error",
}
"""What the driver says of a GPU that must get no more work. Other Xids are about the program that ran, not the GPU."""

OFF_THE_BUS = "it fell off the bus; its machine is out until it restarts"
UNTIL_RESET = "the driver takes no work for it before it is reset"
_MIB = 1 << 20
_NOT_THE_GPU = ("simulated", "openai")  # Backends whose work is done elsewhere.

log = structlog.get_logger()


def gpu_place(backend: str, device: str, visible: str | None) -> str | None:
    """Which GPU a worker's model is on: an index or UUID for NVML; None where it is on none.

    `visible` is CUDA_VISIBLE_DEVICES, through which CUDA counts and NVML does not.
    """
    if device == "cpu" or backend.partition(":")[0] in _NOT_THE_GPU:
        return None
    number = int(device.partition(":")[2] or 0)
    if visible is None:
        return str(number)
    seen = [place.strip() for place in visible.split(",") if place.strip()]
    return seen[number] if number < len(seen) else None


class NvmlGpu:
    """An open GPU. `nvml` is the module `pynvml`, or what stands for it in a test; `place` as `gpu_place` says."""

    def __init__(self, nvml: Any, place: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(int(place)) if place.isdigit() else _by_uuid(nvml, place)
        self._fault = ""
        self._began: FaultCounts | None = None
        self._events = self._listen()

    def read(self) -> GpuReading:
        """What it does now. What a model of GPU does not tell is 0; a fault once seen stays."""
        nvml, handle = self._nvml, self._handle
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        busy = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        warmth = self._told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        counts = self._counts()
        self._began = self._began or counts
        self._fault = self._fault or fault_of(self._began, counts)
        return GpuReading(
            utilization=round((busy or 0) / 100, 2),
            memory_used_mb=memory.used // _MIB if memory else 0,
            memory_total_mb=memory.total // _MIB if memory else 0,
            temperature_c=warmth or 0,
            ecc_uncorrected=counts.errors,
            fault=self._fault,
            note=note_of(counts),
        )

    def _counts(self) -> FaultCounts:
        nvml, handle = self._nvml, self._handle
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = self._told(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        retiring = self._told(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        _, _, pending, failed = self._told(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
        return FaultCounts(errors or 0, bool(retiring), bool(pending), bool(failed))

    def wait(self, seconds: float, pause: Callable[[float], object]) -> None:
        """Wait so long, or until the driver says something; where it says nothing at all, by `pause`."""
        if self._events is None or self._fault:
            pause(seconds)
            return
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                self._judge(error)
                pause(seconds)
            return
        self._fault = FATAL_XIDS.get(event.eventData, "")
        if not self._fault:
            pause(seconds)  # A program that fails again and again must not have it read as often.

    def close(self) -> None:
        """Let go of the library."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.info("nvml was not closed", reason=str(error))

    def _told(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            self._judge(error)
            return None

    def _judge(self, error: Any) -> None:
        if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
            self._fault = self._fault or OFF_THE_BUS
        elif error.value == self._nvml.NVML_ERROR_RESET_REQUIRED:
            self._fault = self._fault or UNTIL_RESET

    def _listen(self) -> Any:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            self._judge(error)
            return None
        return events


def gpu_of(backend: str, device: str) -> Callable[[], NvmlGpu | None]:
    """Opens the GPU of a worker's model when it is called; the model process inherits what is visible here."""
    place = gpu_place(backend, device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return lambda: None if place is None else open_gpu(place)


def open_gpu(place: str) -> NvmlGpu | None:
    """The GPU, where there is one and NVML can see it."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return NvmlGpu(nvml, place)
    except nvml.NVMLError as error:
        log.info("nvml sees no gpu", place=place, reason=str(error))
        return None


def _by_uuid(nvml: Any, place: str) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(place)


EVERY_S = 1.0


class ReadingListener(Protocol):
    """Called on the event loop with each new reading."""

    def __call__(self, *, at_once: bool) -> None: ...


class GpuWatch:
    """The last reading of the GPU that `find` finds. `changed` is told whether others must know at once."""

    def __init__(self, find: Callable[[], NvmlGpu | None], changed: ReadingListener, every_s: float = EVERY_S) -> None:
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
