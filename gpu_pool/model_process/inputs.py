"""Inputs of a batch inside the model process: decoded bodies, deadlines, and the listeners of streams.

A body that cannot be decoded fails alone. The new text of all listeners between two steps goes out in one frame: with
slots at once; in a batch at once with the first text of an item, else at most every 50 ms. What is left at the end of
an item is not sent: the result has it.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

from gpu_pool.backends.backend import Item, ItemResult, OutputListener
from gpu_pool.model_process.messages import Piece, Pieces, Run
from scheduler.errors import ErrorCode
from scheduler.payload import DOCUMENTS, Task, context_in, decode_payload
from scheduler.token_estimates import estimate

PIECES_EVERY_S = 0.05


class StreamListener:
    """The listener of one item. All text not sent yet becomes one piece.

    `late`: the stream's deadline (`until`, in seconds of `clock`) came before the item's end.
    """

    def __init__(
        self,
        place: int,
        stream: str,
        notify: Callable[["StreamListener"], None],
        until: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left = False
        """The client has left."""
        self.late = False
        self._until = until
        self._clock = clock
        self.first = True
        """Nothing of the current run was sent yet."""
        self._place = place
        self._stream = stream
        self._notify = notify
        self._offset = 0
        self._unsent: list[str] = []
        self._end = 0
        self.sent = False
        """Text of this or an earlier run was sent."""

    @property
    def gone(self) -> bool:
        """Whether the item may end now. Backends check this for items that have no end yet."""
        self.late = self.late or (not self.left and self._clock() >= self._until)
        return self.left or self.late

    def emit(self, offset: int, text: str) -> None:
        """See `OutputListener`."""
        if offset != self._end or not offset:  # The item is run again.
            self._offset, self._unsent = offset, []
            self.first = True
        self._end = offset + len(text)
        if text and not self.left:
            self._unsent.append(text)
            self._notify(self)

    def take(self) -> Piece:
        """The unsent text."""
        text = "".join(self._unsent)
        piece = Piece(self._place, self._stream, self._offset, text)
        self._offset, self._unsent, self.first, self.sent = self._offset + len(text), [], False, True
        return piece


class ListenerSet:
    """The listeners of running items, by their `place` in Pieces. `clock` is monotonic seconds."""

    def __init__(self, send: Callable[[Pieces], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._all: dict[int, StreamListener] = {}
        self._pending: dict[StreamListener, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def listen(self, place: int, stream: str, until: float = math.inf) -> StreamListener:
        """Add a listener for the item at this place, until this deadline."""
        listener = self._all[place] = StreamListener(place, stream, self._text_added, until, self._clock)
        return listener

    def _leave(self, place: int) -> None:
        if (listener := self._all.get(place)) is not None:
            listener.left = True
            self._pending.pop(listener, None)

    def _send_pending(self, seq: int) -> None:
        pending, self._pending = self._pending, {}
        self._send(Pieces(seq, [listener.take() for listener in pending]))

    def _text_added(self, listener: StreamListener) -> None:
        self._pending[listener] = None


class SlotListeners(ListenerSet):
    """The listeners of requests that start and end by themselves; the place is the `seq` of the Run."""

    def drop(self, seq: int) -> None:
        """The client of this request has left; a request without a listener is ignored."""
        self._leave(seq)

    def end(self, seq: int) -> None:
        """Remove the listener; its unsent text is in the result."""
        if (listener := self._all.pop(seq, None)) is not None:
            self._pending.pop(listener, None)

    def flush(self) -> None:
        """Send all text added since the last call, in one frame."""
        if self._pending:
            self._send_pending(0)


class Listeners(ListenerSet):
    """The listeners of the running batch; the place is the position.

    Text is collected for 50 ms: a faster rate cannot be read, and every event costs gateway and client a write and a
    read. 200 streams of 50 tokens/s would take most of a core.
    """

    def __init__(self, send: Callable[[Pieces], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(send, clock)
        self._seq = 0
        self._urgent = False
        self._sent_at = 0.0

    def begin(self, seq: int) -> None:
        """A batch begins, without listeners."""
        self._seq, self._all, self._pending, self._urgent = seq, {}, {}, False

    def drop(self, seq: int, places: Iterable[int]) -> None:
        """The clients of these positions have left; positions of another batch are ignored."""
        for place in places if seq == self._seq else ():
            self._leave(place)

    def flush(self) -> None:
        """After a step: send what is due."""
        if self._pending and (self._urgent or self._clock() - self._sent_at >= PIECES_EVERY_S):
            self._urgent = False
            self._sent_at = self._clock()
            self._send_pending(self._seq)

    def _text_added(self, listener: StreamListener) -> None:
        super()._text_added(listener)
        self._urgent = self._urgent or listener.first


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


STREAM_LEAD_S = 0.1  # The end must be in Redis before the gateway sends 504, 50 ms before the deadline.
IN_TIME = 0.95  # Share of a batch's budget; beyond the budget the watchdog kills the process.


def deadlines(run: Run, now: float) -> list[float]:
    """When each item must end at the latest: a little before its process would be killed."""
    most_ms = run.budget_ms * IN_TIME
    left_ms = run.left_ms or [run.budget_ms] * len(run.bodies)
    return [now + min(left, most_ms) / 1000 for left in left_ms]


def stream_deadlines(run: Run, now: float) -> list[float]:
    """When each item must end if it is a stream: by its own time, however long a batch may run.

    Empty if the items' times are unknown.
    """
    return [now + left / 1000 - STREAM_LEAD_S for left in run.left_ms]
