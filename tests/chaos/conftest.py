"""The chaos tests' own stack: four simulated GPUs of 50 ms and batches of 8, so 640 requests/s; stopped at the end."""

from collections.abc import Iterator

import pytest

from stack import Stack, start_stack

FOUR_GPUS = ("--backend", "simulated:50", "--workers", "4", "--max-batch-size", "8")


@pytest.fixture
def chaos_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A fresh stack for each run."""
    with start_stack(tmp_path_factory.mktemp("chaos"), *FOUR_GPUS) as stack:
        yield stack
