"""A decision about the next batch: form it now, or decide again later or on a condition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_IDLE, NO_WORKER, FREE_SLOT = -1, -2, -3
"""Values of `WakeCondition.ready`. FIRST_IDLE: only a worker that becomes idle while no other is, or while no batch runs; FREE_SLOT:
only a slot that becomes free."""


@dataclass(frozen=True, slots=True)
class WakeCondition:
    """The condition that wakes a dispatcher.

    `depth` queued requests (0: arrivals do not wake), or a worker that claimed or ended a batch while at most `ready` batches
    are ready, or FIRST_IDLE, or NO_WORKER, or FREE_SLOT.
    """

    depth: int
    ready: int = NO_WORKER


NEVER = WakeCondition(0)


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
