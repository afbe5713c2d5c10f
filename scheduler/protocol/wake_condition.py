"""The condition that wakes a dispatcher, as `look` stores it."""

from dataclasses import dataclass

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
