"""From stored request bodies to what the model gets, inside the model process: one that cannot be read fails alone."""

import math
from collections.abc import Callable, Sequence

from gpu_pool.backend import Item, ItemResult, Listener
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.traced_body import context_in

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
    items = read_items(bodies, listen, deadlines)
    readable = [item for item in items if item is not None]
    return with_unreadable(items, run(readable) if readable else [])


def read_items(bodies: Sequence[bytes], listen: Listen, deadlines: Sequence[float] = ()) -> list[Item | None]:
    """An item for each body, None for one that cannot be read; `deadlines` as above."""
    whole = deadlines if len(deadlines) == len(bodies) else [math.inf] * len(bodies)
    return [_item(body, place, listen, whole[place]) for place, body in enumerate(bodies)]


def with_unreadable(items: Sequence[Item | None], results: list[ItemResult]) -> list[ItemResult]:
    """One result for each body, where `results` are those of the items that could be read."""
    if len(results) == len(items):
        return results
    following = iter(results)
    return [UNREADABLE if item is None else next(following) for item in items]


def _item(body: bytes, place: int, listen: Listen, deadline: float) -> Item | None:
    try:
        payload = decode_payload(body)
    except (ValueError, RecursionError):
        return None
    listener = listen(place, payload.stream) if payload.stream else None
    return Item(payload.input, payload.parameters, payload.task, listener, deadline, payload.priority, context_in(body))
