"""From stored request bodies to what the model gets, inside the model process: one that cannot be read fails alone."""

from collections.abc import Callable, Sequence

from gpu_pool.backend import Item, ItemResult
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload

UNREADABLE = ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)


def run_readable(bodies: Sequence[bytes], run: Callable[[Sequence[Item]], list[ItemResult]]) -> list[ItemResult]:
    """One result for each body, in order; `run` gets those that can be read, if there are any."""
    items = [_item(body) for body in bodies]
    readable = [item for item in items if item is not None]
    results = run(readable) if readable else []
    if len(readable) == len(bodies):
        return results
    following = iter(results)
    return [UNREADABLE if item is None else next(following) for item in items]


def _item(body: bytes) -> Item | None:
    try:
        payload = decode_payload(body)
    except (ValueError, RecursionError):
        return None
    return Item(payload.input, payload.parameters, payload.task, payload.stream)
