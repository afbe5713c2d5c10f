"""One batch in the model process: blame, budgets, broken devices, and the canary."""

from collections.abc import Callable, Sequence

import pytest

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.model_process.batch_runner import BatchRunner, DeviceLost, is_out_of_memory, is_sticky


class AcceleratorError(RuntimeError):
    """Named as torch names a CUDA error."""


class OutOfMemoryError(RuntimeError):
    """Named as torch names a device that is full."""


class Scripted:
    """A backend that raises `error` on batches for which `fails` says so."""

    version = "scripted"

    def __init__(
        self, fails: Callable[[Sequence[Item]], bool], error: BaseException, canary_fails: bool = False
    ) -> None:
        self._fails = fails
        self._error = error
        self._canary_fails = canary_fails
        self.sizes: list[int] = []
        self.canaries = 0

    def load(self) -> None:
        """There is nothing to load."""

    def close(self) -> None:
        """There is nothing to close."""

    def warmup(self) -> None:
        """There is nothing to warm."""

    def health(self) -> None:
        self.canaries += 1
        if self._canary_fails:
            raise self._error

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        self.sizes.append(len(items))
        if self._fails(items):
            raise self._error
        return [ItemResult(item.input.upper()) for item in items]


def bad(items: Sequence[Item]) -> bool:
    return any(item.input == "bad" for item in items)


def items(*texts: str) -> list[Item]:
    return [Item(text) for text in texts]


def run(backend: Scripted, *texts: str) -> list[tuple[str, str]]:
    results = BatchRunner(backend, lambda: None).run(items(*texts), 10_000)
    return [(result.output, result.error_code) for result in results]


def test_the_bad_item_is_poison_and_its_text_stays_inside() -> None:
    """The client of the bad item reads no exception text; the others complete."""
    results = run(Scripted(bad, ValueError("the secret of somebody")), "a", "bad", "c")

    assert results == [("A", ""), ("The model cannot process this input.", "poison_request"), ("C", "")]


def test_an_answer_that_is_not_usable_is_told_apart_from_poison() -> None:
    """InvalidOutput ends the one item as `invalid_output`."""
    results = run(Scripted(bad, InvalidOutput("The model returned 0 answers for 1 inputs.")), "a", "bad")

    assert results == [("A", ""), ("The model returned 0 answers for 1 inputs.", "invalid_output")]


def test_out_of_memory_splits_the_batch() -> None:
    """Four do not fit, two do: everything completes."""
    backend = Scripted(lambda items: len(items) > 2, OutOfMemoryError("CUDA out of memory"))

    assert (run(backend, *"abcd"), backend.sizes) == ([("A", ""), ("B", ""), ("C", ""), ("D", "")], [4, 2, 2])


def test_a_sticky_device_error_is_never_survived() -> None:
    """No second run on a context that is broken: the process has to go."""
    backend = Scripted(bad, AcceleratorError("CUDA error: device-side assert triggered"))

    with pytest.raises(DeviceLost):
        run(backend, "a", "bad")
    assert backend.sizes == [2]


@pytest.mark.parametrize(
    ("error", "sticky", "memory"),
    [
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), True, False),
        (RuntimeError("CUDA error: unspecified launch failure"), True, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True, False),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False, True),
        (AcceleratorError("CUDA error: out of memory"), False, True),
        (RuntimeError("The size of tensor a must match tensor b"), False, False),
        (ValueError("CUDA error: said a user"), False, False),
        (MemoryError(), False, False),
    ],
)
def test_which_errors_stay_until_the_process_ends(error: Exception, sticky: bool, memory: bool) -> None:
    """Any CUDA error but out-of-memory; other exceptions belong to the input."""
    assert (sticky, memory) == (is_sticky(error), is_out_of_memory(error))


def test_without_budget_nothing_is_bisected() -> None:
    """The first run has its chance; after it the time is up."""
    times = iter([0.0, 0.5, 2.0, 2.0])
    runner = BatchRunner(Scripted(bad, ValueError()), lambda: None, lambda: next(times))

    assert [result.error_code for result in runner.run(items("a", "bad"), 1000)] == ["gpu_timeout", "gpu_timeout"]


@pytest.mark.parametrize(("batches", "canaries"), [(["bad"] * 2, 0), (["bad"] * 3, 1), (["bad", "bad", "a", "bad"], 0)])
def test_the_canary_is_asked_after_three_bad_batches_in_a_row(batches: list[str], canaries: int) -> None:
    """Three batches without one good answer may be three bad inputs: the canary passes, and work goes on."""
    backend = Scripted(bad, ValueError())
    runner = BatchRunner(backend, lambda: None)

    for text in batches:
        runner.run(items(text), 1000)

    assert canaries == backend.canaries


def test_a_model_that_fails_its_canary_is_lost() -> None:
    """Then it was the model, not the inputs: a fast failer must not go on attracting work."""
    runner = BatchRunner(Scripted(bad, ValueError(), canary_fails=True), lambda: None)
    runner.run(items("bad"), 1000)
    runner.run(items("bad"), 1000)

    with pytest.raises(DeviceLost):
        runner.run(items("bad"), 1000)
