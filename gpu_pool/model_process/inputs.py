"""Inside the model process: who listens to the items of the batch that runs, and what they are to hear next.

What all of them are told between two steps goes out in one frame: at once where somebody hears the first of an item,
else at most every 50 ms. More is more than a reader can follow, and every event costs gateway and client a write and a
read: 200 streams of 50 tokens/s would be most of a core. What is left at the end of a batch is not sent: the answer has it.
What went out lately goes out again with what is new, so a message that is lost is made good by the next one.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

from gpu_pool.model_process.messages import Piece, Pieces

PIECES_EVERY_S = 0.05
AGAIN = 3
"""So many pieces are repeated: as long as a subscription that was lost takes to be made again."""


class StreamListener:
    """One item's. What it was told and what was not sent yet is one text.

    `late`: the stream's time was over (`until`, in seconds of `clock`) before the item had its end.
    """

    def __init__(
        self,
        place: int,
        stream: str,
        told: Callable[["StreamListener"], None],
        until: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left = False
        """The client has gone."""
        self.late = False
        self._until = until
        self._clock = clock
        self.first = True
        """Nothing was sent yet of the run that goes on."""
        self._place = place
        self._stream = stream
        self._told = told
        self._offset = 0
        self._unsent: list[str] = []
        self._lately: deque[str] = deque(maxlen=AGAIN)
        self._end = 0

    @property
    def gone(self) -> bool:
        """Whether nothing more is wanted. Backends ask this for items that have no end yet."""
        self.late = self.late or (not self.left and self._clock() >= self._until)
        return self.left or self.late

    def say(self, offset: int, text: str) -> None:
        """As `Listener` says."""
        if offset != self._end or not offset:  # It is run again.
            self._offset, self._unsent = offset, []
            self._lately.clear()
            self.first = True
        self._end = offset + len(text)
        if text and not self.left:
            self._unsent.append(text)
            self._told(self)

    def take(self) -> Piece:
        """What was not sent yet, behind what was sent lately."""
        again, text = "".join(self._lately), "".join(self._unsent)
        piece = Piece(self._place, self._stream, self._offset - len(again), again + text)
        self._lately.append(text)
        self._offset, self._unsent, self.first = self._offset + len(text), [], False
        return piece


class Listeners:
    """All listeners of the batch that runs. `clock` is monotonic seconds."""

    def __init__(self, send: Callable[[Pieces], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._seq = 0
        self._all: dict[int, StreamListener] = {}
        self._told: dict[StreamListener, None] = {}
        self._urgent = False
        self._sent_at = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, seq: int) -> None:
        """A batch begins, with nobody who listens yet."""
        self._seq, self._all, self._told, self._urgent = seq, {}, {}, False

    def listen(self, place: int, stream: str, until: float = math.inf) -> StreamListener:
        """Somebody listens to the item at this place, until then at the latest."""
        listener = self._all[place] = StreamListener(place, stream, self._has_news, until, self._clock)
        return listener

    def drop(self, seq: int, places: Iterable[int]) -> None:
        """These have gone; what is said of another batch comes too late."""
        for place in places if seq == self._seq else ():
            if (listener := self._all.get(place)) is not None:
                listener.left = True
                self._told.pop(listener, None)

    def flush(self) -> None:
        """After a step: send what is to be sent now."""
        if self._told and (self._urgent or self._clock() - self._sent_at >= PIECES_EVERY_S):
            told, self._told, self._urgent = self._told, {}, False
            self._sent_at = self._clock()
            self._send(Pieces(self._seq, [listener.take() for listener in told]))

    def _has_news(self, listener: StreamListener) -> None:
        self._told[listener] = None
        self._urgent = self._urgent or listener.first
