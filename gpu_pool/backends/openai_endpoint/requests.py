"""One batch on an endpoint: which items share a call, what is retried, and when the whole batch is handed back.

A call is sent again only if that is safe.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.availability import BUSY, EndpointCapabilities, refuses_priority
from gpu_pool.backends.openai_endpoint.client import (
    MAX_ANSWER_BYTES,
    CallTimeout,
    EndpointResponse,
    NoResponse,
    OpenResponse,
    ResponseAborted,
    Transport,
)
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, CallResult, Lost, Unreached, read_refusal
from gpu_pool.backends.openai_endpoint.messages import (
    MISSING_BODY,
    ROUTES,
    EventLines,
    MissingBody,
    StreamedCompletion,
    StreamedDocument,
    body_of,
    group_calls,
    is_unusual,
    read_answer,
    rejected_early,
    traceparent_of,
)
from scheduler.errors import ErrorCode
from scheduler.payload import DOCUMENTS, Task

TOO_SLOW = ItemResult("The endpoint did not respond in time.", 0, ErrorCode.GPU_TIMEOUT)
ABORTED = ItemResult("The model's response broke off.", 0, ErrorCode.WORKER_LOST)
TRIES = 2
SECOND_TRY_S = 0.05  # Before the second try.


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """What calls share: the transport, the limit of concurrent calls, the learnt capabilities."""

    transport: Transport
    call_slots: asyncio.Semaphore
    capabilities: EndpointCapabilities
    model: Callable[[], str]
    body_dir: str = ""  # Files of large chats.
    clock: Callable[[], float] = time.monotonic


class Calls:
    """The calls of one batch. `step` is called whenever something was received."""

    def __init__(self, context: EndpointContext, step: Callable[[], None]) -> None:
        self._context = context
        self._step = step
        self._streams: dict[int, tuple[Item, asyncio.Timeout]] = {}
        self.streamed = False
        """A client has received a part of an output."""

    def left_s(self, items: Sequence[Item]) -> float:
        """Seconds that a call for these items may take: until the last of their deadlines."""
        return max(item.until for item in items) - self._context.clock()

    def end_abandoned(self) -> None:
        """End the calls whose reader has left, even if the server sends nothing."""
        for item, limit in self._streams.values():
            if _abandoned(item) and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def run(self, items: Sequence[Item]) -> list[CallResult]:
        """The results of these items, which share one call."""
        try:
            async with asyncio.timeout(self.left_s(items)):
                await self._context.call_slots.acquire()
        except TimeoutError:
            return [TOO_SLOW] * len(items)
        try:
            found = await self._with_retry(items)
        finally:
            self._context.call_slots.release()
        self._step()
        return found if isinstance(found, list) else [_unanswered(found)] * len(items)

    async def _with_retry(self, items: Sequence[Item]) -> "list[CallResult] | _Unanswered":
        """Calls without any response are sent again, TRIES times in all."""
        found = await self._once(items)
        for _ in range(1, TRIES):
            if isinstance(found, list) or self.left_s(items) <= SECOND_TRY_S:
                break
            await asyncio.sleep(SECOND_TRY_S)
            found = await self._once(items)
        return found

    async def _once(self, items: Sequence[Item]) -> "list[CallResult] | _Unanswered":
        try:
            return await self._call(items)
        except NoResponse as error:
            return _Unanswered(str(error), error.sent)
        except CallTimeout:
            result: CallResult = TOO_SLOW
        except MissingBody:
            result = MISSING_BODY
        except ResponseAborted as error:
            result = Lost(str(error))
        except InvalidOutput as error:
            by_input = is_unusual(items[0])
            result = ItemResult(str(error), 0, ErrorCode.INVALID_OUTPUT, by_input=by_input)
        return [result] * len(items)

    async def _call(self, items: Sequence[Item]) -> list[CallResult]:
        left_s = self.left_s(items)
        if left_s <= 0:
            raise CallTimeout("No time is left for this call.")
        if items[0].listener is not None:
            return [await self._stream(items[0])]
        priority = self._context.capabilities.takes_priority
        reply = await self._post(items, left_s, priority=priority)
        if priority and refuses_priority(reply):
            self._context.capabilities.takes_priority = False
            reply = await self._post(items, self.left_s(items), priority=False)
        return self._read(reply, items)

    async def _post(self, items: Sequence[Item], left_s: float, *, priority: bool) -> EndpointResponse:
        body = body_of(self._context.model(), items, self._context.body_dir, priority=priority)
        return await self._context.transport.post(ROUTES[items[0].task], body, left_s, traceparent_of(items))

    def _read(self, reply: EndpointResponse, items: Sequence[Item]) -> list[CallResult]:
        if reply.status == 200:
            return list(read_answer(reply.body, items))
        meaning = read_refusal(reply.status, reply.headers, reply.body, items[0].parameters, time.time())
        return [meaning] * len(items)

    async def _stream(self, item: Item) -> CallResult:
        result = await self._stream_with_priority(item, usage=self._context.capabilities.stream_usage)
        refused = isinstance(result, ItemResult) and result.error_code == ErrorCode.INVALID_REQUEST
        if refused and self._context.capabilities.stream_usage:
            # Older servers do not know `stream_options`; success without it shows that.
            result = await self._stream_with_priority(item, usage=False)
            if isinstance(result, ItemResult) and not result.error_code:
                self._context.capabilities.stream_usage = False
        return result

    async def _stream_with_priority(self, item: Item, *, usage: bool) -> CallResult:
        try:
            return await self._stream_once(item, usage=usage, priority=self._context.capabilities.takes_priority)
        except _PriorityRefused:
            self._context.capabilities.takes_priority = False
            return await self._stream_once(item, usage=usage, priority=False)

    async def _stream_once(self, item: Item, *, usage: bool, priority: bool) -> CallResult:
        context = self._context
        body = body_of(context.model(), [item], context.body_dir, stream=True, usage=usage, priority=priority)
        completion = StreamedDocument() if item.task in DOCUMENTS else StreamedCompletion()
        left_s = self.left_s([item])
        try:
            async with asyncio.timeout(self._context.transport.call_limit_s(left_s)) as limit:
                self._streams[id(item)] = item, limit
                async with self._context.transport.open_post(
                    ROUTES[item.task], body, left_s, traceparent_of([item])
                ) as opened:
                    return await self._read_stream(opened, item, completion, priority=priority)
        except TimeoutError:
            return completion.result() if _abandoned(item) else TOO_SLOW
        except (ResponseAborted, InvalidOutput) as error:
            if completion.length:
                return ABORTED
            if isinstance(error, ResponseAborted):
                return Lost(str(error))
            raise
        finally:
            self._streams.pop(id(item), None)

    async def _read_stream(
        self, opened: OpenResponse, item: Item, completion: StreamedCompletion, *, priority: bool
    ) -> CallResult:
        if not opened.is_stream:  # An error, or a server without streams.
            reply = await opened.whole()
            if priority and refuses_priority(reply):
                raise _PriorityRefused
            (result,) = self._read(reply, [item])
            if isinstance(result, ItemResult) and not result.error_code:
                self._say(item, 0, result.output)
            return result
        lines = EventLines()
        async for part in opened.parts():
            for event in lines.feed(part):
                offset = completion.length
                self._say(item, offset, completion.add(event))
                if completion.length > MAX_ANSWER_BYTES:  # As for a whole response.
                    raise InvalidOutput("The model's output is too large.")
                if completion.ended or _abandoned(item):
                    return completion.result()
            self._step()
        return completion.result() if completion.over else self._aborted(completion)

    def _aborted(self, completion: StreamedCompletion) -> CallResult:
        return ABORTED if completion.length else Lost("The endpoint's stream ended without output.")

    def _say(self, item: Item, offset: int, text: str) -> None:
        if text and item.listener is not None:
            self.streamed = True
            item.listener.emit(offset, text)


class _PriorityRefused(Exception):
    """The server no longer accepts a priority."""


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """No response was received."""

    reason: str
    sent: bool


def _unanswered(unanswered: _Unanswered) -> CallResult:
    """After the last try. A request that the server received may have crashed it, and counts as an attempt."""
    return Lost(unanswered.reason) if unanswered.sent else Unreached(unanswered.reason)


def _abandoned(item: Item) -> bool:
    return item.listener is not None and item.listener.gone


BUSY_RETRY_S = 0.25  # For a busy server that gives no time.
LEAST_S = 0.1  # With less time left, nothing is retried.

NO_ROUTE = {
    Task.COMPLETE: "This model does not complete texts.",
    Task.CHAT: "This model has no chat.",
    Task.CHAT_DOCUMENT: "This model has no chat.",
    Task.COMPLETION_DOCUMENT: "This model does not complete texts.",
    Task.EMBED: "This model makes no embeddings.",
}
_CALLERS = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.REQUEST_TOO_LARGE})
_BUSY = ItemResult(BUSY, 0, ErrorCode.NO_CAPACITY)
_LOST = ItemResult("The endpoint failed on this request.", 0, ErrorCode.WORKER_LOST)
_POISON = ItemResult("The model cannot process this input.", 0, ErrorCode.POISON_REQUEST)


@dataclass(frozen=True, slots=True)
class HandBack:
    """Nothing of the batch was answered or streamed: it may run again, on any worker.

    `counted`: as an attempt, since the endpoint may have run it.
    """

    reason: str
    counted: bool


class EndpointBatch:
    """`tasks`: what the endpoint supports. No call outlasts the `until` of the last of its items."""

    def __init__(
        self, context: EndpointContext, tasks: frozenset[Task], items: Sequence[Item], step: Callable[[], None]
    ) -> None:
        self._context = context
        self._items = items
        self.calls = Calls(context, step)
        self._rejections = [_rejection(item, tasks) for item in items]
        self._blamed: set[int] = set()

    @property
    def until(self) -> float:
        """The last deadline of its items."""
        return max(item.until for item in self._items)

    def sent(self, call_results: Sequence[CallResult]) -> list[CallResult]:
        """The results of items that were sent; items rejected here say nothing about the endpoint."""
        unsent = [*self._rejections, MISSING_BODY]
        return [result for result in call_results if result not in unsent]

    async def run(self) -> list[CallResult]:
        """The result of each item, in order."""
        call_results: list[CallResult] = [Unreached("not tried")] * len(self._items)
        for place, result in enumerate(self._rejections):
            if result is not None:
                call_results[place] = result
        again = [place for place, result in enumerate(self._rejections) if result is None]
        while again:
            await self._round(again, call_results)
            again = await self._next_round(call_results)
        return call_results

    async def _next_round(self, call_results: Sequence[CallResult]) -> list[int]:
        """The items to retry: a batch with answered items cannot be handed back, so the others are retried here."""
        again = [
            place
            for place, result in enumerate(call_results)
            if isinstance(result, Busy | Unreached) or self._is_doubtful(place, result)
        ]
        if not again or not (self.calls.streamed or any(map(_completed, call_results))):
            return []
        wait_s = max(requested_wait_s(call_results) or BUSY_RETRY_S, BUSY_RETRY_S)
        in_time = [place for place in again if self.calls.left_s([self._items[place]]) >= wait_s + LEAST_S]
        if in_time:
            await asyncio.sleep(wait_s)
        return in_time

    def _is_doubtful(self, place: int, result: CallResult) -> bool:
        """Whether the server's failure may have another cause than this input: it is tried alone once more."""
        if not isinstance(result, Lost) or not result.by_input or place in self._blamed:
            return False
        self._blamed.add(place)
        return True

    async def _round(self, places: Iterable[int], call_results: list[CallResult]) -> None:
        capabilities = self._context.capabilities
        groups = group_calls(self._items, places, lists=capabilities.takes_lists, tiers=capabilities.takes_priority)
        await asyncio.gather(*(self._group(group, call_results) for group in groups))

    async def _group(self, places: Sequence[int], call_results: list[CallResult]) -> None:
        found = await self.calls.run([self._items[place] for place in places])
        if len(places) > 1:
            found = await self._retry_singly(places, found)
        for place, result in zip(places, found, strict=True):
            call_results[place] = result

    async def _retry_singly(self, places: Sequence[int], found: list[CallResult]) -> list[CallResult]:
        """A list that failed because of one text, or for being a list, is sent text by text."""
        if not _may_be_list_error(found[0]):
            self._context.capabilities.list_succeeded()
            return found
        refused = isinstance(found[0], ItemResult) and found[0].error_code in _CALLERS
        alone = await asyncio.gather(*(self.calls.run([self._items[place]]) for place in places))
        call_results = [result for (result,) in alone]
        self._context.capabilities.list_failed(refused=refused, singles_succeeded=all(map(_completed, call_results)))
        return call_results


def batch_result(call_results: Sequence[CallResult], *, streamed: bool) -> list[ItemResult] | HandBack:
    """A result for each item; or HandBack if none was answered and all may be retried."""
    results = [result for result in call_results if isinstance(result, ItemResult)]
    if len(results) == len(call_results):
        return results
    if not streamed and all(result.error_code in _CALLERS for result in results):
        counted = any(isinstance(result, Lost) for result in call_results)
        return HandBack(reason_of(call_results), counted=counted)
    some = any(map(_completed, call_results))
    return [
        result if isinstance(result, ItemResult) else _failure(result, others_succeeded=some) for result in call_results
    ]


def requested_wait_s(call_results: Sequence[CallResult]) -> float | None:
    """The longest time that the server asks to be left alone; None if it gave none."""
    return max(
        (result.wait_s for result in call_results if isinstance(result, Busy) and result.wait_s is not None),
        default=None,
    )


def reason_of(call_results: Sequence[CallResult]) -> str:
    """Why the first unanswered item was not answered."""
    unanswered = (result for result in call_results if not isinstance(result, ItemResult))
    return next((BUSY if isinstance(result, Busy) else result.reason for result in unanswered), "")


def _rejection(item: Item, tasks: frozenset[Task]) -> ItemResult | None:
    if item.task not in tasks:
        return ItemResult(NO_ROUTE[item.task], 0, ErrorCode.INVALID_REQUEST)
    return rejected_early(item)


def _completed(result: CallResult) -> bool:
    return isinstance(result, ItemResult) and not result.error_code


def _may_be_list_error(result: CallResult) -> bool:
    if isinstance(result, ItemResult):
        return result.error_code in _CALLERS or result.error_code == ErrorCode.INVALID_OUTPUT
    return isinstance(result, Lost) and result.by_input


def _failure(result: Busy | Broken | Lost | Unreached, *, others_succeeded: bool) -> ItemResult:
    if isinstance(result, Lost):
        return _POISON if result.by_input and others_succeeded else _LOST
    return _BUSY
