"""The worker's GPU as NVML reports it: utilization, memory, and faults.

`nvidia-ml-py` is optional: without it, without a driver, or for a model on the CPU there are no readings. A GPU with a
fault stays out of service until the worker is restarted.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import structlog

from gpu_pool.worker.gpu_faults import FaultCounts, fault_of, note_of
from scheduler.protocol.pool_view import GpuReading

FATAL_XIDS = {
    48: "Xid 48: double-bit memory error",
    79: "Xid 79: fell off the bus; restart the machine",
    94: "Xid 94: contained memory error",
    95: "Xid 95: uncontained memory error",
}
"""Hardware errors after which a GPU must get no more work. Other Xids are about the program, not the GPU."""

OFF_THE_BUS = "fell off the bus; restart the machine"
UNTIL_RESET = "the driver requires a GPU reset"
NO_GPU = "the worker has no usable GPU"
DRIVER = (Path("/proc/driver/nvidia"), Path("/dev/dxg"))  # The second one under WSL.
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
        self._fault = ""
        if gpu_id.isdigit():
            self._handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu_id))
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(gpu_id)
        self._name = _text(self._query(lambda: nvml.nvmlDeviceGetName(self._handle)))
        pci = self._query(lambda: nvml.nvmlDeviceGetPciInfo(self._handle))
        self._address = _text(pci.busId if pci else None)
        self._began: FaultCounts | None = None
        self._events: Any = None
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events
        except nvml.NVMLError as error:
            self._record_fault(error)

    def read(self) -> GpuReading:
        """The current reading. Unsupported values are 0; a fault stays."""
        nvml, handle = self._nvml, self._handle
        memory = self._query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        busy = self._query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        temperature = self._query(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = self._query(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        retiring = self._query(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        _, _, pending, failed = self._query(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
        counts = FaultCounts(errors or 0, bool(retiring), bool(pending), bool(failed))
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
            name=self._name,
            address=self._address,
        )

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


def _text(value: str | bytes | None) -> str:
    """A text of NVML, which older versions of the library return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def gpu_of(backend: str, device: str) -> Callable[[], NvmlGpu | None]:
    """Returns a function that opens the GPU of a worker's model; the model process inherits the visible devices.

    It logs a warning if the device is `cuda` or `cuda:N` and there is no such GPU: a Python function may never notice.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu_id = gpu_id_of(backend, device, visible)
    if gpu_id is None:
        if device.startswith("cuda") and gpu_id_of(backend, device, None) is not None:
            log.warning(NO_GPU, device=device, reason=f"CUDA_VISIBLE_DEVICES is {visible}")
        return lambda: None
    return lambda: open_gpu(gpu_id, device)


def open_gpu(gpu_id: str, device: str = "auto") -> NvmlGpu | None:
    """The GPU, if NVML is installed and finds it. `device`: TIERLANE_DEVICE; one that names a GPU is missed with a warning."""
    is_named = device.startswith("cuda")
    try:
        nvml = import_module("pynvml")
    except ImportError:
        if is_named and not any(path.exists() for path in DRIVER):
            log.warning(NO_GPU, device=device, reason="no NVIDIA driver is loaded")
        return None
    try:
        nvml.nvmlInit()
        return NvmlGpu(nvml, gpu_id)
    except nvml.NVMLError as error:
        missed = log.warning if is_named else log.info
        missed(NO_GPU, device=device, gpu_id=gpu_id, reason=str(error))
        return None
