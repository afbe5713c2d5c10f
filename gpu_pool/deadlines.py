"""When the items of a batch are to be ended at the latest. Pure."""

from gpu_pool.frames import Run

IN_TIME = 0.95  # Of a batch's budget: what takes longer is ended by the watchdog, and the process with it.


def deadlines(run: Run, now: float) -> list[float]:
    """When each item is to be ended at the latest: a little before its process would be."""
    most_ms = run.budget_ms * IN_TIME
    left_ms = run.left_ms or [run.budget_ms] * len(run.bodies)
    return [now + min(left, most_ms) / 1000 for left in left_ms]
