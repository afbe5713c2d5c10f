"""The call of one request to an endpoint: streamed or not, with what is tried again and what its result means.

A call is made again only if the server has not received it.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.capabilities import EndpointCapabilities, refuses_priority, refuses_usage
from gpu_pool.backends.openai_endpoint.client import (
    MAX_ANSWER_BYTES,
    CallTimeout,
    EndpointResponse,
    NoResponse,
    OpenResponse,
    ResponseAborted,
    Transport,
    fault_of,
)
from gpu_pool.backends.openai_endpoint.errors import CallResult, Lost, Unreached, read_refusal, read_reported
from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause
from gpu_pool.backends.openai_endpoint.messages import (
    MISSING_BODY,
    ROUTES,
    MissingBody,
    body_of,
    document_of,
    is_unusual,
    names_sent,
    traceparent_of,
)
from gpu_pool.backends.openai_endpoint.reading.answers import MOST_TOKENS, ReportedError, read_answer
from gpu_pool.backends.openai_endpoint.reading.event_stream import EventParser
from gpu_pool.backends.openai_endpoint.reading.streamed import StreamedCompletion, StreamedDocument
from gpu_pool.backends.openai_endpoint.stream_sweep import StreamSweep
from scheduler.errors import ErrorCode
from scheduler.payload import DOCUMENTS, Task
from scheduler.token_estimates import document_tokens, estimate, line_tokens

TOO_SLOW = ItemResult("The endpoint did not respond in time.", 0, ErrorCode.GPU_TIMEOUT)
ABORTED = ItemResult("The model's response broke off.", 0, ErrorCode.WORKER_LOST)
TRIES = 2
_FIRST_LINES = 1 << 14
"""Characters that usually include a text."""
SECOND_TRY_S = 0.05
"""The pause before the second try."""

NO_ROUTE = {
    Task.COMPLETE: "This model does not complete texts.",
    Task.CHAT: "This model has no chat.",
    Task.CHAT_DOCUMENT: "This model has no chat.",
    Task.COMPLETION_DOCUMENT: "This model does not complete texts.",
    Task.EMBED: "This model makes no embeddings.",
}


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """What calls share: the transport, the reader of streams, the learnt capabilities."""

    transport: Transport
    sweep: StreamSweep
    capabilities: EndpointCapabilities
    model: Callable[[], str]
    body_dir: str = ""
    """Files of large chats."""
    first_token_s: float = 60.0
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class CallProgress:
    """What is known of a call while it runs. `on_output` is called with each part of a streamed output."""

    on_output: Callable[[], None] = lambda: None
    has_sent: bool = False
    """A client has received a part of the output."""
    completion: StreamedCompletion | None = None
    """The output of a stream so far."""


class EndpointCall:
    """The call for one item, which must not outlast its deadline."""

    def __init__(self, context: EndpointContext, item: Item, progress: CallProgress) -> None:
        self._context = context
        self._item = item
        self._progress = progress

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._item.until - self._context.clock()

    @property
    def _is_left(self) -> bool:
        """Whether the client of a stream has left, or its deadline has come."""
        return self._item.listener is not None and self._item.listener.gone

    async def run(self) -> CallResult:
        """The result. A call that did not reach the server is made again, TRIES times in all; never one that it may have read
        (RFC 9112, section 9.3.1).
        """
        result = await self._once()
        for _ in range(1, TRIES):
            if not isinstance(result, NoResponse) or result.sent or self.left_s <= SECOND_TRY_S:
                break
            await asyncio.sleep(SECOND_TRY_S)
            result = await self._once()
        return failure_of(result) if isinstance(result, NoResponse) else result

    async def _once(self) -> CallResult | NoResponse:
        try:
            if self._item.listener is not None:
                return await self._stream()
            if self.left_s <= 0:
                return TOO_SLOW
            priority = self._context.capabilities.takes_priority
            reply = await self._post(priority=priority)
            if priority and refuses_priority(reply):
                self._context.capabilities.takes_priority = False
                reply = await self._post(priority=False)
            return self._read(reply)
        except NoResponse as error:
            return error
        except MissingBody:
            return MISSING_BODY
        except (CallTimeout, ResponseAborted, InvalidOutput) as error:
            return failure_of(error, by_input=isinstance(error, InvalidOutput) and is_unusual(self._item))

    async def _post(self, *, priority: bool) -> EndpointResponse:
        body = body_of(self._context.model(), [self._item], self._context.body_dir, priority=priority)
        route, trace = ROUTES[self._item.task], traceparent_of([self._item])
        return await self._context.transport.post(route, body, self.left_s, trace)

    def _read(self, reply: EndpointResponse) -> CallResult:
        if reply.status == 200:
            try:
                result = read_answer(reply.body, [self._item])[0]
                if result.error_code:
                    return result
                later = "" if result.output_tokens else result.output
                return counted_result(result, later, self._item, self._context.body_dir)
            except ReportedError as error:
                return read_reported(error.document, self._names_sent, time.time())
        return read_refusal(reply.status, reply.headers, reply.body, self._names_sent, time.time())

    def _names_sent(self) -> Collection[str]:
        return names_sent(self._item, self._context.body_dir)

    async def _stream(self) -> CallResult:
        capabilities = self._context.capabilities
        usage, refused = capabilities.stream_usage, False
        while True:
            try:
                result = await self._stream_once(usage=usage, priority=capabilities.takes_priority)
            except _PriorityRefused:
                capabilities.takes_priority = False
            except _UsageRefused:  # Older servers do not know `stream_options`; success without it shows that.
                usage, refused = False, True
            else:
                if refused and isinstance(result, ItemResult) and not result.error_code:
                    capabilities.stream_usage = False
                return result

    async def _stream_once(self, *, usage: bool, priority: bool) -> CallResult:
        context, item = self._context, self._item
        body = body_of(context.model(), [item], context.body_dir, stream=True, usage=usage, priority=priority)
        completion = StreamedDocument() if item.task in DOCUMENTS else StreamedCompletion()
        self._progress.completion = completion
        now = context.clock()
        first_at, until = now + context.first_token_s, now + context.transport.call_limit_s(self.left_s)
        first_s = min(self.left_s, context.first_token_s)
        try:
            async with context.transport.open_post(ROUTES[item.task], body, first_s, traceparent_of([item])) as opened:
                if opened.is_stream:
                    return await self._read_stream(opened, completion, first_at, until)
                # An error, or a server without streams.
                reply = await opened.whole(self.left_s)
                if priority and refuses_priority(reply):
                    raise _PriorityRefused
                if usage and refuses_usage(reply):
                    raise _UsageRefused
                result = self._read(reply)
                if isinstance(result, ItemResult) and not result.error_code:
                    self._emit(0, result.output)
                return result
        except (ResponseAborted, InvalidOutput) as error:
            if completion.length:
                return self._partial(completion, ABORTED)
            if isinstance(error, ReportedError):
                return read_reported(error.document, self._names_sent, time.time())
            if isinstance(error, ResponseAborted):
                return Lost(fault_of(error))
            raise
        except CallTimeout:
            return self._partial(completion, TOO_SLOW)

    async def _read_stream(
        self, opened: OpenResponse, completion: StreamedCompletion, first_at: float, until: float
    ) -> CallResult:
        stream = EventParser(MAX_ANSWER_BYTES)

        def take(part: bytes) -> bool:
            for event in stream.feed(part):
                offset = completion.length
                self._emit(offset, completion.add(event))
                if completion.length > MAX_ANSWER_BYTES:  # As for a whole response.
                    raise InvalidOutput("The model's output is too large.")
                if completion.ended or self._is_left:
                    return True
            return False

        await self._context.sweep.read(opened.content, take, first_at, until)
        if completion.length or completion.over or self._is_left:
            return self._partial(completion, ABORTED)
        return Lost(EndpointFault("The endpoint's stream ended without output.", FaultCause.CLOSED))

    def _partial(self, completion: StreamedCompletion, failure: ItemResult) -> ItemResult:
        """The result of a stream that has ended, or that its client has left; else the failure, with the tokens used until then."""
        result = counted_so_far(completion, self._item, self._context.body_dir)
        if completion.over or self._is_left:
            return result
        return msgspec.structs.replace(failure, tokens_used=result.tokens_used, output_tokens=result.output_tokens)

    def _emit(self, offset: int, text: str) -> None:
        if text and self._item.listener is not None:
            self._progress.has_sent = True
            self._progress.on_output()
            self._item.listener.emit(offset, text)


def failure_of(
    error: CallTimeout | NoResponse | ResponseAborted | InvalidOutput, *, by_input: bool = False
) -> CallResult:
    """The meaning of an error of a call. `by_input`: of an invalid output, see `ItemResult`."""
    if isinstance(error, CallTimeout):
        return TOO_SLOW
    if isinstance(error, InvalidOutput):
        return ItemResult(str(error), 0, ErrorCode.INVALID_OUTPUT, by_input=by_input)
    # A request that the server received may have crashed it, and counts as an attempt.
    reason = fault_of(error)
    return Unreached(reason) if isinstance(error, NoResponse) and not error.sent else Lost(reason)


def _input_tokens(item: Item, body_dir: str) -> int:
    """An estimate of the tokens that the server reads."""
    if item.task not in DOCUMENTS:
        return estimate(len(item.input.encode()))
    try:
        return document_tokens(document_of(item, body_dir))
    except OSError:
        return 0


def counted_so_far(completion: StreamedCompletion, item: Item, body_dir: str) -> ItemResult:
    """The output of a stream so far and its tokens, which are 0 without a text, unless the stream has ended."""
    result = completion.result()
    has_text = bool(result.output)
    if item.task in DOCUMENTS:
        has_text = bool(line_tokens(result.output[:_FIRST_LINES]) or line_tokens(result.output))
    if completion.over or has_text:
        return counted_result(result, completion.uncounted(result.output), item, body_dir)
    return msgspec.structs.replace(result, tokens_used=0, output_tokens=0)


def counted_result(result: ItemResult, later: str, item: Item, body_dir: str) -> ItemResult:
    """The result with an estimate of those of its tokens that the server has not counted. `later`: the output after its count."""
    if item.task is Task.EMBED:
        return (
            result if result.tokens_used else msgspec.structs.replace(result, tokens_used=_input_tokens(item, body_dir))
        )
    written = result.output_tokens
    read = result.tokens_used - written or _input_tokens(item, body_dir)
    written += line_tokens(later) if item.task in DOCUMENTS else estimate(len(later.encode()))
    return msgspec.structs.replace(result, tokens_used=min(read + written, MOST_TOKENS), output_tokens=written)


class _PriorityRefused(Exception):
    """The server no longer accepts a priority."""


class _UsageRefused(Exception):
    """The server does not know the field that asks for the tokens of a stream."""
