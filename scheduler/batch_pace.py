"""Batches leave a saturated pool at even distances: pure arithmetic.

Workers that began together end together where every batch takes the same time, and do so for ever: then nobody is free
for most of a run, and who comes in that time waits for it, of whatever tier. At even distances, and with a little of
their time left free (the headroom), a worker is nearly always free for a request that may go first.

Only where nothing is gained by starting sooner, since more waits than the idle workers take, and where that gives even
distances: several workers, whose runs take about the same time. A batch that comes late may be followed by one that comes
early, so that late timers cost nothing: a virtual clock, as in the virtual scheduling algorithm of ITU-T I.371.
"""

from scheduler.batching.timing import Service

WHOLE_HEADROOM_WORKERS = 8
"""Fewer workers keep a smaller part of their time free: each is a larger part of the capacity, and less is enough.

In a simulation of runs of 50 ms, enterprise a fifth of the capacity, the p99 of four workers falls from 100 to 65 ms for
1.5 % of what they serve, that of two from 105 to 79 ms for 0.2 %.
"""

SLACK_MS = 5.0
"""How late a batch may be, for timers and busy processors, without the ones behind it being late as well."""


def distance_ms(workers: int, service: Service, batch_size: int, headroom: float) -> float:
    """The distance between two full batches; 0: as they come. `headroom`: 0..1 of the workers' time; 0 turns it off."""
    known = service.steady and 2 * service.seen_batch >= batch_size
    if not headroom or not known or workers < 2:
        return 0.0
    kept_free = headroom * min(1.0, workers / WHOLE_HEADROOM_WORKERS)
    return (service.base_ms + batch_size * service.item_ms) / (workers * (1 - kept_free))


def since_due_ms(since_ms: float, distance: float) -> float:
    """How long ago a batch that leaves now was due, where the one before it was due `since_ms` ago."""
    return max(0.0, min(since_ms - distance, SLACK_MS))
