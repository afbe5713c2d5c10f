"""When a model that answers nonsense is put aside, and for how long. Pure.

Nonsense is no text: a wrong number of answers, NaN, None. A worker that fails so fast would attract all work; so after
three such batches in a row its model process ends and stays away for a while, longer each time.
"""

from collections.abc import Sequence
from enum import Enum

from gpu_pool.backends.backend import ItemResult
from scheduler.errors import ErrorCode

STRIKES = 3
FIRST_S, LONGEST_S = 5.0, 60.0


class Verdict(Enum):
    """What one batch says of its model."""

    GOOD = "good"  # It answered.
    NONSENSE = "nonsense"  # At least half of the answers are none.
    NEITHER = "neither"  # The inputs may be to blame, or nothing ran.


def judge(results: Sequence[ItemResult]) -> Verdict:
    """One odd input among good ones is no model's fault, and one lucky answer among many bad ones is no proof."""
    nonsense = sum(result.error_code == ErrorCode.INVALID_OUTPUT for result in results)
    if nonsense and 2 * nonsense >= len(results):
        return Verdict.NONSENSE
    return Verdict.GOOD if any(not result.error_code for result in results) else Verdict.NEITHER


class Quarantine:
    """Counts strikes. After a quarantine the model is on probation: one batch of nonsense is enough for the next."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._allowed = STRIKES
        self._next_s = FIRST_S

    def after(self, verdict: Verdict) -> float:
        """Seconds for which the model must be put aside after this batch; 0: it may go on."""
        if verdict is Verdict.GOOD:
            self._in_a_row, self._allowed, self._next_s = 0, STRIKES, FIRST_S
        if verdict is not Verdict.NONSENSE:
            return 0.0
        self._in_a_row += 1
        if self._in_a_row < self._allowed:
            return 0.0
        seconds, self._next_s = self._next_s, min(LONGEST_S, 2 * self._next_s)
        self._in_a_row, self._allowed = 0, 1
        return seconds
