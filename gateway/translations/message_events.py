"""Responses of `/v1/messages`: content blocks from generated text, or from the lines of a model's server, and their events.

A whole response and a stream have the same content, since both are built by `MessageContent`.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest, usage
from gateway.api.stream_chunks import Chunks
from gateway.http.response import HttpResponse, encode_json
from gateway.translations.chat_changes import CallChange, ChangeReader
from gateway.translations.message_body import TextBlock, ThinkingBlock, ToolUseBlock
from scheduler.chat_document import DOCUMENT, CompletionDetails, PromptDetails, ServerUsage
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply

ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
STOP_REASONS: dict[str, StopReason] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""The finish reason of a chat -> Anthropic's, for others `end_turn`."""

UNREADABLE = "INVALID_JSON"
"""The member of a tool's input with the text of arguments that are not a JSON object, as Anthropic recommends it."""

_input = msgspec.json.Decoder(dict[str, Any])

MAX_HELD_CALLS, MAX_HELD_BYTES = 128, 65_536
"""Calls of a message whose name has not arrived, and the characters of their arguments."""


class ThinkingTokens(msgspec.Struct, gc=False):
    """The part of the output tokens that were reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, gc=False):
    """Tokens. Those that were read from the cache of a model's server are not in `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageEnd(msgspec.Struct, gc=False):
    """Why the message ends. `stop_sequence`: the text, if the model's server reports it."""

    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class Message(msgspec.Struct, gc=False):
    """The response body. `id` is the id of the request."""

    id: str
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageStart(msgspec.Struct, gc=False, tag_field="type", tag="message_start"):
    """The message without content. Its tokens are not known yet."""

    message: Message


class Ping(msgspec.Struct, gc=False, tag_field="type", tag="ping"):
    """No content."""


class BlockStart(msgspec.Struct, gc=False, tag_field="type", tag="content_block_start"):
    """A new block, without its content."""

    index: int
    content_block: ContentBlock


class AddedText(msgspec.Struct, gc=False, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class AddedThinking(msgspec.Struct, gc=False, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class AddedInput(msgspec.Struct, gc=False, tag_field="type", tag="input_json_delta"):
    """More of the JSON of a tool's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, gc=False, tag_field="type", tag="content_block_delta"):
    """More content of a block."""

    index: int
    delta: AddedText | AddedThinking | AddedInput


class BlockStop(msgspec.Struct, gc=False, tag_field="type", tag="content_block_stop"):
    """The end of a block."""

    index: int


class MessageDelta(msgspec.Struct, gc=False, tag_field="type", tag="message_delta"):
    """The reason of the end, and all tokens."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, gc=False, tag_field="type", tag="message_stop"):
    """The end of the stream."""


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | Ping | BlockEvent | MessageDelta | MessageStop


class MessageContent:
    """The content of a message, and the events that add to it. `stop_sequences`: those of the request."""

    def __init__(self, stop_sequences: list[str]) -> None:
        self._reader = ChangeReader(stop_sequences)
        self._blocks: list[tuple[ContentBlock, list[str]]] = []
        self._calls: dict[int, int] = {}  # The server's index of a tool call -> that of its block.
        self._held: dict[int, CallChange] = {}  # By the server's index: a block begins with the name of its tool.
        self._held_size = 0
        self._rest = ""
        self._unreadable = False  # Raised at the end: an error amid a stream would lose what follows it.

    def add_lines(self, text: str) -> Iterator[BlockEvent]:
        """Add lines of a model's server; the last one may be incomplete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, lines):
            try:
                changes = self._reader.changes(line)
            except ValueError:
                self._unreadable = True
                continue
            for change in changes:
                if isinstance(change, CallChange):
                    yield from self._add_call(change)
                else:
                    yield from self._add(ThinkingBlock if change.kind == "reasoning" else TextBlock, change.text)

    def add_text(self, text: str) -> Iterator[BlockEvent]:
        """Add generated text."""
        return self._add(TextBlock, text)

    def close(self) -> Iterator[BlockEvent]:
        """The calls whose name never arrived, and the end of the last block."""
        for number in tuple(self._held):
            yield from self._start_call(self._held.pop(number))
        yield from self._end_block()

    def _end_block(self) -> Iterator[BlockEvent]:
        if self._blocks:
            yield BlockStop(len(self._blocks) - 1)

    def blocks(self) -> list[ContentBlock]:
        """All blocks, with their content."""
        blocks: list[ContentBlock] = []
        for block, parts in self._blocks:
            content = "".join(parts)
            if isinstance(block, ToolUseBlock):
                try:
                    found = _input.decode(content or "{}")
                except (msgspec.MsgspecError, RecursionError):
                    found = {UNREADABLE: content}
                blocks.append(ToolUseBlock(block.id, block.name, found))
            else:
                blocks.append(type(block)(content))
        return blocks

    def end(self, reply: Reply) -> MessageEnd:
        """Why the message ended; call `close` first. Some servers report a natural end for a required tool call.

        Raises RequestError `invalid_output` if a line could not be read.
        """
        if self._unreadable:
            raise RequestError(ErrorCode.INVALID_OUTPUT)
        if self._reader.stop_sequence is not None:
            return MessageEnd("stop_sequence", self._reader.stop_sequence)
        reason = self._reader.finish_reason if reply.finish_reason == DOCUMENT else reply.finish_reason
        found = STOP_REASONS.get(reason or "", "end_turn")
        return MessageEnd("tool_use" if self._calls and found == "end_turn" else found)

    def usage(self, reply: Reply) -> MessageUsage:
        """The tokens that the model's server reports, else those that were counted.

        Raises RequestError `invalid_output` if the server's cannot be read.
        """
        try:
            tokens = msgspec.convert(self._reader.usage or {}, ServerUsage)
        except msgspec.ValidationError:
            raise RequestError(ErrorCode.INVALID_OUTPUT) from None
        if tokens.prompt_tokens is None or tokens.completion_tokens is None:
            counted = usage([reply])
            return MessageUsage(counted.prompt_tokens, counted.completion_tokens)
        cached = (tokens.prompt_tokens_details or PromptDetails()).cached_tokens
        reasoned = (tokens.completion_tokens_details or CompletionDetails()).reasoning_tokens
        return MessageUsage(
            max(0, tokens.prompt_tokens - (cached or 0)),
            tokens.completion_tokens,
            UNSET if cached is None else cached,
            UNSET if reasoned is None else ThinkingTokens(reasoned),
        )

    def _add(self, kind: type[TextBlock | ThinkingBlock], text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if not self._blocks or not isinstance(self._blocks[-1][0], kind):
            yield from self._start(kind(""))
        self._blocks[-1][1].append(text)
        yield BlockDelta(len(self._blocks) - 1, AddedText(text) if kind is TextBlock else AddedThinking(text))

    def _add_call(self, call: CallChange) -> Iterator[BlockEvent]:
        if call.number in self._calls:
            yield from self._add_arguments(call)
            return
        added = len(call.arguments)
        if held := self._held.pop(call.number, None):
            call = CallChange(call.number, held.id or call.id, call.name, held.arguments + call.arguments)
        if call.name:
            yield from self._start_call(call)
            return
        self._held_size += added
        if len(self._held) < MAX_HELD_CALLS and self._held_size <= MAX_HELD_BYTES:
            self._held[call.number] = call
        else:
            self._unreadable = True

    def _start_call(self, call: CallChange) -> Iterator[BlockEvent]:
        self._calls[call.number] = len(self._blocks)
        yield from self._start(ToolUseBlock(call.id or f"call_{call.number}", call.name, {}))
        yield from self._add_arguments(call)

    def _add_arguments(self, call: CallChange) -> Iterator[BlockEvent]:
        if call.arguments:
            at = self._calls[call.number]
            self._blocks[at][1].append(call.arguments)
            yield BlockDelta(at, AddedInput(call.arguments))

    def _start(self, block: ContentBlock) -> Iterator[BlockEvent]:
        yield from self._end_block()
        self._blocks.append((block, []))
        yield BlockStart(len(self._blocks) - 1, block)


def stop_sequences_of(request: InferenceRequest) -> list[str]:
    """The stop sequences of a request."""
    return list(request.parameters.get("stop") or ())


def message_of(reply: Reply, request: InferenceRequest, model: str) -> Message:
    """The whole message of a completed reply. Raises RequestError if the server's output cannot be read."""
    content = MessageContent(stop_sequences_of(request))
    for _ in content.add_lines(reply.output) if reply.finish_reason == DOCUMENT else content.add_text(reply.output):
        pass
    for _ in content.close():
        pass
    end = content.end(reply)
    return Message(reply.id, model, content.blocks(), content.usage(reply), end.stop_reason, end.stop_sequence)


class MessageChunks(Chunks):
    """The stream of `/v1/messages`."""

    END = b""  # The event `message_stop` is the end.

    def __init__(self, request_id: str, model: str, request: InferenceRequest, passed_on: bool) -> None:  # noqa: FBT001
        super().__init__(request_id, model, request)
        self._passed_on = passed_on
        self._content = MessageContent(stop_sequences_of(request))

    def opening(self) -> bytes:
        """The message without content."""
        return named_event(MessageStart(Message(self._id, self._model, [], MessageUsage(0, 0)))) + named_event(Ping())

    def delta(self, text: str) -> bytes:
        """More text, or more lines of a model's server."""
        added = self._content.add_lines(text) if self._passed_on else self._content.add_text(text)
        return b"".join(map(named_event, added))

    def closing(self, reply: Reply) -> bytes:
        """The end of the last block, the reason of the end, and the usage."""
        ends = tuple(self._content.close())
        delta = MessageDelta(self._content.end(reply), self._content.usage(reply))
        return b"".join(map(named_event, (*ends, delta, MessageStop())))

    def failure(self, response: HttpResponse) -> bytes:
        """The error as an event."""
        return b"event: error\ndata: " + response.body + b"\n\n"


def named_event(content: MessageEvent) -> bytes:
    """One event, whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (str(content.__struct_config__.tag).encode(), encode_json(content))
