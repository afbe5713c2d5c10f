"""Inputs of a batch inside the model process. A body that cannot be decoded fails alone."""

import math
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Item, ItemResult, OutputListener
from scheduler.errors import ErrorCode
from scheduler.payload import DOCUMENTS, Task, context_in, decode_payload
from scheduler.token_estimates import estimate

UNREADABLE = ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)
NOT_PASSED_ON = ItemResult(
    "The worker's model does not pass requests on; send the request again.", 0, ErrorCode.NO_CAPACITY
)
"""A model of another kind was started in a pool while requests for an endpoint were queued."""

Listen = Callable[[int, str, float], OutputListener]
"""Makes the listener of an item from its position, the address for its output, and its deadline."""

OUT_OF_TIME = "The deadline of this stream came before its end."


def run_readable(
    bodies: Sequence[bytes],
    run: Callable[[Sequence[Item]], list[ItemResult]],
    listen: Listen,
    deadlines: Sequence[float] = (),
    stream_deadlines: Sequence[float] = (),
) -> list[ItemResult]:
    """One result for each body, in order; `run` gets the readable ones, if there are any.

    `deadlines`: one for each body, or empty for none. `stream_deadlines`: those for bodies that are streams; empty: the
    same.
    """
    items = read_items(bodies, listen, deadlines, stream_deadlines)
    rejected = [rejection(item) for item in items]
    readable = [item for item, reason in zip(items, rejected, strict=True) if item is not None and reason is None]
    results = iter(with_late(readable, run(readable)) if readable else [])
    return [next(results) if reason is None else reason for reason in rejected]


def rejection(item: Item | None) -> ItemResult | None:
    """The result of a body that cannot be run here; None for others."""
    if item is None:
        return UNREADABLE
    # Only a model with a server behind it can run these.
    if item.task in DOCUMENTS or (item.task is Task.EMBED and bool(item.parameters)):
        return NOT_PASSED_ON
    return None


def read_items(
    bodies: Sequence[bytes], listen: Listen, deadlines: Sequence[float] = (), stream_deadlines: Sequence[float] = ()
) -> list[Item | None]:
    """An item for each body, None for an unreadable one; deadlines as above."""
    whole = deadlines if len(deadlines) == len(bodies) else [math.inf] * len(bodies)
    streams = stream_deadlines if len(stream_deadlines) == len(bodies) else whole
    return [_item(body, place, listen, whole[place], streams[place]) for place, body in enumerate(bodies)]


def with_late(items: Sequence[Item], results: list[ItemResult]) -> list[ItemResult]:
    """`results`, where a stream that its deadline ended fails with the tokens used until then."""
    if not any(item.listener is not None and item.listener.late for item in items):
        return results
    return [_late(item, result) for item, result in zip(items, results, strict=True)]


def _late(item: Item, result: ItemResult) -> ItemResult:
    """0 tokens mean that nothing was sent and nothing is charged, so a partial stream counts as one token at least."""
    if item.listener is None or not item.listener.late or result.error_code:
        return result
    unknown = max(1, estimate(len(item.input.encode()) + len(result.output.encode())))
    if item.task in DOCUMENTS:  # What was sent is counted; lines without a text are nothing.
        unknown = 0
    used = (result.tokens_used or unknown) if result.output else 0
    return ItemResult(OUT_OF_TIME, used, ErrorCode.DEADLINE_EXCEEDED)


def _item(body: bytes, place: int, listen: Listen, deadline: float, stream_deadline: float) -> Item | None:
    try:
        payload = decode_payload(body)
    except (ValueError, RecursionError):
        return None
    listener = listen(place, payload.stream, stream_deadline) if payload.stream else None
    until = deadline if listener is None else max(deadline, stream_deadline)
    customer = payload.customer if isinstance(payload.customer, int) else 0
    context = context_in(body)
    return Item(payload.input, payload.parameters, payload.task, listener, until, payload.priority, context, customer)
