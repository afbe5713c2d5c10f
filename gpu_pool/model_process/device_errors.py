"""Errors of the device: out of memory, and those that persist until the process ends.

A CUDA error other than out-of-memory persists, so the device is lost. Such errors are recognised by names and texts, so
that nothing here imports torch.
"""

import sys
from typing import Any

from scheduler.errors import TierlaneError

_STICKY_TYPES = frozenset({"AcceleratorError"})
_STICKY_TEXTS = (
    "CUDA error",
    "device-side assert",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)


class DeviceLost(TierlaneError):
    """The model process cannot go on: its device or the model is broken."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device ran out of memory; a smaller batch may fit."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def raise_if_lost(error: BaseException) -> None:
    """Raise DeviceLost if every later call would fail too, until a new process takes over."""
    if is_out_of_memory(error):
        return
    by_text = isinstance(error, RuntimeError) and any(text in str(error) for text in _STICKY_TEXTS)
    if by_text or type(error).__name__ in _STICKY_TYPES:
        raise DeviceLost(f"The device is lost after {type(error).__name__}.") from error


def free_cached_memory() -> None:
    """Return torch's cached blocks to the device, if torch is in use."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
