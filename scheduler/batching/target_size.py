"""When a part batch should leave: its target size and its window. Pure.

Waiting is useful only if it saves work, for two reasons; the larger size applies. Every batch costs its `base_ms`, so the
workers can serve an arrival rate only with batches of a certain size. And every batch costs CPU in all processes. If one
request per batch is sufficient for both, batches do not wait. The window is twice the time in which the batch should reach
its size: requests that were expected and did not arrive (for example because every client waits for a response) are not
waited for.
"""

from scheduler.batching.service import Service

BUSY_SHARE = 0.9
"""The share of their time for which workers may be busy with batches of the target size. A smaller share would delay requests
while workers are free; a larger one leaves no time for bursts (`tools/bench/batch_windows.py`)."""

GATHER_S = 0.008
"""A batch costs all processes together about 1 ms of CPU: while batches are not full, the target is one per 8 ms."""
PATIENCE = 2.0
"""The window, as a multiple of the time in which the batch is expected to reach its size."""


def target_size(arrivals_per_s: float, workers: int, service: Service, max_batch_size: int) -> int:
    """The size at which a part batch should leave; 1: it should not wait."""
    spare_ms = BUSY_SHARE * 1000 * workers - arrivals_per_s * service.item_ms
    base_ms = arrivals_per_s * service.base_ms
    if base_ms and base_ms >= spare_ms * max_batch_size:  # Even full batches exceed the target utilization.
        return max_batch_size
    gathered = min(max_batch_size, int(arrivals_per_s * GATHER_S))
    return max(1, int(base_ms / spare_ms) if base_ms else 0, gathered)


def window_ms(target: int, arrivals_per_s: float, max_wait_ms: float) -> float:
    """How long the first request of a part batch may wait for others; at most the model's own window."""
    if target <= 1 or arrivals_per_s <= 0:
        return 0.0
    return min(max_wait_ms, 1000 * PATIENCE * target / arrivals_per_s)
