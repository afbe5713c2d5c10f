"""A fake `pynvml` module with one GPU; values and failures are set by the test."""

import threading
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml: `value` is an NVML_ERROR constant."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """One GPU with index 0 and UUID `GPU-1`. `failing` maps a function name to the error that it raises."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 10, 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self) -> None:
        self.ecc = 0
        self.retiring = 0
        self.rows = [0, 0, 0, 0]
        """Remapped rows: correctable, uncorrectable, remapping pending, remapping failed."""
        self.xids: list[int] = []
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        """Any function of the library."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name in self.failing:
            raise NVMLError(self.failing[name])
        return self._results(args).get(name)

    def _results(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "nvmlDeviceGetHandleByIndex": args,
            "nvmlDeviceGetHandleByUUID": args,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=80 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTotalEccErrors": self.ecc,
            "nvmlDeviceGetRetiredPagesPendingStatus": self.retiring,
            "nvmlDeviceGetRemappedRows": list(self.rows),
            "nvmlEventSetCreate": "events",
            "nvmlDeviceGetName": "NVIDIA H100",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:3B:00.0"),
        }

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> SimpleNamespace:  # noqa: N802
        """The next Xid, else a timeout error at once."""
        self.calls.append("nvmlEventSetWait_v2")
        if "nvmlEventSetWait_v2" in self.failing:
            raise NVMLError(self.failing["nvmlEventSetWait_v2"])
        if not self.xids:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))
