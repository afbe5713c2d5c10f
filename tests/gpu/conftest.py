"""Tests that need a real GPU: where there is none they are not selected, which pytest says, and never skipped midway."""

from functools import cache
from pathlib import Path

import pytest

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux, and Linux under Windows.


@cache
def cuda() -> bool:
    """Whether torch can use a GPU; it is asked only where there is a driver, since importing it takes a second."""
    if not any(driver.exists() for driver in DRIVERS):
        return False
    import torch  # noqa: PLC0415 - see above

    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `gpu` where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not cuda():
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
