"""The worker's GPU as NVML reports it: utilization, memory, and faults.

It is read once a second in a thread, since driver calls may be slow. `nvidia-ml-py` is optional: without it, without a
driver, or for a model on the CPU there are no readings. A GPU with a fault stays out of service until the worker is
restarted.

The count of uncorrectable memory errors is the driver's volatile one: it is reset when the driver is loaded or the GPU
is reset, not by a new process. So the worker compares with the count at its start. A newer error may be in memory of
its model: the GPU is out of service for this worker. An older one is a note: data center GPUs from Ampere on do not
allocate that page again, and the reset that remaps its row can wait. Older GPUs retire a page only with that reset, and
may allocate it until then.
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

ECC = "uncorrectable memory error since the worker started"
NEEDS_RESET = "a faulty memory page stays in use until the GPU is reset"
EARLIER_ERRORS = "uncorrectable memory errors from before the worker started"
TO_REMAP = "a memory row will be remapped at the next GPU reset: reset it at a quiet time"
NOT_REMAPPED = "a memory row could not be remapped: replace the GPU"


class FaultCounts(NamedTuple):
    """What the driver reports; unsupported values are 0 or False.

    `errors`: uncorrectable, since the driver was loaded. `retiring`: a page retirement waits for a reset. `remapping`:
    a row remapping waits for a reset. `not_remapped`: a row remapping failed.
    """

    errors: int = 0
    retiring: bool = False
    remapping: bool = False
    not_remapped: bool = False


def fault_of(began: FaultCounts, now: FaultCounts) -> str:
    """Why the GPU must get no more work from this worker, or ""."""
    if now.errors > began.errors:
        return ECC
    return NEEDS_RESET if now.retiring else ""


def note_of(now: FaultCounts) -> str:
    """The most urgent information for the operator, or ""."""
    if now.not_remapped:
        return NOT_REMAPPED
    if now.remapping:
        return TO_REMAP
    return EARLIER_ERRORS if now.errors else ""


FATAL_XIDS = {
    48: "Xid 48: double-bit memory error",
    79: "Xid 79: fell off the bus; restart the machine",
    94: "Xid 94: contained memory error",
    95: "Xid 95: uncontained memory error",
}
"""Hardware errors after which a GPU must get no more work. Other Xids are about the program, not the GPU."""

OFF_THE_BUS = "fell off the bus; restart the machine"
UNTIL_RESET = "the driver requires a GPU reset"
_MIB = 1 << 20
_WITHOUT_GPU = ("simulated", "openai", "oip")  # Backends that use no GPU of this machine.

log = structlog.get_logger()


def gpu_id_of(backend: str, device: str, visible: str | None) -> str | None:
    """The GPU of a worker's model: an index or UUID for NVML, or None.

    `visible` is CUDA_VISIBLE_DEVICES, by which CUDA numbers devices and NVML does not.
    """
    if device == "cpu" or backend.partition(":")[0] in _WITHOUT_GPU:
        return None
    number = int(device.partition(":")[2] or 0)
    if visible is None:
        return str(number)
    devices = [gpu_id.strip() for gpu_id in visible.split(",") if gpu_id.strip()]
    return devices[number] if number < len(devices) else None


class NvmlGpu:
    """An open GPU. `nvml` is the module `pynvml` or a fake; `gpu_id` is as `gpu_id_of` returns it."""

    def __init__(self, nvml: Any, gpu_id: str) -> None:
        self._nvml = nvml
        if gpu_id.isdigit():
            self._handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu_id))
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(gpu_id)
        self._fault = ""
        self._began: FaultCounts | None = None
        self._events = self._listen()

    def read(self) -> GpuReading:
        """The current reading. Unsupported values are 0; a fault stays."""
        nvml, handle = self._nvml, self._handle
        memory = self._query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        busy = self._query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        temperature = self._query(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        counts = self._counts()
        self._began = self._began or counts
        self._fault = self._fault or fault_of(self._began, counts)
        return GpuReading(
            utilization=round((busy or 0) / 100, 2),
            memory_used_mb=memory.used // _MIB if memory else 0,
            memory_total_mb=memory.total // _MIB if memory else 0,
            temperature_c=temperature or 0,
            ecc_uncorrected=counts.errors,
            fault=self._fault,
            note=note_of(counts),
        )

    def _counts(self) -> FaultCounts:
        nvml, handle = self._nvml, self._handle
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = self._query(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        retiring = self._query(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        _, _, pending, failed = self._query(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
        return FaultCounts(errors or 0, bool(retiring), bool(pending), bool(failed))

    def wait(self, seconds: float, pause: Callable[[float], object]) -> None:
        """Wait for `seconds`, or until the driver reports an event; without driver events call `pause`."""
        if self._events is None or self._fault:
            pause(seconds)
            return
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                self._record_fault(error)
                pause(seconds)
            return
        self._fault = FATAL_XIDS.get(event.eventData, "")
        if not self._fault:
            pause(seconds)  # A program that keeps failing must not cause more frequent reads.

    def close(self) -> None:
        """Close the library."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.info("nvml shutdown failed", reason=str(error))

    def _query(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nvml.NVMLError as error:
            self._record_fault(error)
            return None

    def _record_fault(self, error: Any) -> None:
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
            self._record_fault(error)
            return None
        return events


def gpu_of(backend: str, device: str) -> Callable[[], NvmlGpu | None]:
    """Returns a function that opens the GPU of a worker's model; the model process inherits the visible devices."""
    gpu_id = gpu_id_of(backend, device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return lambda: None if gpu_id is None else open_gpu(gpu_id)


def open_gpu(gpu_id: str) -> NvmlGpu | None:
    """The GPU, if NVML is installed and finds it."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return NvmlGpu(nvml, gpu_id)
    except nvml.NVMLError as error:
        log.info("nvml has no such gpu", gpu_id=gpu_id, reason=str(error))
        return None


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
