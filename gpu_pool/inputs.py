"""From stored request bodies to what the model gets, inside the model process: one that cannot be read fails alone."""

import math
from collections.abc import Callable, Sequence

from gpu_pool.backend import Item, ItemResult, Listener
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload

UNREADABLE = ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)


Listen = Callable[[int, str], Listener]
"""Makes the listener of the item at a place, from where its output is wanted."""


def run_readable(
    bodies: Sequence[bytes],
    run: Callable[[Sequence[Item]], list[ItemResult]],
    listen: Listen,
    deadlines: Sequence[float] = (),
) -> list[ItemResult]:
    """One result for each body, in order; `run` gets those that can be read, if there are any.

    `deadlines`: of each body, as `Item` says; none: there are none.
    """
    whole = deadlines if len(deadlines) == len(bodies) else [math.inf] * len(bodies)
    items = [_item(body, place, listen, whole[place]) for place, body in enumerate(bodies)]
    readable = [item for item in items if item is not None]
    results = run(readable) if readable else []
    if len(readable) == len(bodies):
        return results
    following = iter(results)
    return [UNREADABLE if item is None else next(following) for item in items]


def _item(body: bytes, place: int, listen: Listen, deadline: float) -> Item | None:
    try:
        payload = decode_payload(body)
    except (ValueError, RecursionError):
        return None
    listener = listen(place, payload.stream) if payload.stream else None
    return Item(payload.input, payload.parameters, payload.task, listener, deadline)
