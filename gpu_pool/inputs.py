"""From stored request bodies to what the model gets, inside the model process: one that cannot be read fails alone."""

import math
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Item, ItemResult, Listener
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.traced_body import context_in

UNREADABLE = ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)


Listen = Callable[[int, str, float], Listener]
"""Makes the listener of the item at a place, from where its output is wanted, and until when."""

OUT_OF_TIME = "The time of this stream was over before its end."
BYTES_PER_TOKEN = 4


def run_readable(
    bodies: Sequence[bytes],
    run: Callable[[Sequence[Item]], list[ItemResult]],
    listen: Listen,
    deadlines: Sequence[float] = (),
    stream_deadlines: Sequence[float] = (),
) -> list[ItemResult]:
    """One result for each body, in order; `run` gets those that can be read, if there are any.

    `deadlines`: of each body, as `Item` says; none: there are none. `stream_deadlines`: those that count where it is a
    stream; none: the same.
    """
    items = read_items(bodies, listen, deadlines, stream_deadlines)
    readable = [item for item in items if item is not None]
    return with_unreadable(items, with_late(readable, run(readable)) if readable else [])


def read_items(
    bodies: Sequence[bytes], listen: Listen, deadlines: Sequence[float] = (), stream_deadlines: Sequence[float] = ()
) -> list[Item | None]:
    """An item for each body, None for one that cannot be read; deadlines as above."""
    whole = deadlines if len(deadlines) == len(bodies) else [math.inf] * len(bodies)
    streams = stream_deadlines if len(stream_deadlines) == len(bodies) else whole
    return [_item(body, place, listen, whole[place], streams[place]) for place, body in enumerate(bodies)]


def with_late(items: Sequence[Item], results: list[ItemResult]) -> list[ItemResult]:
    """`results`, where a stream that was ended by its deadline failed by that, with the tokens that it used until then."""
    if not any(item.listener is not None and item.listener.late for item in items):
        return results
    return [_late(item, result) for item, result in zip(items, results, strict=True)]


def with_unreadable(items: Sequence[Item | None], results: list[ItemResult]) -> list[ItemResult]:
    """One result for each body, where `results` are those of the items that could be read."""
    if len(results) == len(items):
        return results
    following = iter(results)
    return [UNREADABLE if item is None else next(following) for item in items]


def _late(item: Item, result: ItemResult) -> ItemResult:
    """0 tokens say that nothing was sent, and that nothing is charged; so what was sent counts as one at least."""
    if item.listener is None or not item.listener.late or result.error_code:
        return result
    estimate = math.ceil((len(item.input.encode()) + len(result.output.encode())) / BYTES_PER_TOKEN)
    used = (result.tokens_used or max(1, estimate)) if result.output else 0
    return ItemResult(OUT_OF_TIME, used, ErrorCode.DEADLINE_EXCEEDED)


def _item(body: bytes, place: int, listen: Listen, deadline: float, stream_deadline: float) -> Item | None:
    try:
        payload = decode_payload(body)
    except (ValueError, RecursionError):
        return None
    listener = listen(place, payload.stream, stream_deadline) if payload.stream else None
    until = deadline if listener is None else max(deadline, stream_deadline)
    return Item(payload.input, payload.parameters, payload.task, listener, until, payload.priority, context_in(body))
