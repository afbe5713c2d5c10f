"""One batch inside the model process: run it, bisect it when it raises, tell a lost device from bad inputs.

Bisection runs ever smaller parts apart; everything but the bad item completes. With one bad item among n it costs about
2 log2(n) more runs, with all bad 2n - 1; `time_left` bounds that. A device that ran out of memory is given at most half
as much in one go for the rest of this process's life. A CUDA error other than out-of-memory stays until the process
ends, so the device is lost. Such errors are recognised by names and texts, so that nothing here imports torch.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gpu_pool.backends.backend import Backend, InvalidOutput, Item, ItemResult
from scheduler.errors import ErrorCode, TierlaneError

I = TypeVar("I")  # noqa: E741 - an item; the letter that a reader expects
R = TypeVar("R")


def run_apart(
    run: Callable[[Sequence[I]], list[R]],
    items: Sequence[I],
    *,
    blame: Callable[[BaseException], R],
    unfinished: Callable[[], R],
    time_left: Callable[[], bool],
    fatal: type[Exception],
) -> list[R]:
    """One result for each item, in order.

    What raises as a whole is run again in halves. A single item that raises is answered by `blame`, one for which
    no time was left by `unfinished`. A `fatal` exception says that the model itself is lost, and passes through.
    """
    if not time_left():
        return [unfinished() for _ in items]
    try:
        return run(items)
    except fatal:
        raise
    # SystemExit too: a model that calls sys.exit() must not take the batch and the process with it.
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything; every item gets its answer
        if len(items) == 1:
            return [blame(error)]

    def run_half(half: Sequence[I]) -> list[R]:
        return run_apart(run, half, blame=blame, unfinished=unfinished, time_left=time_left, fatal=fatal)

    middle = len(items) // 2
    return run_half(items[:middle]) + run_half(items[middle:])


T = TypeVar("T")


class SizeLimit:
    """`largest`: the most items for one go; 0 while nothing failed. It never rises: what filled the memory may stay."""

    def __init__(self) -> None:
        self.largest = 0

    def too_large(self, size: int) -> None:
        """`size` items did not fit: from now on at most half of that, and at least 1."""
        half = max(1, size // 2)
        self.largest = min(half, self.largest or half)

    def parts(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """The items in goes that fit; a limit that falls meanwhile holds for what is left. One go for no items."""
        start = 0
        while start == 0 or start < len(items):
            end = start + (self.largest or len(items) or 1)
            yield items[start:end]
            start = end


_STICKY_TYPES = frozenset({"AcceleratorError"})
_STICKY_TEXTS = (
    "CUDA error",
    "device-side assert",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)


class DeviceLost(TierlaneError):
    """The model process cannot go on: its device, or the model itself, is broken."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device ran out of memory: a smaller batch may fit."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def is_sticky(error: BaseException) -> bool:
    """Whether every later call would fail as well, until a new process takes over."""
    if is_out_of_memory(error):
        return False
    if type(error).__name__ in _STICKY_TYPES:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _STICKY_TEXTS)


def free_cached_memory() -> None:
    """Give torch's cached blocks back to the device, where torch is in use at all."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


SUSPICIOUS_BATCHES = 3  # So many batches in a row without one good answer, and the canary is asked.
_BLAMED = frozenset({ErrorCode.POISON_REQUEST, ErrorCode.INVALID_OUTPUT})


class BatchRunner:
    """Runs batches on a loaded backend; `progress` is called at every step, `clock` gives seconds."""

    def __init__(
        self, backend: Backend, progress: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._progress = progress
        self._clock = clock
        self._limit = SizeLimit()
        self._bad_in_a_row = 0
        self.fault = ""
        """What the last batch raised first, "" where it ran as it came."""
        self.padding_waste = 0.0
        """Share of the last batch's positions that were padding; 0 where the backend does not count them."""

    @property
    def largest(self) -> int:
        """The most items that the device is given in one go; 0 where it never ran out of memory."""
        return self._limit.largest

    def run(self, items: Sequence[Item], budget_ms: float) -> list[ItemResult]:
        """One result for each item. Raises DeviceLost where the process must end."""
        deadline, self.fault = self._clock() + budget_ms / 1000, ""

        def time_left() -> bool:
            return self._clock() < deadline

        results = run_apart(
            lambda part: self._noted(part, time_left),
            items,
            blame=_blame,
            unfinished=_unfinished,
            time_left=time_left,
            fatal=DeviceLost,
        )
        padding = getattr(self._backend, "padding", None)
        self.padding_waste = padding.take() if padding is not None else 0.0
        self._judge(results)
        return results

    def _noted(self, items: Sequence[Item], time_left: Callable[[], bool]) -> list[ItemResult]:
        try:
            return self._attempt(items, time_left)
        except (Exception, SystemExit) as error:
            self.fault = self.fault or _named(error)
            raise

    def _attempt(self, items: Sequence[Item], time_left: Callable[[], bool]) -> list[ItemResult]:
        results: list[ItemResult] = []
        for part in self._limit.parts(items):
            if results and not time_left():
                return results + [_unfinished()] * (len(items) - len(results))
            self._progress()
            results += self._one_go(part)
        return results

    def _one_go(self, items: Sequence[Item]) -> list[ItemResult]:
        try:
            results = self._backend.run(items, self._progress)
        except Exception as error:
            if is_sticky(error):
                raise DeviceLost(f"The device is lost after {type(error).__name__}.") from error
            if is_out_of_memory(error):
                self._limit.too_large(len(items))
                free_cached_memory()
            raise
        if len(results) != len(items):
            raise InvalidOutput(f"The model returned {len(results)} answers for {len(items)} inputs.")
        return results

    def _judge(self, results: Sequence[ItemResult]) -> None:
        """A fast failer attracts all work, so one whose answers are all bad has to prove that the inputs were.

        Answers that are no answers are left to the supervisor, which puts such a model into quarantine.
        """
        codes = {result.error_code for result in results}
        bad = ErrorCode.POISON_REQUEST in codes and codes <= _BLAMED
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        if self._bad_in_a_row < SUSPICIOUS_BATCHES:
            return
        self._bad_in_a_row = 0
        try:
            self._backend.health()
        except Exception as error:
            raise DeviceLost(f"The model fails its own canary with {type(error).__name__}.") from error


def _blame(error: BaseException) -> ItemResult:
    """The exception's text stays here: it may quote the input, or tell what is nobody's business."""
    if isinstance(error, InvalidOutput):
        return ItemResult(str(error), 0, ErrorCode.INVALID_OUTPUT)
    return ItemResult("The model cannot process this input.", 0, ErrorCode.POISON_REQUEST)


def _named(error: BaseException) -> str:
    return str(error) if isinstance(error, InvalidOutput) else f"The model raised {type(error).__name__}."


def _unfinished() -> ItemResult:
    return ItemResult("No time was left to run this request apart from one that failed.", 0, ErrorCode.GPU_TIMEOUT)
