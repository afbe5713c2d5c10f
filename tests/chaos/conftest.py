"""The chaos tests' own stack: four simulated GPUs, stopped at the end."""

from collections.abc import Iterator

import pytest

from stack import Stack, start_stack


@pytest.fixture
def chaos_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A fresh stack for each run."""
    with start_stack(tmp_path_factory.mktemp("chaos"), "--backend", "simulated:50", "--workers", "4") as stack:
        yield stack
