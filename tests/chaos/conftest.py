"""The stack of the chaos tests: four simulated GPUs with batches of 8 in 50 ms, so 640 requests/s."""

from collections.abc import Iterator

import pytest

from stack import Stack, start_stack

FOUR_GPUS = ("--backend", "simulated:50", "--workers", "4", "--max-batch-size", "8")


@pytest.fixture
def chaos_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A new stack for each test."""
    with start_stack(tmp_path_factory.mktemp("chaos"), *FOUR_GPUS) as stack:
        yield stack
