"""The listeners of streams inside the model process.

The new text of all listeners between two steps goes out in one frame: with slots at once; in a batch at once with the first
text of an item, else at most every 50 ms. What is left at the end of an item is not sent: the result has it.
"""

import math
import time
from collections.abc import Callable, Iterable

from gpu_pool.model_process.messages import Piece, Pieces

PIECES_EVERY_S = 0.05
"""For batches: a faster rate cannot be read, and every event costs gateway and client a write and a read. 200 streams of 50
tokens/s would take most of a core."""
AT_ONCE_S = 0.0
"""For requests in slots."""


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


class Listeners:
    """The listeners of running items, by their `place` in Pieces; a batch begins with `begin`, and its places are positions.

    Requests in slots start and end by themselves: the `seq` of their Pieces is 0, and the place is the `seq` of the Run.
    `every_s`: how long new text is collected, except the first of an item. `clock` is monotonic seconds.
    """

    def __init__(
        self, send: Callable[[Pieces], None], every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._every_s = every_s
        self._clock = clock
        self._seq = 0
        self._all: dict[int, StreamListener] = {}
        self._pending: dict[StreamListener, None] = {}
        self._urgent = False
        self._sent_at = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, seq: int) -> None:
        """A batch begins, without listeners."""
        self._seq, self._all, self._pending, self._urgent = seq, {}, {}, False

    def listen(self, place: int, stream: str, until: float = math.inf) -> StreamListener:
        """Add a listener for the item at this place, until this deadline."""
        listener = self._all[place] = StreamListener(place, stream, self._text_added, until, self._clock)
        return listener

    def listen_to(self, seq: int) -> Callable[[int, str, float], StreamListener]:
        """Makes the listener of the only item of the request `seq` in a slot."""
        return lambda _, stream, until: self.listen(seq, stream, until)

    def drop(self, seq: int, places: Iterable[int]) -> None:
        """The clients of these places have left; those without a listener, and places of another batch, are ignored."""
        for place in places if seq == self._seq else ():
            if (listener := self._all.get(place)) is not None:
                listener.left = True
                self._pending.pop(listener, None)

    def end(self, place: int) -> None:
        """Remove the listener; its unsent text is in the result."""
        if (listener := self._all.pop(place, None)) is not None:
            self._pending.pop(listener, None)

    def flush(self) -> None:
        """After a step: send what is due, in one frame."""
        if self._pending and (self._urgent or self._clock() - self._sent_at >= self._every_s):
            self._urgent, self._sent_at = False, self._clock()
            pending, self._pending = self._pending, {}
            self._send(Pieces(self._seq, [listener.take() for listener in pending]))

    def _text_added(self, listener: StreamListener) -> None:
        self._pending[listener] = None
        self._urgent = self._urgent or listener.first
