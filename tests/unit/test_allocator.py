"""Which allocator the embedded Redis is given."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tierlane.embedded.redis import LIBRARY, find_jemalloc, with_jemalloc


@pytest.mark.parametrize("folder", ["", f"{os.uname().machine}-linux-gnu"])
def test_it_is_found_where_systems_keep_it(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the library folder, or in that of this machine's architecture there; elsewhere and on other systems not."""
    monkeypatch.setattr(sys, "platform", "linux")
    other, root = tmp_path / "other", tmp_path / "lib"
    for home in (other / "s390x-elsewhere", root / folder):
        home.mkdir(parents=True)
        (home / LIBRARY).touch()

    assert find_jemalloc([other, root]) == root / folder / LIBRARY
    assert find_jemalloc([other]) is None

    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_jemalloc([root]) is None


@pytest.mark.parametrize(
    ("environment", "library", "result"),
    [
        ({"A": "1"}, None, {"A": "1"}),
        ({"A": "1"}, Path("/j"), {"A": "1", "LD_PRELOAD": "/j"}),
        ({"LD_PRELOAD": "/own"}, Path("/j"), {"LD_PRELOAD": "/own:/j"}),
    ],
)
def test_it_is_preloaded(environment: Mapping[str, str], library: Path | None, result: dict[str, str]) -> None:
    """Behind what is preloaded already, which therefore wins; without it the environment stays as it is."""
    assert with_jemalloc(environment, library) == result
