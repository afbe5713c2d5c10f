"""One batch on an endpoint: which items share a call, what is retried, and when the batch is handed back whole.

A call is sent again only where that is safe.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.availability import BUSY, EndpointCapabilities, refuses_priority
from gpu_pool.backends.openai_endpoint.client import BrokenOff, EndpointResponse, NoAnswer, Opened, TooSlow, Transport
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, End, Lost, Unreached, read_refusal
from gpu_pool.backends.openai_endpoint.messages import (
    ROUTES,
    EventLines,
    StreamedCompletion,
    body_of,
    read_answer,
    refused_early,
    together,
    traceparent_of,
)
from scheduler.errors import ErrorCode
from scheduler.payload import Task

TOO_SLOW = ItemResult("The endpoint did not answer in time.", 0, ErrorCode.GPU_TIMEOUT)
BROKE_OFF = ItemResult("The model's answer broke off.", 0, ErrorCode.WORKER_LOST)
TRIES = 2
SECOND_TRY_S = 0.05  # Before the second try.


@dataclass(frozen=True, slots=True)
class EndpointCall:
    """What calls stand on: the way there, whose turn it is, what was learnt."""

    transport: Transport
    turns: asyncio.Semaphore
    habits: EndpointCapabilities
    model: Callable[[], str]
    clock: Callable[[], float] = time.monotonic


class Calls:
    """The calls of one batch. `step` is called whenever something came."""

    def __init__(self, line: EndpointCall, step: Callable[[], None]) -> None:
        self._line = line
        self._step = step
        self._streams: dict[int, tuple[Item, asyncio.Timeout]] = {}
        self.said = False
        """Somebody has heard a part of an answer."""

    def left_s(self, items: Sequence[Item]) -> float:
        """Seconds that a call for these may still take: as long as it is of use to the last of them."""
        return max(item.until for item in items) - self._line.clock()

    def let_go(self) -> None:
        """End the calls whose reader has gone, however silent the server is."""
        for item, limit in self._streams.values():
            if _gone(item) and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def ends(self, items: Sequence[Item]) -> list[End]:
        """What became of these, which share one call."""
        try:
            async with asyncio.timeout(self.left_s(items)):
                await self._line.turns.acquire()
        except TimeoutError:
            return [TOO_SLOW] * len(items)
        try:
            found = await self._tried(items)
        finally:
            self._line.turns.release()
        self._step()
        return found if isinstance(found, list) else [_unanswered(found)] * len(items)

    async def _tried(self, items: Sequence[Item]) -> "list[End] | _Silence":
        """As often as it takes to hear anything, within reason: what was not answered at all may be sent again."""
        found = await self._once(items)
        for _ in range(1, TRIES):
            if isinstance(found, list) or self.left_s(items) <= SECOND_TRY_S:
                break
            await asyncio.sleep(SECOND_TRY_S)
            found = await self._once(items)
        return found

    async def _once(self, items: Sequence[Item]) -> "list[End] | _Silence":
        try:
            return await self._asked(items)
        except NoAnswer as error:
            return _Silence(str(error), error.sent)
        except TooSlow:
            end: End = TOO_SLOW
        except BrokenOff as error:
            end = Lost(str(error))
        except InvalidOutput as error:
            end = ItemResult(str(error), 0, ErrorCode.INVALID_OUTPUT)
        return [end] * len(items)

    async def _asked(self, items: Sequence[Item]) -> list[End]:
        left_s = self.left_s(items)
        if left_s <= 0:
            raise TooSlow("No time is left for this call.")
        if items[0].listener is not None:
            return [await self._stream(items[0])]
        ordered = self._line.habits.takes_priority
        reply = await self._posted(items, left_s, ordered=ordered)
        if ordered and refuses_priority(reply):
            self._line.habits.takes_priority = False
            reply = await self._posted(items, self.left_s(items), ordered=False)
        return self._read(reply, items)

    async def _posted(self, items: Sequence[Item], left_s: float, *, ordered: bool) -> EndpointResponse:
        body = body_of(self._line.model(), items, priority=ordered)
        return await self._line.transport.post(ROUTES[items[0].task], body, left_s, traceparent_of(items))

    def _read(self, reply: EndpointResponse, items: Sequence[Item]) -> list[End]:
        if reply.status == 200:
            return list(read_answer(reply.body, items))
        meaning = read_refusal(reply.status, reply.headers, reply.body, items[0].parameters, time.time())
        return [meaning] * len(items)

    async def _stream(self, item: Item) -> End:
        end = await self._ordered(item, usage=self._line.habits.tells_usage)
        refused = isinstance(end, ItemResult) and end.error_code == ErrorCode.INVALID_REQUEST
        if refused and self._line.habits.tells_usage:
            # Older servers know no `stream_options`; where it goes well without, that was all.
            end = await self._ordered(item, usage=False)
            if isinstance(end, ItemResult) and not end.error_code:
                self._line.habits.tells_usage = False
        return end

    async def _ordered(self, item: Item, *, usage: bool) -> End:
        try:
            return await self._told(item, usage=usage, ordered=self._line.habits.takes_priority)
        except _PriorityRefused:
            self._line.habits.takes_priority = False
            return await self._told(item, usage=usage, ordered=False)

    async def _told(self, item: Item, *, usage: bool, ordered: bool) -> End:
        body = body_of(self._line.model(), [item], stream=True, usage=usage, priority=ordered)
        growing, left_s = StreamedCompletion(), self.left_s([item])
        try:
            async with asyncio.timeout(self._line.transport.patience_s(left_s)) as limit:
                self._streams[id(item)] = item, limit
                async with self._line.transport.begun(
                    ROUTES[item.task], body, left_s, traceparent_of([item])
                ) as opened:
                    return await self._hear(opened, item, growing, ordered=ordered)
        except TimeoutError:
            return growing.result() if _gone(item) else TOO_SLOW
        except (BrokenOff, InvalidOutput) as error:
            if growing.length:
                return BROKE_OFF
            if isinstance(error, BrokenOff):
                return Lost(str(error))
            raise
        finally:
            self._streams.pop(id(item), None)

    async def _hear(self, opened: Opened, item: Item, growing: StreamedCompletion, *, ordered: bool) -> End:
        if not opened.in_pieces:  # A refusal, or a server that makes no streams.
            reply = await opened.whole()
            if ordered and refuses_priority(reply):
                raise _PriorityRefused
            (end,) = self._read(reply, [item])
            if isinstance(end, ItemResult) and not end.error_code:
                self._say(item, 0, end.output)
            return end
        lines = EventLines()
        async for part in opened.parts():
            for event in lines.feed(part):
                offset = growing.length
                self._say(item, offset, growing.add(event))
                if growing.ended or _gone(item):
                    return growing.result()
            self._step()
        return growing.result() if growing.over else self._cut(growing)

    def _cut(self, growing: StreamedCompletion) -> End:
        return BROKE_OFF if growing.length else Lost("The endpoint's stream ended before its answer.")

    def _say(self, item: Item, offset: int, text: str) -> None:
        if text and item.listener is not None:
            self.said = True
            item.listener.say(offset, text)


class _PriorityRefused(Exception):
    """The server takes no priority any more."""


@dataclass(frozen=True, slots=True)
class _Silence:
    """Nothing of an answer came."""

    reason: str
    sent: bool


def _unanswered(silence: _Silence) -> End:
    """After the last try. What the server read and did not answer may be what ended it, and counts as an attempt."""
    return Lost(silence.reason) if silence.sent else Unreached(silence.reason)


def _gone(item: Item) -> bool:
    return item.listener is not None and item.listener.gone


BUSY_RETRY_S = 0.25  # Where a server that is busy does not say for how long.
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

    def __init__(
        self, line: EndpointCall, tasks: frozenset[Task], items: Sequence[Item], step: Callable[[], None]
    ) -> None:
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
        wait_s = max(wait_asked_s(ends) or BUSY_RETRY_S, BUSY_RETRY_S)
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
