"""One batch inside the model process: run it, bisect it when it raises, tell a lost device from bad inputs.

After out-of-memory the device gets at most half as many items at once for the rest of this process's life.
"""

import time
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Backend, InvalidOutput, Item, ItemResult
from gpu_pool.model_process.bisection import run_apart
from gpu_pool.model_process.device_errors import DeviceLost, free_cached_memory, is_out_of_memory, is_sticky
from gpu_pool.model_process.size_limit import SizeLimit
from scheduler.errors import ErrorCode

SUSPICIOUS_BATCHES = 3  # After this many batches in a row without a good answer the canary runs.
_BLAMED = frozenset({ErrorCode.POISON_REQUEST, ErrorCode.INVALID_OUTPUT})


class BatchRunner:
    """Runs batches on a loaded backend; `progress` is called at every step, `clock` returns seconds."""

    def __init__(
        self, backend: Backend, progress: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._progress = progress
        self._clock = clock
        self._limit = SizeLimit()
        self._bad_in_a_row = 0
        self.fault = ""
        """The first error of the last batch; "" if there was none."""
        self.padding_waste = 0.0
        """Share of padding in the positions of the last batch; 0 if the backend does not count it."""

    @property
    def largest(self) -> int:
        """The most items that the device gets at once; 0 if it never ran out of memory."""
        return self._limit.largest

    def run(self, items: Sequence[Item], budget_ms: float) -> list[ItemResult]:
        """One result for each item. Raises DeviceLost if the process must end."""
        deadline, self.fault = self._clock() + budget_ms / 1000, ""

        def time_left() -> bool:
            return self._clock() < deadline

        results = run_apart(
            lambda part: self._attempt(part, time_left),
            items,
            blame=blame,
            unfinished=_unfinished,
            time_left=time_left,
            fatal=DeviceLost,
        )
        padding = getattr(self._backend, "padding", None)
        self.padding_waste = padding.take() if padding is not None else 0.0
        self.judge(results)
        return results

    def _attempt(self, items: Sequence[Item], time_left: Callable[[], bool]) -> list[ItemResult]:
        results: list[ItemResult] = []
        try:
            for part in self._limit.parts(items):
                if results and not time_left():
                    return results + [_unfinished()] * (len(items) - len(results))
                self._progress()
                results += self._one_go(part)
        except (Exception, SystemExit) as error:
            self.fault = self.fault or fault_of(error)
            raise
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
            raise InvalidOutput(f"The model returned {len(results)} results for {len(items)} inputs.")
        return results

    def judge(self, results: Sequence[ItemResult]) -> None:
        """A model that fails fast attracts all work; after several batches without a good answer it must pass its
        canary.

        Invalid output is left to the supervisor, which quarantines such a model.
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
            raise DeviceLost(f"The model failed its canary with {type(error).__name__}.") from error


def blame(error: BaseException) -> ItemResult:
    """The result of the item whose run raised `error`. The exception's text is not returned: it may quote an input."""
    if isinstance(error, InvalidOutput):
        return ItemResult(str(error), 0, ErrorCode.INVALID_OUTPUT)
    return ItemResult("The model cannot process this input.", 0, ErrorCode.POISON_REQUEST)


def fault_of(error: BaseException) -> str:
    """A sentence about `error` that quotes no input."""
    return str(error) if isinstance(error, InvalidOutput) else f"The model raised {type(error).__name__}."


def _unfinished() -> ItemResult:
    return ItemResult(
        "No time was left to run this request after another one of its batch failed.", 0, ErrorCode.GPU_TIMEOUT
    )
