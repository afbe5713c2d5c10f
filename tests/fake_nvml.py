"""NVML without a GPU: a module's worth of functions that tell what a test has set, and fail as the driver does."""

import threading
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As pynvml's: `value` is one of the NVML_ERROR constants."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """One GPU, index 0 and UUID `GPU-1`. `failing` maps a function's name to the error that it raises."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 10, 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - its name in the library

    def __init__(self) -> None:
        self.ecc = 0
        self.retiring = 0
        self.rows = [0, 0, 0, 0]
        """Rows remapped for correctable errors, for others, whether some are to be, whether that ever failed."""
        self.xids: list[int] = []
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        """Every function of the library that is asked for: looked up here, with its failure, if it has one."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *given: self._called(name, *given)

    def _called(self, name: str, *given: Any) -> Any:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name in self.failing:
            raise NVMLError(self.failing[name])
        return self._answers(given).get(name)

    def _answers(self, given: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "nvmlDeviceGetHandleByIndex": given,
            "nvmlDeviceGetHandleByUUID": given,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=80 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTotalEccErrors": self.ecc,
            "nvmlDeviceGetRetiredPagesPendingStatus": self.retiring,
            "nvmlDeviceGetRemappedRows": list(self.rows),
            "nvmlEventSetCreate": "events",
        }

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> SimpleNamespace:  # noqa: N802 - the library's
        """The next Xid, or the driver's way to say that there was none; no test waits for it."""
        self.calls.append("nvmlEventSetWait_v2")
        if "nvmlEventSetWait_v2" in self.failing:
            raise NVMLError(self.failing["nvmlEventSetWait_v2"])
        if not self.xids:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))
