"""When the items of a run must end at the latest, in seconds of the monotonic clock."""

from gpu_pool.model_process.messages import Run

STREAM_LEAD_S = 0.1  # The end must be in Redis before the gateway sends 504, 50 ms before the deadline.
IN_TIME = 0.95  # Share of a batch's budget; beyond the budget the watchdog kills the process.


def deadlines(run: Run, now: float) -> list[float]:
    """When each item must end at the latest: a little before its process would be killed."""
    most_ms = run.budget_ms * IN_TIME
    left_ms = run.left_ms or [run.budget_ms] * len(run.bodies)
    return [now + min(left, most_ms) / 1000 for left in left_ms]


def stream_deadlines(run: Run, now: float) -> list[float]:
    """When each item must end if it is a stream: by its own time, however long a batch may run.

    Empty if the items' times are unknown.
    """
    return [now + left / 1000 - STREAM_LEAD_S for left in run.left_ms]
