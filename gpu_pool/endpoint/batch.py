"""One batch on an endpoint: which items share a call, what is tried again, and when the batch is handed back whole."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, End, Lost, Unreached
from gpu_pool.backends.openai_endpoint.requests import Calls, Line
from gpu_pool.endpoint.bodies import refused_early, together
from gpu_pool.endpoint.door import BUSY
from scheduler.errors import ErrorCode
from scheduler.payload import Task

AGAIN_S = 0.25  # Where a server that is busy does not say for how long.
LEAST_S = 0.1  # With less time than that nothing is tried again.

NO_ROUTE = {
    Task.COMPLETE: "This model does not go on from texts.",
    Task.CHAT: "This model holds no conversations.",
    Task.EMBED: "This model makes no embeddings.",
}
_CALLERS = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.REQUEST_TOO_LARGE})
_BUSY = ItemResult(BUSY, 0, ErrorCode.NO_CAPACITY)
_LOST = ItemResult("The endpoint failed over this request.", 0, ErrorCode.WORKER_LOST)
_POISON = ItemResult("The model cannot process this input.", 0, ErrorCode.POISON_REQUEST)


@dataclass(frozen=True, slots=True)
class HandBack:
    """Nothing of the batch was answered, and nobody heard any of it: it may be run again, by whomever.

    `counted`: as an attempt, since the endpoint may have run it.
    """

    reason: str
    counted: bool


class EndpointBatch:
    """`tasks`: what the endpoint can do. No call outlasts the `until` of the last of its items."""

    def __init__(self, line: Line, tasks: frozenset[Task], items: Sequence[Item], step: Callable[[], None]) -> None:
        self._line = line
        self._items = items
        self.calls = Calls(line, step)
        self._early = [_early(item, tasks) for item in items]
        self._blamed: set[int] = set()

    @property
    def until(self) -> float:
        """When the time of the last of its items is over."""
        return max(item.until for item in self._items)

    def asked(self, ends: Sequence[End]) -> list[End]:
        """Of these ends those that the endpoint had a part in: what is refused here says nothing of it."""
        return [end for end, early in zip(ends, self._early, strict=True) if early is None]

    async def run(self) -> list[End]:
        """What became of each item, in order."""
        ends: list[End] = [Unreached("not tried")] * len(self._items)
        for place, end in enumerate(self._early):
            if end is not None:
                ends[place] = end
        again = [place for place, end in enumerate(self._early) if end is None]
        while again:
            await self._round(again, ends)
            again = await self._next_round(ends)
        return ends

    async def _next_round(self, ends: Sequence[End]) -> list[int]:
        """Where some were answered the batch cannot be handed back: the others wait here, as long as there is time."""
        again = [
            place for place, end in enumerate(ends) if isinstance(end, Busy | Unreached) or self._doubts(place, end)
        ]
        if not again or not (self.calls.said or any(map(_completed, ends))):
            return []
        wait_s = max(wait_asked_s(ends) or AGAIN_S, AGAIN_S)
        in_time = [place for place in again if self.calls.left_s([self._items[place]]) >= wait_s + LEAST_S]
        if in_time:
            await asyncio.sleep(wait_s)
        return in_time

    def _doubts(self, place: int, end: End) -> bool:
        """Whether the server's failure is not yet sure to be this input's: it is tried alone once more."""
        if not isinstance(end, Lost) or not end.by_input or place in self._blamed:
            return False
        self._blamed.add(place)
        return True

    async def _round(self, places: Iterable[int], ends: list[End]) -> None:
        habits = self._line.habits
        groups = together(self._items, places, lists=habits.takes_lists, tiers=habits.takes_priority)
        await asyncio.gather(*(self._group(group, ends) for group in groups))

    async def _group(self, places: Sequence[int], ends: list[End]) -> None:
        found = await self.calls.ends([self._items[place] for place in places])
        if len(places) > 1:
            found = await self._apart(places, found)
        for place, end in zip(places, found, strict=True):
            ends[place] = end

    async def _apart(self, places: Sequence[int], found: list[End]) -> list[End]:
        """A list that failed over one of its texts, or for being a list, is asked for text by text."""
        if not _may_be_the_list(found[0]):
            self._line.habits.list_went_well()
            return found
        refused = isinstance(found[0], ItemResult) and found[0].error_code in _CALLERS
        alone = await asyncio.gather(*(self.calls.ends([self._items[place]]) for place in places))
        ends = [end for (end,) in alone]
        self._line.habits.list_failed(refused=refused, alone_went_well=all(map(_completed, ends)))
        return ends


def settled(ends: Sequence[End], *, said: bool) -> list[ItemResult] | HandBack:
    """A result for each item; or the batch back, where none was answered yet and each may still be."""
    results = [end for end in ends if isinstance(end, ItemResult)]
    if len(results) == len(ends):
        return results
    if not said and all(result.error_code in _CALLERS for result in results):
        counted = any(isinstance(end, Lost) for end in ends)
        return HandBack(reason_of(ends), counted=counted)
    some = any(map(_completed, ends))
    return [end if isinstance(end, ItemResult) else _told(end, some_went_well=some) for end in ends]


def wait_asked_s(ends: Sequence[End]) -> float | None:
    """The longest that the server wants to be left alone; None where it named no time."""
    return max((end.wait_s for end in ends if isinstance(end, Busy) and end.wait_s is not None), default=None)


def reason_of(ends: Sequence[End]) -> str:
    """Why the first of those that were not answered was not."""
    unanswered = (end for end in ends if not isinstance(end, ItemResult))
    return next((BUSY if isinstance(end, Busy) else end.reason for end in unanswered), "")


def _early(item: Item, tasks: frozenset[Task]) -> ItemResult | None:
    if item.task not in tasks:
        return ItemResult(NO_ROUTE[item.task], 0, ErrorCode.INVALID_REQUEST)
    return refused_early(item)


def _completed(end: End) -> bool:
    return isinstance(end, ItemResult) and not end.error_code


def _may_be_the_list(end: End) -> bool:
    if isinstance(end, ItemResult):
        return end.error_code in _CALLERS or end.error_code == ErrorCode.INVALID_OUTPUT
    return isinstance(end, Lost) and end.by_input


def _told(end: Busy | Broken | Lost | Unreached, *, some_went_well: bool) -> ItemResult:
    if isinstance(end, Lost):
        return _POISON if end.by_input and some_went_well else _LOST
    return _BUSY
