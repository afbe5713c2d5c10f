"""Request bodies for an endpoint and results from its responses, streamed ones included. No I/O.

Bodies are in OpenAI's format; responses are counted, put in order, and their tokens divided among the items of a call.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from scheduler.body_store import StoredChat, is_reference
from scheduler.chat_document import (
    DOCUMENT,
    PRIORITY,
    ROLES,
    ServerUsage,
    output_line,
    read_head,
    read_members,
)
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.payload import DOCUMENTS, Task, decode_messages, write_vector

ROUTES = {
    Task.COMPLETE: "/completions",
    Task.CHAT: "/chat/completions",
    Task.EMBED: "/embeddings",
    Task.CHAT_DOCUMENT: "/chat/completions",
    Task.COMPLETION_DOCUMENT: "/completions",
}

PARAMETERS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    }
)
"""Sampling parameters that clients may set. Never `n`, `stream`, `priority` or `model`."""

_encode = msgspec.json.encode


def rejected_early(item: Item) -> ItemResult | None:
    """The error for an item that must not be sent, for the client; else None."""
    if item.task in DOCUMENTS or item.task is Task.EMBED:
        return None  # The gateway has checked the fields.
    unknown = sorted(item.parameters.keys() - PARAMETERS)
    if unknown:
        return ItemResult(f"parameters.{unknown[0]} is not known to this model.", 0, ErrorCode.INVALID_REQUEST)
    if item.task is Task.CHAT:
        try:
            decode_messages(item.input)
        except ValueError:
            return ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)
    return None


class Body(NamedTuple):
    """The body of a call: its beginning, and a stored chat without its first brace."""

    begin: bytes
    chat: StoredChat | None = None

    @property
    def size(self) -> int:
        """Its Content-Length."""
        return len(self.begin) + (self.chat.size - 1 if self.chat is not None else 0)


class MissingBody(TierlaneError):
    """The chat is not on this host."""


def body_of(
    model: str,
    items: Sequence[Item],
    body_dir: str = "",
    *,
    stream: bool = False,
    usage: bool = True,
    priority: bool = False,
) -> Body:
    """The body of the call for these items, in parts. Raises MissingBody.

    `usage`: a stream ends with its tokens; `priority`: the server accepts the tier's, 1 first.
    """
    first = items[0]
    if first.task is Task.EMBED:
        return Body(_encode({"model": model, "input": _inputs(items), "encoding_format": "float", **first.parameters}))
    sent: Mapping[str, Any] = first.parameters
    if first.task is Task.COMPLETION_DOCUMENT:
        sent = read_members(first.input)
    elif first.task is Task.CHAT_DOCUMENT:
        sent = {name: value for name, value in sent.items() if name == PRIORITY}
    body: dict[str, Any] = {"model": model, **sent}
    if priority and first.priority:
        body["priority"] = first.priority
    if first.task is Task.CHAT:
        body["messages"] = [
            {"role": ROLES.get(each.role, each.role), "content": each.content} for each in decode_messages(first.input)
        ]
    elif first.task not in DOCUMENTS:
        body["prompt"] = _inputs(items)
    if stream:
        body["stream"] = True
        body |= {"stream_options": {"include_usage": True}} if usage else {}
    encoded = _encode(body)
    if first.task is not Task.CHAT_DOCUMENT:
        return Body(encoded)
    # The chat is not parsed: the gateway has removed the fields that are sent with it.
    encoded = encoded[:-1] + b","
    if not is_reference(first.input):
        return Body(encoded + first.input[1:].encode())
    try:
        return Body(encoded, StoredChat(body_dir, first.input))
    except OSError:
        raise MissingBody from None


_PLAIN = PARAMETERS | {"messages", "prompt", "max_completion_tokens"}


def is_unusual(item: Item) -> bool:
    """Whether a request that is passed on has more than texts and sampling parameters, so that only it may fail."""
    if item.task not in DOCUMENTS:
        return False
    try:
        members = read_members(item.input)
        if "messages" in members:
            decode_messages(bytes(members["messages"]).decode())
    except ValueError:
        return True
    return not members.keys() <= _PLAIN


def traceparent_of(items: Sequence[Item]) -> str:
    """The `traceparent` of a call for these items: that of the first sampled one; "" if there is none."""
    return next((item.trace.traceparent() for item in items if item.trace is not None), "")


def _inputs(items: Sequence[Item]) -> str | list[str]:
    return items[0].input if len(items) == 1 else [item.input for item in items]


MISSING_BODY = ItemResult(
    "The body of this request is not on the worker's host: set TIERLANE_BODY_DIR of gateways and workers alike.",
    0,
    ErrorCode.NO_CAPACITY,
)
NO_VECTOR = ItemResult("The model's vector is not a list of numbers.", 0, ErrorCode.INVALID_OUTPUT)


class EndpointMessage(msgspec.Struct, gc=False):
    """A message of a chat model."""

    content: str | None = None


class EndpointChoice(msgspec.Struct, gc=False):
    """One text of `/completions`, or one message of `/chat/completions`."""

    index: int = 0
    text: str | None = None
    message: EndpointMessage | None = None
    finish_reason: str | None = None


class Texts(msgspec.Struct, gc=False):
    """The response of both."""

    choices: list[EndpointChoice]
    usage: ServerUsage | None = None


class Vector(msgspec.Struct, gc=False):
    """One vector of `/embeddings`."""

    embedding: list[float]
    index: int = 0


class Vectors(msgspec.Struct, gc=False):
    """The response of `/embeddings`."""

    data: list[Vector]
    usage: ServerUsage | None = None


_texts = msgspec.json.Decoder(Texts)
_vectors = msgspec.json.Decoder(Vectors)


def read_answer(body: bytes, items: Sequence[Item]) -> list[ItemResult]:
    """One result for each item of the call. Raises InvalidOutput for junk, and for a wrong number of results."""
    try:
        if items[0].task is Task.EMBED:
            return _read_vectors(_vectors.decode(body), items)
        if items[0].task in DOCUMENTS:
            return [_read_document(body, items[0].task)]
        return _read_texts(_texts.decode(body), items)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise InvalidOutput("The model's response cannot be read.") from None


def finish(reason: str | None) -> str:
    """OpenAI's finish reason: servers have many names for a natural end."""
    return "length" if reason == "length" else "stop"


MOST_TOKENS = 2**30 - 1  # Twice as many fit into a column of the audit.


def counted(usage: ServerUsage | None) -> tuple[int, int]:
    """Tokens (input, output), 0 if unknown."""
    if usage is None:
        return 0, 0
    return _within(usage.prompt_tokens), _within(usage.completion_tokens)


def _within(tokens: int | None) -> int:
    """A number that can be stored, whatever the server counted."""
    return min(max(0, tokens or 0), MOST_TOKENS)


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into whole parts by weight: each cut is at the running sum."""
    whole, passed, cut, parts = max(1, sum(weights)), 0, 0, []
    for weight in weights:
        passed += weight
        now = total * passed // whole
        parts.append(now - cut)
        cut = now
    if parts:
        parts[-1] += total - cut
    return parts


def _read_texts(answer: Texts, items: Sequence[Item]) -> list[ItemResult]:
    choices = _in_order(answer.choices, len(items))
    texts = [_text(choice) for choice in choices]
    read, written = counted(answer.usage)
    tokens_in = shares(read, [len(item.input) + 1 for item in items])
    tokens_out = shares(written, [len(text) + 1 for text in texts])
    rows = zip(texts, choices, tokens_in, tokens_out, strict=True)
    return [ItemResult(text, i + o, "", o, finish(choice.finish_reason)) for text, choice, i, o in rows]


def _read_document(body: bytes, task: Task) -> ItemResult:
    head = read_head(body)
    if head.error or not head.choices or not (head.whole if task is Task.CHAT_DOCUMENT else head.texts):
        raise InvalidOutput("The model's response holds no output.")
    read, written = counted(head.usage)
    return ItemResult(output_line(body), read + written, "", written, DOCUMENT)


def _read_vectors(answer: Vectors, items: Sequence[Item]) -> list[ItemResult]:
    vectors = _in_order(answer.data, len(items))
    tokens = shares(counted(answer.usage)[0], [len(item.input) + 1 for item in items])
    return [_vector(vector.embedding, count) for vector, count in zip(vectors, tokens, strict=True)]


def _vector(values: list[float], tokens: int) -> ItemResult:
    try:
        return ItemResult(write_vector(values), tokens)
    except (ValueError, OverflowError):
        return NO_VECTOR


def _text(choice: EndpointChoice) -> str:
    text = choice.message.content if choice.message is not None else choice.text
    if text is None:
        raise InvalidOutput("The model's response holds no text.")
    return text


def _in_order(found: list[EndpointChoice] | list[Vector], expected: int) -> list:  # type: ignore[type-arg]
    if sorted(each.index for each in found) != list(range(expected)):
        raise InvalidOutput(f"The model returned {len(found)} results for {expected} inputs, or wrong indexes.")
    return sorted(found, key=lambda each: each.index)


MAX_EVENT_BYTES = 4 << 20
END = b"[DONE]"


class StreamFault(InvalidOutput):
    """The server reported an error inside its response."""


class StreamedPiece(msgspec.Struct, gc=False):
    """Text added to a completion or message."""

    text: str | None = None
    delta: EndpointMessage | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event's data. The one with the tokens has no choices."""

    choices: list[StreamedPiece] = []
    usage: ServerUsage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(Chunk)


class EventLines:
    """Parses server-sent events from parts of any size. Comments and other fields are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now. Raises InvalidOutput for one that is too large."""
        usual = data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2  # One event.
        if usual and not (self._rest or self._data) and data.find(b"\n") == len(data) - 2:
            return [data[6:-2]]
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise InvalidOutput("The model's stream holds an event without an end.")
        events = []
        for line in (each.removesuffix(b"\r") for each in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class StreamedCompletion:
    """The streamed output so far. `over`: the server has sent a finish reason or the end mark."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reason: str | None = None
        self._usage: ServerUsage | None = None
        self.length = 0
        """Characters so far."""
        self.ended = False
        """Nothing more will come, not even tokens."""

    @property
    def over(self) -> bool:
        return self.ended or self._reason is not None

    def add(self, data: bytes) -> str:
        """The text that the event adds, possibly "". Raises InvalidOutput for junk, StreamFault for the server's error."""
        if data == END:
            self.ended = True
            return ""
        chunk = _read(data)
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return ""
        piece = chunk.choices[0]
        self._reason = piece.finish_reason or self._reason
        text = (piece.delta.content if piece.delta is not None else piece.text) or ""
        self._texts.append(text)
        self.length += len(text)
        return text

    def result(self) -> ItemResult:
        """The output so far."""
        read, written = counted(self._usage)
        return ItemResult("".join(self._texts), read + written, "", written, finish(self._reason))


class StreamedDocument(StreamedCompletion):
    """The lines of a request that is passed on whole: one for each event that has choices or tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()  # Choices without a finish reason.

    @property
    def over(self) -> bool:
        return self.ended or (self._reason is not None and not self._open)

    def add(self, data: bytes) -> str:
        """As above; the text is a line."""
        if data == END:
            self.ended = True
            return ""
        try:
            head, line = read_head(data), output_line(data)
        except ValueError:
            raise InvalidOutput("The model's stream cannot be read.") from None
        if head.error:
            raise StreamFault("The model failed while it was streaming.")
        self._usage = head.usage or self._usage
        for choice in head.choices:
            if choice.finish_reason is None:
                self._open.add(choice.index)
            else:
                self._open.discard(choice.index)
                self._reason = choice.finish_reason or self._reason
        if not head.choices and head.usage is None:
            return ""
        self._texts.append(line)
        self.length += len(line)
        return line

    def result(self) -> ItemResult:
        """The lines so far."""
        read, written = counted(self._usage)
        return ItemResult("".join(self._texts), read + written, "", written, DOCUMENT)


def _read(data: bytes) -> Chunk:
    try:
        chunk = _chunk.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidOutput("The model's stream cannot be read.") from None
    if chunk.error:
        raise StreamFault("The model failed while it was streaming.")
    return chunk
