"""The quarantine of a bad model, as pure arithmetic.

A model that returns invalid output (a wrong number of results, NaN, None) fails fast and would attract all work; so after
three such batches in a row its process is ended and not restarted for a while, longer each time.
"""

from collections.abc import Sequence
from enum import Enum

from gpu_pool.backends.backend import ItemResult
from scheduler.errors import ErrorCode

STRIKES = 3
FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S = 5.0, 60.0


class BatchVerdict(Enum):
    """What one batch shows about its model."""

    GOOD = "good"  # At least one good answer.
    INVALID = "invalid"  # At least half of the output is invalid.
    NEITHER = "neither"  # The inputs may be at fault, or nothing ran.


def judge(results: Sequence[ItemResult]) -> BatchVerdict:
    """One invalid output among good ones is not the model's fault; one good answer among many invalid ones is no proof."""
    results = [result for result in results if not result.by_input]
    invalid = sum(result.error_code == ErrorCode.INVALID_OUTPUT for result in results)
    if invalid and 2 * invalid >= len(results):
        return BatchVerdict.INVALID
    return BatchVerdict.GOOD if any(not result.error_code for result in results) else BatchVerdict.NEITHER


class Quarantine:
    """Counts strikes. After a quarantine the model is on probation: one batch of invalid output is enough for the next."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._allowed = STRIKES
        self._next_s = FIRST_QUARANTINE_S

    def after(self, verdict: BatchVerdict) -> float:
        """Seconds of quarantine after this batch; 0: the model may go on."""
        if verdict is BatchVerdict.GOOD:
            self._in_a_row, self._allowed, self._next_s = 0, STRIKES, FIRST_QUARANTINE_S
        if verdict is not BatchVerdict.INVALID:
            return 0.0
        self._in_a_row += 1
        if self._in_a_row < self._allowed:
            return 0.0
        seconds, self._next_s = self._next_s, min(LONGEST_QUARANTINE_S, 2 * self._next_s)
        self._in_a_row, self._allowed = 0, 1
        return seconds
