"""Whose batch has the model, and when the next one should be claimed: shortly before the model is free, so that it does
not wait for Redis, and not sooner, so that what waits in the queue can still be overtaken.

One batch has the model, at most one more is claimed and waits. The wait ends without the model when the worker stops.
Where several have it, none waits: the next is claimed when one of them is over.
"""

import asyncio
from collections.abc import Callable

AHEAD_MS = 10.0
"""Before the expected end of the running batch: time for a pop and a claim on a busy machine."""


class PrefetchSlot:
    """One claimed batch's place: it waits for `granted`, says when it `begins`, and must say once that it is `over`."""

    def __init__(self, ahead: "Prefetch", granted: "asyncio.Future[bool]", pressed: bool) -> None:  # noqa: FBT001
        self._ahead = ahead
        self._pressed = pressed
        self.granted = granted
        """True: the model is this batch's. False: the worker stops, and it must be handed back."""

    def begins(self, expected_ms: float) -> None:
        """The model begins, and will take about so long; 0: nobody knows."""
        if self._pressed and expected_ms > 0:
            self._ahead.model_begins(expected_ms)

    def over(self) -> None:
        """The model is free, or was never needed. May be said again."""
        self._ahead.pass_on(self)


class Prefetch:
    """The places of one worker. `changed` is called whenever `wants_next` may be another."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._holders: set[PrefetchSlot] = set()
        self._waiting: PrefetchSlot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._near_end = False
        self._stopping = False
        self.width = 1

    @property
    def wants_next(self) -> bool:
        """Whether one more batch may be claimed."""
        return len(self._holders) < self.width or (self._near_end and self._waiting is None)

    def resize(self, width: int) -> None:
        """So many batches may have the model at a time. Who has it keeps it."""
        self.width = width
        self._near_end = False
        self._pass_to_waiting()
        self._changed()

    def place(self, *, ahead: bool) -> PrefetchSlot:
        """A place for a batch that was just claimed; `ahead`: the next one may be claimed before this one's end."""
        place = PrefetchSlot(self, asyncio.get_running_loop().create_future(), ahead)
        if self._stopping:
            place.granted.set_result(False)
        elif len(self._holders) < self.width:
            self._grant(place)
        else:
            self._waiting = place
        self._changed()
        return place

    def stop(self) -> None:
        """Grant nothing more: what waits is to be handed back."""
        self._stopping = True
        if self._waiting is not None:
            self._waiting.granted.set_result(False)
            self._waiting = None

    def model_begins(self, expected_ms: float) -> None:
        """The holder's run begins; the next batch may be claimed near its end."""
        if self.width > 1:
            return
        self._stop_timer()
        delay_s = max(0.0, expected_ms - AHEAD_MS) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._nears_end)

    def pass_on(self, place: PrefetchSlot) -> None:
        """The place is given up; its successor gets the model."""
        if place is self._waiting:
            self._waiting = None
        if place not in self._holders:
            return
        self._holders.discard(place)
        self._near_end = False
        self._stop_timer()
        self._pass_to_waiting()
        self._changed()

    def _pass_to_waiting(self) -> None:
        if self._waiting is not None and len(self._holders) < self.width:
            waiting, self._waiting = self._waiting, None
            self._grant(waiting)

    def _grant(self, place: PrefetchSlot) -> None:
        self._holders.add(place)
        place.granted.set_result(True)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _nears_end(self) -> None:
        self._near_end = True
        self._changed()
