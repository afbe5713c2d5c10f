"""When the items of a batch are to be ended at the latest. Pure."""

from gpu_pool.model_process.messages import Run

STREAM_LEAD_S = 0.1  # A stream's end is at Redis before its gateway sends 504, which it does 50 ms before the deadline.
IN_TIME = 0.95  # Of a batch's budget: what takes longer is ended by the watchdog, and the process with it.


def deadlines(run: Run, now: float) -> list[float]:
    """When each item is to be ended at the latest: a little before its process would be."""
    most_ms = run.budget_ms * IN_TIME
    left_ms = run.left_ms or [run.budget_ms] * len(run.bodies)
    return [now + min(left, most_ms) / 1000 for left in left_ms]


def stream_deadlines(run: Run, now: float) -> list[float]:
    """When each item is to be ended where it is a stream: by its own time alone, however long a batch may run.

    Empty where the time that items have left is not known.
    """
    return [now + left / 1000 - STREAM_LEAD_S for left in run.left_ms]
