"""One batch inside the model process: run it, bisect it when it raises, tell a lost device from bad inputs.

After out-of-memory the device gets at most half as many items at once for the rest of this process's life.
"""

import time
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import MODEL_ERRORS, Backend, InvalidOutput, Item, ItemResult
from gpu_pool.model_process.device_errors import DeviceLost, free_cached_memory, is_out_of_memory, raise_if_lost
from scheduler.errors import ErrorCode

SUSPICIOUS_BATCHES = 3  # After this many batches in a row without a good answer the canary runs.
_UNFINISHED = ItemResult(
    "No time was left to run this request after another one of its batch failed.", 0, ErrorCode.GPU_TIMEOUT
)
Report = Callable[[BaseException], None]
"""Receives what the model raised, before the items are run again."""


class BatchRunner:
    """Runs batches on a loaded backend; `progress` is called at every step, `clock` returns seconds."""

    def __init__(
        self,
        backend: Backend,
        progress: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        report: Report | None = None,
    ) -> None:
        self._backend = backend
        self._report = report
        self._progress = progress
        self._clock = clock
        self.largest = 0
        """The most items that the device gets at once; 0 if it never ran out of memory. It never rises: the memory may stay
        occupied.
        """
        self._deadline = 0.0
        self._bad_in_a_row = 0
        self.fault = ""
        """The first error of the last batch; "" if there was none."""
        self.padding_waste = 0.0
        """Share of padding in the positions of the last batch; 0 if the backend does not count it."""

    def run(self, items: Sequence[Item], budget_ms: float) -> list[ItemResult]:
        """One result for each item, in order. Raises DeviceLost if the process must end."""
        self._deadline, self.fault = self._clock() + budget_ms / 1000, ""
        results = self._run_apart(items)
        self.padding_waste = padding_of(self._backend)
        self.judge(results)
        return results

    def _run_apart(self, items: Sequence[Item]) -> list[ItemResult]:
        """Run the items; if that raises, run each half again in the same way, so that everything except the bad item
        completes.

        With one bad item among n it costs about 2 log2(n) more runs, with all bad 2n - 1; the budget limits that.
        """
        if self._clock() >= self._deadline:
            return [_UNFINISHED] * len(items)
        results: list[ItemResult] = []
        try:
            while True:
                part = items[len(results) : len(results) + (self.largest or len(items))]
                if results and self._clock() >= self._deadline:
                    return results + [_UNFINISHED] * (len(items) - len(results))
                self._progress()
                answers = self._backend.run(part, self._progress)
                if len(answers) != len(part):
                    raise InvalidOutput(  # noqa: TRY301 - as if the model had raised it
                        f"The model returned {len(answers)} results for {len(part)} inputs."
                    )
                results += answers
                if len(results) == len(items):
                    return results
        # A model that calls sys.exit() must not end the process.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything
            if self._report is not None:
                self._report(error)
            raise_if_lost(error)
            if is_out_of_memory(error):
                half = max(1, len(part) // 2)
                self.largest = min(half, self.largest or half)
                free_cached_memory()
            self.fault = self.fault or fault_of(error)
            if len(items) == 1:
                return [blame(error)]
        middle = len(items) // 2
        return self._run_apart(items[:middle]) + self._run_apart(items[middle:])

    def judge(self, results: Sequence[ItemResult]) -> None:
        """A model that fails fast attracts all work; after several batches without a good answer it must pass its
        canary.

        Invalid output is left to the supervisor, which quarantines such a model.
        """
        codes = {result.error_code for result in results}
        bad = ErrorCode.POISON_REQUEST in codes and codes <= MODEL_ERRORS
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


def padding_of(backend: Backend) -> float:
    """The share (0..1) of padding in the positions computed since the last call; 0 if the backend does not count it."""
    padding = getattr(backend, "padding", None)
    return round(padding.take(), 4) if padding is not None else 0.0
