"""A decision about the next batch: form it now, or decide again later or on a condition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.protocol.wake_condition import WakeCondition


class Waits(NamedTuple):
    """No batch leaves now: decide again after `wait_ms` or on `condition` (None: only then).

    `pace_ms`: then all queued requests leave at once, if no batch was formed for that time; infinite: that needs a decision.
    """

    wait_ms: float | None
    condition: WakeCondition
    pace_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """Form a batch of `picks` now; without picks, decide again after `wait_ms` or on `condition` (None: only then).

    `ready_limit`: passed to `form_batch`, which refuses above it. `credit`: the guaranteed places that are still owed.
    `since_ms`: time since the batch was due. `pace_ms`: see `Waits`.
    """

    picks: Sequence[tuple[str, int]]
    wait_ms: float | None
    condition: WakeCondition
    ready_limit: int
    credit: Mapping[str, float]
    since_ms: float = math.inf
    pace_ms: float = math.inf
