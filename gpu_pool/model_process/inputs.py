"""Inputs of a batch inside the model process. A body that cannot be decoded fails alone."""

from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Backend, Item, ItemResult, OutputListener
from gpu_pool.model_process.messages import Run
from scheduler.errors import ErrorCode
from scheduler.payload import DOCUMENTS, Task, context_in, decode_payload
from scheduler.token_estimates import estimate

UNREADABLE = ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)
NOT_PASSED_ON = ItemResult(
    "The worker's model does not pass requests on; send the request again.", 0, ErrorCode.NO_CAPACITY
)
"""A model of another kind was started in a pool while requests for an endpoint were queued."""

Reject = Callable[[Item], ItemResult | None]
"""Returns the result of an item that the backend must not get, because nothing reads one of its parameters."""

Listen = Callable[[int, str, float], OutputListener]
"""Makes the listener of an item from its position, the address for its output, and its deadline."""

STREAM_LEAD_S = 0.1  # The end must be in Redis before the gateway sends 504, 50 ms before the deadline.
IN_TIME = 0.95  # Share of a batch's budget; beyond the budget the watchdog kills the process.
OUT_OF_TIME = "The deadline of this stream came before its end."


def embedding_parameter(item: Item) -> ItemResult | None:
    """The rejection of backends that read the parameters of texts themselves, and none of embeddings."""
    if item.task is not Task.EMBED or not item.parameters:
        return None
    name = next(iter(item.parameters))
    return ItemResult(f"parameters.{name} is not a parameter of this model's embeddings.", 0, ErrorCode.INVALID_REQUEST)


def reject_of(backend: Backend) -> Reject:
    """How the backend rejects items: by its own `rejection`, if it has one."""
    reject: Reject = getattr(backend, "rejection", embedding_parameter)
    return reject


def run_readable(
    run: Run,
    compute: Callable[[Sequence[Item]], list[ItemResult]],
    listen: Listen,
    now: float,
    reject: Reject = embedding_parameter,
) -> list[ItemResult]:
    """One result for each body, in order; `compute` gets the readable ones, if there are any. `now`: see `read_items`."""
    items = read_items(run, listen, now)
    rejected = [rejection(item, reject) for item in items]
    readable = [item for item, reason in zip(items, rejected, strict=True) if item is not None and reason is None]
    computed = compute(readable) if readable else []
    results = [
        result if item.listener is None else in_time(item, result)
        for item, result in zip(readable, computed, strict=True)
    ]
    if len(results) == len(items):
        return results
    left = iter(results)
    return [next(left) if reason is None else reason for reason in rejected]


def rejection(item: Item | None, reject: Reject = embedding_parameter) -> ItemResult | None:
    """The result of a body that cannot be run here; None for others."""
    if item is None:
        return UNREADABLE
    return NOT_PASSED_ON if item.task in DOCUMENTS else reject(item)


def deadlines(run: Run, now: float) -> list[float]:
    """When each item must end at the latest, in monotonic seconds: a little before its process would be killed."""
    most_ms = run.budget_ms * IN_TIME
    left_ms = run.left_ms or [run.budget_ms] * len(run.bodies)
    return [now + min(left, most_ms) / 1000 for left in left_ms]


def read_items(run: Run, listen: Listen, now: float) -> list[Item | None]:
    """An item for each body, None for an unreadable one. `now`: the monotonic time from which their time left counts."""
    whole = deadlines(run, now)
    # A stream must end by its own time, however long a batch may run.
    streams = [now + left / 1000 - STREAM_LEAD_S for left in run.left_ms] or whole
    items: list[Item | None] = []
    for place, body in enumerate(run.bodies):
        try:
            payload = decode_payload(body)
        except (ValueError, RecursionError):
            items.append(None)
            continue
        listener = listen(place, payload.stream, streams[place]) if payload.stream else None
        until = whole[place] if listener is None else max(whole[place], streams[place])
        customer = payload.customer if isinstance(payload.customer, int) else 0
        trace = context_in(body)
        items.append(
            Item(payload.input, payload.parameters, payload.task, listener, until, payload.priority, trace, customer)
        )
    return items


def in_time(item: Item, result: ItemResult) -> ItemResult:
    """`result`; that of a stream which its deadline ended is a failure with the tokens used until then.

    0 tokens mean that nothing was sent and nothing is charged, so a partial stream counts as one token at least.
    """
    if item.listener is None or not item.listener.late or result.error_code:
        return result
    unknown = max(1, estimate(len(item.input.encode()) + len(result.output.encode())))
    if item.task in DOCUMENTS:  # What was sent is counted; lines without a text are nothing.
        unknown = 0
    used = (result.tokens_used or unknown) if result.output else 0
    return ItemResult(OUT_OF_TIME, used, ErrorCode.DEADLINE_EXCEEDED)
