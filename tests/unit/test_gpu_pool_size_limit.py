"""How much the device holds in one go: what out-of-memory teaches, as a table."""

from collections.abc import Callable, Sequence

import pytest

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.model_process.batch_runner import BatchRunner, SizeLimit


class OutOfMemoryError(RuntimeError):
    """Named as torch names a device that is full."""


class Small:
    """A device that holds `most` items, and counts what it is given."""

    version = "small"

    def __init__(self, most: int, on_run: Callable[[], None] = lambda: None) -> None:
        self._most = most
        self._on_run = on_run
        self.sizes: list[int] = []

    def load(self) -> None:
        """There is nothing to load."""

    def warmup(self) -> None:
        """There is nothing to warm."""

    def health(self) -> None:
        """It is always well."""

    def close(self) -> None:
        """There is nothing to close."""

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        self.sizes.append(len(items))
        self._on_run()
        if len(items) > self._most:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [ItemResult(item.input.upper()) for item in items]


def items(count: int) -> list[Item]:
    return [Item(f"text {i}") for i in range(count)]


@pytest.mark.parametrize(
    ("failed", "largest"),
    [
        ([], 0),
        ([32], 16),
        ([33], 16),
        ([32, 16], 8),
        ([32, 64], 16),  # it never rises
        ([2], 1),
        ([1], 1),  # never below one: whether one item fits is that item's fate
        ([0], 1),
    ],
)
def test_the_limit_is_at_most_half_of_what_failed(failed: list[int], largest: int) -> None:
    """Each failure may lower it, nothing raises it."""
    limit = SizeLimit()
    for size in failed:
        limit.too_large(size)

    assert limit.largest == largest


@pytest.mark.parametrize(
    ("failed", "count", "sizes"),
    [(0, 5, [5]), (0, 0, [0]), (8, 4, [4]), (8, 5, [4, 1]), (8, 12, [4, 4, 4]), (2, 3, [1, 1, 1]), (8, 0, [0])],
)
def test_a_batch_is_cut_into_goes_that_fit(failed: int, count: int, sizes: list[int]) -> None:
    """One go for no items at all, so that the model is asked all the same."""
    limit = SizeLimit()
    if failed:
        limit.too_large(failed)

    assert [len(part) for part in limit.parts(items(count))] == sizes


@pytest.mark.parametrize(
    ("most", "count", "first", "later"),
    [
        (8, 8, [8], [8]),
        (4, 8, [8, 4, 4], [4, 4]),
        (3, 8, [8, 4, 2, 2, 2, 2], [2, 2, 2, 2]),
        (1, 4, [4, 2, 1, 1, 1, 1], [1, 1, 1, 1]),
        (5, 9, [9, 4, 4, 1], [4, 4, 1]),
    ],
)
def test_what_did_not_fit_is_never_tried_again(most: int, count: int, first: list[int], later: list[int]) -> None:
    """The first batch finds the limit, later ones keep it; every item is answered both times."""
    device = Small(most)
    runner = BatchRunner(device, lambda: None)
    answers = [ItemResult(f"TEXT {i}") for i in range(count)]

    assert runner.run(items(count), 10_000) == answers
    assert device.sizes == first
    device.sizes.clear()
    assert runner.run(items(count), 10_000) == answers
    assert device.sizes == later


def test_progress_is_told_between_goes() -> None:
    """The watchdog's cap is for one go, not for the many that a small device needs."""
    steps: list[int] = []
    device = Small(2, on_run=lambda: steps.append(len(told)))
    told: list[None] = []
    runner = BatchRunner(device, lambda: told.append(None))

    runner.run(items(4), 10_000)
    steps.clear()
    runner.run(items(4), 10_000)

    assert [step - steps[0] for step in steps] == [0, 1]


def test_one_item_that_does_not_fit_alone_is_poison() -> None:
    """Its neighbours complete, and the limit stays at one."""
    device = Small(0)
    runner = BatchRunner(device, lambda: None)

    assert [result.error_code for result in runner.run(items(2), 10_000)] == ["poison_request"] * 2
    assert runner.largest == 1


def test_goes_end_when_the_time_is_over() -> None:
    """What ran is answered; what did not is neither found innocent nor guilty."""
    now = [0.0]
    device = Small(1, on_run=lambda: now.__setitem__(0, now[0] + 0.4))
    runner = BatchRunner(device, lambda: None, lambda: now[0])
    runner.run(items(2), 10_000)

    codes = [result.error_code for result in runner.run(items(5), 1000)]

    assert codes == ["", "", "", "gpu_timeout", "gpu_timeout"]
