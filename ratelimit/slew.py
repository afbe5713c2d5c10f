"""Slew: limits tighten at once and relax slowly, so that a flapping GPU does not make the limits flap."""

RELAX_PER_SECOND = 0.25
"""How much of the full limit comes back each second: from nothing to everything in four seconds."""


def relax(previous: float, target: float, elapsed_s: float) -> float:
    """The next factor (0..1) on the way from `previous` to `target`, `elapsed_s` later."""
    if target <= previous:
        return target
    return min(target, previous + RELAX_PER_SECOND * max(0.0, elapsed_s))
