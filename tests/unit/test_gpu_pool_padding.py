"""Counting padding: literal lengths, literal shares; and what `tiny` counts of a batch."""

import pytest

from gpu_pool.backends.backend import Item, Padding
from gpu_pool.backends.simulated import SimulatedBackend
from gpu_pool.backends.tiny.backend import TinyBackend
from gpu_pool.model_process.batch_runner import BatchRunner
from scheduler.payload import Task


@pytest.mark.parametrize(
    ("lengths", "share"),
    [([10, 10], 0.0), ([10], 0.0), ([10, 30], 1 / 3), ([1, 1, 1, 97], 1 - 100 / 388), ([], 0.0)],
)
def test_rows_are_padded_to_the_longest(lengths: list[int], share: float) -> None:
    """What one pass computes for nothing."""
    padding = Padding()

    padding.passed(lengths)

    assert padding.take() == pytest.approx(share)


def test_rows_that_are_done_are_padding_until_they_leave() -> None:
    """And each batch is counted by itself."""
    padding = Padding()
    padding.passed([4, 4])
    padding.stepped(2, 2)
    padding.stepped(1, 2)

    assert padding.take() == pytest.approx(1 / 12)
    assert padding.take() == 0.0


def test_tiny_tells_it_of_each_batch() -> None:
    """A text of 9 characters beside one of 39, each with its mark of the beginning: 50 tokens in 80 positions."""
    backend = TinyBackend("cpu", 1)
    backend.load()
    runner = BatchRunner(backend, lambda: None)

    runner.run([Item("x" * 9, task=Task.EMBED), Item("x" * 39, task=Task.EMBED)], 3000)
    assert runner.padding_waste == pytest.approx(30 / 80)

    runner.run([Item("x" * 20, {"max_tokens": 4})] * 2, 3000)
    assert runner.padding_waste == 0.0


def test_a_backend_that_does_not_count_has_none() -> None:
    """Nothing is asked of it."""
    runner = BatchRunner(SimulatedBackend(0), lambda: None)

    runner.run([Item("a"), Item("long")], 3000)

    assert runner.padding_waste == 0.0
