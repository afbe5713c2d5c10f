"""The listeners of streams inside the model process.

The new text of all listeners between two steps goes out in one frame: with slots at once; in a batch at once with the first
text of an item, else at most every 50 ms. What is left at the end of an item is not sent: the result has it.
"""

import math
import time
from collections.abc import Callable, Iterable

from gpu_pool.model_process.messages import Piece, Pieces

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

    def listen_to(self, seq: int) -> Callable[[int, str, float], StreamListener]:
        """Makes the listener of the only item of this request."""
        return lambda _, stream, until: self.listen(seq, stream, until)

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
