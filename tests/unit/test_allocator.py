"""The allocator that the embedded Redis preloads."""

import os
import sys
from pathlib import Path

import pytest

from tierlane_local.embedded.jemalloc import LIBRARY, find_jemalloc, with_jemalloc


@pytest.mark.parametrize("folder", ["", f"{os.uname().machine}-linux-gnu"])
def test_jemalloc_is_found_in_system_folders(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the library folder or its folder for this architecture, on Linux only."""
    monkeypatch.setattr(sys, "platform", "linux")
    other, root = tmp_path / "other", tmp_path / "lib"
    for home in (other / "s390x-elsewhere", root / folder):
        home.mkdir(parents=True)
        (home / LIBRARY).touch()

    assert find_jemalloc([other, root]) == root / folder / LIBRARY
    assert find_jemalloc([other]) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_jemalloc([root]) is None


def test_jemalloc_is_preloaded_after_other_libraries() -> None:
    """Without jemalloc the environment is unchanged."""
    assert with_jemalloc({"A": "1"}, None) == {"A": "1"}
    assert with_jemalloc({"A": "1"}, Path("/j")) == {"A": "1", "LD_PRELOAD": "/j"}
    assert with_jemalloc({"LD_PRELOAD": "/own"}, Path("/j")) == {"LD_PRELOAD": "/own:/j"}
