"""What a test may change while the engine runs: `POST /control` with any of these fields, all others stay."""

from collections.abc import Callable
from random import Random

import msgspec

from engine.steps import Pace, Sequence

SEED = 1
MARK = "!"
REFUSED = {
    "!refused": (400, "The input is not accepted."),
    "!overflow": (400, "This model's maximum context length is 4096 tokens. However, you requested 5016 tokens."),
    "!failed": (500, "The engine failed on this input."),
}
"""The first word of a prompt, up to a hyphen -> status and message of the response."""
RESET, BROKEN, BROKEN_AT = "!reset", "!broken", 8
"""Words of prompts whose connection is reset at once, and whose stream ends with an error after so many tokens."""


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /control`; `None` leaves a value as it is.

    `factor`, `slots`, `step_as_if`: see `Pace`.
    `refuse`: the status of refusals (429, 503), 0 to end them. They last `refuse_for_s` seconds, for ever without; with
    `refuse_above` only requests that arrive while more than so many sequences run or wait are refused.
    `retry_after_s`: the value of `Retry-After` in refusals, 0 for none.
    `stall_s`: no step for so many seconds.
    `reset_share`: the part (0..1) of new streams whose connection is reset at a random token.
    `reset_now`: reset the connections of all calls.
    `forget`: clear the history.
    """

    factor: float | None = None
    slots: int | None = None
    step_as_if: int | None = None
    refuse: int | None = None
    refuse_for_s: float | None = None
    refuse_above: int | None = None
    retry_after_s: float | None = None
    stall_s: float | None = None
    reset_share: float | None = None
    reset_now: bool = False
    forget: bool = False


class Faults:
    """The faults in force; `clock` returns monotonic seconds."""

    def __init__(self, pace: Pace, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._clock = clock
        self._random = Random(SEED)
        self._refuse = 0
        self._refuse_until = 0.0
        self._refuse_above = 0
        self._reset_share = 0.0
        self.retry_after_s = 0.0
        self.stalled_until = 0.0

    def apply(self, change: Change) -> None:
        """Apply a change."""
        for name in ("factor", "slots", "step_as_if"):
            if (value := getattr(change, name)) is not None:
                setattr(self._pace, name, value)
        if change.refuse is not None:
            self._refuse = change.refuse
            lasting = change.refuse_for_s
            self._refuse_until = float("inf") if lasting is None else self._clock() + lasting
            self._refuse_above = -1 if change.refuse_above is None else change.refuse_above
        if change.retry_after_s is not None:
            self.retry_after_s = change.retry_after_s
        if change.stall_s is not None:
            self.stalled_until = self._clock() + change.stall_s
        if change.reset_share is not None:
            self._reset_share = change.reset_share

    def refusal(self, present: int) -> int:
        """The status that a new request gets while `present` sequences run or wait; 0: it is accepted."""
        if not self._refuse or self._clock() >= self._refuse_until or present <= self._refuse_above:
            return 0
        return self._refuse

    def mark(self, sequence: Sequence) -> None:
        """Choose whether the connection of a new stream will be reset, and when."""
        if sequence.length > 1 and self._reset_share and self._random.random() < self._reset_share:
            sequence.reset_at = self._random.randint(1, sequence.length - 1)
