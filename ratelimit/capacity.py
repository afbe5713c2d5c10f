"""Capacity: how many requests per second the healthy GPUs can serve."""

from collections.abc import Sequence


def rate_rps(base_ms: float, item_ms: float, seen_batch: float, batch: int) -> float:
    """Requests/s of one GPU with full batches of `batch`, of which one of n takes `base_ms` + n x `item_ms`.

    0 (not measured) while none of at least half that size was seen: a fit over single requests says little about full
    batches, and a limit must not be built on it.
    """
    if batch <= 0 or 2 * seen_batch < batch:
        return 0.0
    return 1000 * batch / max(base_ms + batch * item_ms, 0.001)


def capacity_rps(rates: Sequence[float], prior: float, target_utilization: float) -> float:
    """Requests/s worth admitting: `target_utilization` x the sum of the rates of the healthy GPUs.

    `rates` has one measured rate (requests/s at a full batch) for each healthy GPU, 0 where none is measured yet; such
    a GPU counts with the mean of the measured ones, or with `prior` where there is none. The rest of the utilization is
    what absorbs bursts: at 1.0 every burst becomes a queue that never drains.
    """
    measured = [rate for rate in rates if rate > 0]
    assumed = sum(measured) / len(measured) if measured else prior
    return target_utilization * (sum(measured) + assumed * (len(rates) - len(measured)))
