"""The training text: what is kept of a dictionary's entry, and what is left out."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = """00-database-info
    This describes the dictionary itself and is no entry of it at all.
chase pointers
 /chays poyn'trz/, v.

    1. To go through multiple levels of {indirection}, as in “traversing” a
    linked list. See {
    snap}.

    See {happily}.

    +-------+-------+-------+-------+-------+-------+-------+-------+
cheerfully
 adv.

    See {happily}.
"""


@pytest.fixture(scope="module")
def prepare_text() -> ModuleType:
    """training/prepare_text.py, which belongs to the checkout and to no package."""
    path = Path(__file__).parents[2] / "training" / "prepare_text.py"
    spec = importlib.util.spec_from_file_location("prepare_text", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_entries_become_plain_prose(prepare_text: ModuleType, tmp_path: Path) -> None:
    """Line breaks, braces, numbers and typography go; bare pointers, drawings and empty entries go altogether."""
    path = tmp_path / "jargon.dict.dz"
    path.write_bytes(gzip.compress(SOURCE.encode()))
    assert prepare_text.read_documents(path) == [
        'chase pointers: To go through multiple levels of indirection, as in "traversing" a linked list. See snap.'
    ]
