"""Tests that need a real GPU are deselected where torch cannot use one."""

from functools import cache
from pathlib import Path

import pytest

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux, and Linux under Windows.


@cache
def cuda() -> bool:
    """Whether torch can use a GPU; it is imported only if there is a driver."""
    if not any(driver.exists() for driver in DRIVERS):
        return False
    import torch  # noqa: PLC0415 - slow

    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked `gpu`."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not cuda():
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
