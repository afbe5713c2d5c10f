"""Which claimed batch has the model, and when the next one should be claimed: shortly before the model is free, so that
it does not wait for Redis, and no sooner, so that batches in the queue can still be overtaken.

One batch has the model, at most one more is claimed and waits. A waiting batch is rejected when the worker stops.
"""

import asyncio
from collections.abc import Callable

AHEAD_MS = 10.0
"""Time before the expected end of the running batch: enough for a pop and a claim on a busy machine."""


class PrefetchSlot:
    """The slot of one claimed batch: it waits for `granted`, calls `started`, and must call `release`."""

    def __init__(self, ahead: "Prefetch", granted: "asyncio.Future[bool]", backlog: bool) -> None:  # noqa: FBT001
        self._prefetch = ahead
        self._backlog = backlog
        self.granted = granted
        """True: the batch may run. False: the worker stops, and the batch must be handed back."""

    def started(self, expected_ms: float) -> None:
        """The run begins and will take about `expected_ms` (0: unknown)."""
        if self._backlog and expected_ms > 0:
            self._prefetch.model_begins(expected_ms)

    def release(self) -> None:
        """The model is free or was not needed. May be called again."""
        self._prefetch.release_slot(self)


class Prefetch:
    """The slots of one worker. `changed` is called whenever `wants_next` may have changed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._holder: PrefetchSlot | None = None
        self._waiting: PrefetchSlot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._near_end = False
        self._stopping = False

    @property
    def wants_next(self) -> bool:
        """Whether one more batch may be claimed."""
        return self._holder is None or (self._near_end and self._waiting is None)

    def slot(self, *, ahead: bool) -> PrefetchSlot:
        """The slot of a batch that was just claimed; `ahead`: the next one may be claimed before this one ends."""
        slot = PrefetchSlot(self, asyncio.get_running_loop().create_future(), ahead)
        if self._stopping:
            slot.granted.set_result(False)
        elif self._holder is None:
            self._grant(slot)
        else:
            self._waiting = slot
        self._changed()
        return slot

    def stop(self) -> None:
        """Grant no more slots; a waiting batch is to be handed back."""
        self._stopping = True
        if self._waiting is not None:
            self._waiting.granted.set_result(False)
            self._waiting = None

    def model_begins(self, expected_ms: float) -> None:
        """A run begins; the next batch may be claimed near its end."""
        self._stop_timer()
        delay_s = max(0.0, expected_ms - AHEAD_MS) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._nears_end)

    def release_slot(self, slot: PrefetchSlot) -> None:
        """Release the slot; the waiting batch gets the model."""
        if slot is self._waiting:
            self._waiting = None
        if slot is not self._holder:
            return
        self._holder = None
        self._near_end = False
        self._stop_timer()
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._grant(waiting)
        self._changed()

    def _grant(self, slot: PrefetchSlot) -> None:
        self._holder = slot
        slot.granted.set_result(True)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _nears_end(self) -> None:
        self._near_end = True
        self._changed()
