"""One batch in the model process: bisection, out-of-memory split, time budget, lost devices, canary, padding."""

from collections.abc import Callable, Sequence

import pytest

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult, Padding
from gpu_pool.backends.simulated import SimulatedBackend
from gpu_pool.model_process.batch_runner import BatchRunner
from gpu_pool.model_process.device_errors import DeviceLost, is_out_of_memory, raise_if_lost


class AcceleratorError(RuntimeError):
    """Has the name of torch's CUDA error."""


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error for a full device."""


class Scripted(SimulatedBackend):
    """Upper-cases texts; raises `error` for a batch that contains "bad" or has more than `most` items."""

    def __init__(self, error: BaseException | None = None, most: int = 1000) -> None:
        super().__init__(0)
        self._error = error or ValueError()
        self._most = most
        self.sizes: list[int] = []
        self.canaries = 0
        self.on_run: Callable[[], None] = lambda: None

    def health(self) -> None:
        self.canaries += 1

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        self.sizes.append(len(items))
        self.on_run()
        if len(items) > self._most:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if any(item.input == "bad" for item in items):
            raise self._error
        return [ItemResult(item.input.upper()) for item in items]


def items(*texts: str) -> list[Item]:
    return [Item(text) for text in texts]


def run(backend: Scripted, *texts: str) -> list[tuple[str, str]]:
    results = BatchRunner(backend, lambda: None).run(items(*texts), 10_000)
    return [(result.output, result.error_code) for result in results]


@pytest.mark.parametrize(
    ("texts", "runs"),
    [
        ([], 1),
        (["a", "b", "c"], 1),
        (["bad"], 1),
        (["a", "bad", "c"], 5),
        (["bad", "b", "c", "bad"], 7),
        (["bad", "bad"], 3),
        *((["bad" if i == position else "x" for i in range(64)], 13) for position in (0, 31, 63)),
    ],
)
def test_bad_items_fail_alone(texts: list[str], runs: int) -> None:
    """Results are in the order of the items; one bad item of n costs 1 + 2 log2(n) runs."""
    backend = Scripted()

    assert run(backend, *texts) == [
        ("The model cannot process this input.", "poison_request") if text == "bad" else (text.upper(), "")
        for text in texts
    ]
    assert len(backend.sizes) == runs


@pytest.mark.parametrize(
    ("error", "output", "code"),
    [
        (ValueError("a secret"), "The model cannot process this input.", "poison_request"),
        (SystemExit(3), "The model cannot process this input.", "poison_request"),
        (InvalidOutput("Not a string."), "Not a string.", "invalid_output"),
    ],
)
def test_error_of_a_bad_item(error: BaseException, output: str, code: str) -> None:
    """The text of the model's own exception is not returned; sys.exit() fails its item only."""
    assert run(Scripted(error), "a", "bad") == [("A", ""), (output, code)]


def test_sticky_device_error_ends_the_process() -> None:
    """Nothing else runs on the broken CUDA context."""
    backend = Scripted(AcceleratorError("CUDA error: device-side assert triggered"))

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
        (ValueError("CUDA error: from a user"), False, False),
        (MemoryError(), False, False),
    ],
)
def test_device_errors_are_recognised(error: Exception, sticky: bool, memory: bool) -> None:
    """Any CUDA error except out-of-memory is sticky; other exceptions belong to the input."""
    try:
        raise_if_lost(error)
    except DeviceLost:
        lost = True
    else:
        lost = False
    assert (lost, is_out_of_memory(error)) == (sticky, memory)


@pytest.mark.parametrize(
    ("most", "count", "first", "later"),
    [
        (8, 8, [8], [8]),
        (3, 8, [8, 4, 2, 2, 2, 2], [2, 2, 2, 2]),
        (1, 4, [4, 2, 1, 1, 1, 1], [1, 1, 1, 1]),
        (5, 9, [9, 4, 4, 1], [4, 4, 1]),
    ],
)
def test_out_of_memory_lowers_the_batch_size(most: int, count: int, first: list[int], later: list[int]) -> None:
    """The first batch finds the limit, later ones keep it, with progress for each part: the watchdog's cap is for one."""
    backend, progress = Scripted(most=most), list[None]()
    runner = BatchRunner(backend, lambda: progress.append(None))
    results = [ItemResult("X")] * count
    assert (runner.run(items(*"x" * count), 10_000), backend.sizes) == (results, first)
    backend.sizes.clear()
    progress.clear()

    assert (runner.run(items(*"x" * count), 10_000), backend.sizes) == (results, later)
    assert len(progress) == len(later)


def test_item_too_large_for_the_device_is_poison() -> None:
    """The limit stays at one item."""
    assert [code for _, code in run(Scripted(most=0), "a", "b")] == ["poison_request"] * 2


@pytest.mark.parametrize(
    ("most", "texts", "codes"),
    [(1000, ["a", "bad"], ["gpu_timeout"] * 2), (1, "abcde", ["", "", "", "gpu_timeout", "gpu_timeout"])],
    ids=["bisection", "parts"],
)
def test_items_that_did_not_run_within_the_budget_time_out(most: int, texts: Sequence[str], codes: list[str]) -> None:
    """With 0.4 s a run and 1 s of budget, what was not reached is neither good nor bad."""
    clock = [0.0]
    backend = Scripted(most=most)
    runner = BatchRunner(backend, lambda: None, lambda: clock[0])
    if most == 1:
        runner.run(items("a", "b"), 10_000)  # Learns the limit.
    step = 0.4 if most == 1 else 1.0
    backend.on_run = lambda: clock.__setitem__(0, clock[0] + step)

    assert [result.error_code for result in runner.run(items(*texts), 1000)] == codes


@pytest.mark.parametrize(("batches", "canaries"), [(["bad"] * 2, 0), (["bad"] * 3, 1), (["bad", "bad", "a", "bad"], 0)])
def test_canary_runs_after_three_bad_batches_in_a_row(batches: list[str], canaries: int) -> None:
    """If it passes, the inputs were bad and the process goes on (bug 40 in tests/regressions: it fails)."""
    backend = Scripted()
    runner = BatchRunner(backend, lambda: None)

    for text in batches:
        runner.run(items(text), 1000)

    assert backend.canaries == canaries


def test_padding_share() -> None:
    """Padding counts positions up to the longest row, and rows that are done; each batch is counted by itself."""
    padding = Padding()
    assert padding.take() == 0.0
    padding.passed([1, 1, 1, 97])
    assert padding.take() == pytest.approx(1 - 100 / 388)
    padding.passed([4, 4])
    padding.stepped(2, 2)
    padding.stepped(1, 2)
    assert padding.take() == pytest.approx(1 / 12)
    assert padding.take() == 0.0
