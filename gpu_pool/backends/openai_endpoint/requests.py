"""One call to an endpoint for items that go together, and what became of each: sent again only where that is safe."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.client import BrokenOff, NoAnswer, Opened, Reply, TooSlow, Transport
from gpu_pool.backends.openai_endpoint.errors import End, Lost, Unreached, read_refusal
from gpu_pool.backends.openai_endpoint.messages import read_answer
from gpu_pool.endpoint.bodies import ROUTES, body_of, traceparent_of
from gpu_pool.endpoint.growing import EventLines, Growing
from gpu_pool.endpoint.habits import Habits
from gpu_pool.endpoint.priority import refuses_priority
from scheduler.errors import ErrorCode

TOO_SLOW = ItemResult("The endpoint did not answer in time.", 0, ErrorCode.GPU_TIMEOUT)
BROKE_OFF = ItemResult("The model's answer broke off.", 0, ErrorCode.WORKER_LOST)
TRIES = 2
AGAIN_S = 0.05  # Before the second try.


@dataclass(frozen=True, slots=True)
class Line:
    """What calls stand on: the way there, whose turn it is, what was learnt."""

    transport: Transport
    turns: asyncio.Semaphore
    habits: Habits
    model: Callable[[], str]
    clock: Callable[[], float] = time.monotonic


class Calls:
    """The calls of one batch. `step` is called whenever something came."""

    def __init__(self, line: Line, step: Callable[[], None]) -> None:
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
            if isinstance(found, list) or self.left_s(items) <= AGAIN_S:
                break
            await asyncio.sleep(AGAIN_S)
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

    async def _posted(self, items: Sequence[Item], left_s: float, *, ordered: bool) -> Reply:
        body = body_of(self._line.model(), items, priority=ordered)
        return await self._line.transport.post(ROUTES[items[0].task], body, left_s, traceparent_of(items))

    def _read(self, reply: Reply, items: Sequence[Item]) -> list[End]:
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
        growing, left_s = Growing(), self.left_s([item])
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

    async def _hear(self, opened: Opened, item: Item, growing: Growing, *, ordered: bool) -> End:
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

    def _cut(self, growing: Growing) -> End:
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
