"""Even distances between batches. Pure.

Batches leave a saturated pool at even distances. Workers that start together and have equal batches also end together, and
continue so: then for most of a run no worker is free, and new requests of all tiers wait. At even distances, with a small
part of their time kept free (the headroom), a worker is nearly always free. This applies only if more requests are queued
than the idle workers take, and if several workers have runs of similar duration. A late batch may be followed by an early
one: a virtual clock, as in the virtual scheduling algorithm of ITU-T I.371. Part batches have a distance too, while at most half
of the workers are idle: a run divided by the workers, or the time in which the target size is expected, if that is longer. Then
they leave with the requests that have arrived.
"""

from scheduler.batching.service import Service

WHOLE_HEADROOM_WORKERS = 8
"""Fewer workers keep a smaller part of their time free, because each is a larger part of the capacity and less is sufficient.

In a simulation with runs of 50 ms, and a fifth of the capacity for enterprise, the p99 of four workers falls from 100 to
65 ms for 1.5 % of their throughput, that of two from 105 to 79 ms for 0.2 %.
"""

SLACK_MS = 5.0
"""How late a batch may be, because of timers and busy processors, without delaying the next ones."""

LEAST_DISTANCE_MS = 5.0
"""Shorter distances between part batches are within the accuracy of timers, and would only cost wake-ups."""

LEAST_EXPECTED = 0.5
"""Requests that must be expected within a distance: otherwise a request would wait although no other one needs the worker."""


def distance_ms(workers: int, service: Service, batch_size: int, headroom: float) -> float:
    """Milliseconds between two full batches; 0: no distance. `headroom`: 0..1 of the workers' time; 0 disables it."""
    known = service.steady and 2 * service.seen_batch >= batch_size
    if not headroom or not known or workers < 2:
        return 0.0
    kept_free = headroom * min(1.0, workers / WHOLE_HEADROOM_WORKERS)
    return (service.base_ms + batch_size * service.item_ms) / (workers * (1 - kept_free))


def part_distance_ms(workers: int, idle: int, service: Service, size: int, arrivals_per_s: float) -> float:
    """Milliseconds between two part batches of `size`; 0: no distance, as while more than half of the workers are idle.

    If each request got an idle worker at once, all workers would begin within a short time, and none would end soon: with
    runs of 200 ms, five workers and 40 requests/s, the p99 of the wait is 40 instead of 85 ms (`tools/bench/batch_windows.py`).
    """
    if workers < 2 or 2 * idle > workers or not service.steady:
        return 0.0
    distance = (service.base_ms + size * service.item_ms) / workers
    is_needed = distance >= LEAST_DISTANCE_MS and arrivals_per_s * distance >= 1000 * LEAST_EXPECTED
    return distance if is_needed else 0.0


def since_due_ms(since_ms: float, distance: float) -> float:
    """Time since a batch that leaves now was due, if the previous one was due `since_ms` ago."""
    return max(0.0, min(since_ms - distance, SLACK_MS))
