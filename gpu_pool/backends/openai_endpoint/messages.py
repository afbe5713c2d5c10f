"""Bodies for an endpoint and results from its answers, streamed ones included. Pure.

Bodies are in OpenAI's form; answers are counted, put in order, and their tokens shared out among the items of one call.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from scheduler.errors import ErrorCode
from scheduler.payload import Task, decode_messages, write_vector

ROUTES = {Task.COMPLETE: "/completions", Task.CHAT: "/chat/completions", Task.EMBED: "/embeddings"}

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
"""What callers may say of how text is made. Never `n`, `stream`, `priority` or `model`, which are not theirs to choose."""

_ROLES = {"developer": "system"}  # OpenAI's newer name, which the templates of open models do not know.


def refused_early(item: Item) -> ItemResult | None:
    """The end of an item that must not be sent, as the caller may read it; else None."""
    unknown = sorted(item.parameters.keys() - PARAMETERS)
    if unknown:
        return ItemResult(f"parameters.{unknown[0]} is not known to this model.", 0, ErrorCode.INVALID_REQUEST)
    if item.task is Task.CHAT:
        try:
            decode_messages(item.input)
        except ValueError:
            return ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)
    return None


def together(items: Sequence[Item], places: Iterable[int], *, lists: bool, tiers: bool = False) -> list[list[int]]:
    """The places of `items` that may share a call: texts with equal parameters, and all that is embedded.

    A conversation, and what somebody reads along, has a call to itself; so has everything without `lists`. `tiers`: tiers share none.
    """
    groups: dict[bytes, list[int]] = {}
    for place in places:
        item = items[place]
        alone = not lists or item.task is Task.CHAT or item.listener is not None
        groups.setdefault(b"%d" % place if alone else _kind(item, tiers=tiers), []).append(place)
    return list(groups.values())


def body_of(
    model: str, items: Sequence[Item], *, stream: bool = False, usage: bool = True, priority: bool = False
) -> dict[str, Any]:
    """One call for these items, which `together` has put together.

    `usage`: a stream is to end with its tokens; `priority`: the server takes the tier's, 1 first.
    """
    first = items[0]
    if first.task is Task.EMBED:
        return {"model": model, "input": _inputs(items), "encoding_format": "float"}
    body: dict[str, Any] = {"model": model, **first.parameters}
    if priority and first.priority:
        body["priority"] = first.priority
    if first.task is Task.CHAT:
        body["messages"] = [
            {"role": _ROLES.get(each.role, each.role), "content": each.content} for each in decode_messages(first.input)
        ]
    else:
        body["prompt"] = _inputs(items)
    if stream:
        body["stream"] = True
        body |= {"stream_options": {"include_usage": True}} if usage else {}
    return body


def traceparent_of(items: Sequence[Item]) -> str:
    """The `traceparent` of a call for these items: that of the first which is sampled; "" where none is."""
    return next((item.trace.traceparent() for item in items if item.trace is not None), "")


def _inputs(items: Sequence[Item]) -> str | list[str]:
    return items[0].input if len(items) == 1 else [item.input for item in items]


def _kind(item: Item, *, tiers: bool) -> bytes:
    if item.task is Task.EMBED:
        return b"embed"
    return b"text %d " % (item.priority if tiers else 0) + msgspec.json.encode(item.parameters, order="sorted")


NO_VECTOR = ItemResult("The model's vector is not a list of numbers.", 0, ErrorCode.INVALID_OUTPUT)


class EndpointUsage(msgspec.Struct, gc=False):
    """Tokens of a call. Servers that count none say nothing, or null."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class EndpointMessage(msgspec.Struct, gc=False):
    """What a chat model said."""

    content: str | None = None


class EndpointChoice(msgspec.Struct, gc=False):
    """One text of `/completions`, or one message of `/chat/completions`."""

    index: int = 0
    text: str | None = None
    message: EndpointMessage | None = None
    finish_reason: str | None = None


class Texts(msgspec.Struct, gc=False):
    """The answer of both."""

    choices: list[EndpointChoice]
    usage: EndpointUsage | None = None


class Vector(msgspec.Struct, gc=False):
    """One vector of `/embeddings`."""

    embedding: list[float]
    index: int = 0


class Vectors(msgspec.Struct, gc=False):
    """The answer of `/embeddings`."""

    data: list[Vector]
    usage: EndpointUsage | None = None


_texts = msgspec.json.Decoder(Texts)
_vectors = msgspec.json.Decoder(Vectors)


def read_answer(body: bytes, items: Sequence[Item]) -> list[ItemResult]:
    """One result for each item of the call. Raises InvalidOutput for junk, and for a wrong number of answers."""
    try:
        if items[0].task is Task.EMBED:
            return _read_vectors(_vectors.decode(body), items)
        return _read_texts(_texts.decode(body), items)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidOutput("The model's answer cannot be read.") from None


def finish(reason: str | None) -> str:
    """OpenAI's word for why a text ends: servers have many for an end of the model's own."""
    return "length" if reason == "length" else "stop"


def counted(usage: EndpointUsage | None) -> tuple[int, int]:
    """Tokens (read, written), 0 where nobody counted."""
    if usage is None:
        return 0, 0
    return max(0, usage.prompt_tokens or 0), max(0, usage.completion_tokens or 0)


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts by weight, none lost: each cut is where the running sum has it."""
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
    choices = _ordered(answer.choices, len(items))
    texts = [_text(choice) for choice in choices]
    read, written = counted(answer.usage)
    tokens_in = shares(read, [len(item.input) + 1 for item in items])
    tokens_out = shares(written, [len(text) + 1 for text in texts])
    rows = zip(texts, choices, tokens_in, tokens_out, strict=True)
    return [ItemResult(text, i + o, "", o, finish(choice.finish_reason)) for text, choice, i, o in rows]


def _read_vectors(answer: Vectors, items: Sequence[Item]) -> list[ItemResult]:
    vectors = _ordered(answer.data, len(items))
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
        raise InvalidOutput("The model's answer holds no text.")
    return text


def _ordered(found: list[EndpointChoice] | list[Vector], expected: int) -> list:  # type: ignore[type-arg]
    if sorted(each.index for each in found) != list(range(expected)):
        raise InvalidOutput(f"The model returned {len(found)} answers for {expected} inputs, or numbered them wrongly.")
    return sorted(found, key=lambda each: each.index)


MAX_EVENT_BYTES = 4 << 20
END = b"[DONE]"


class StreamFault(InvalidOutput):
    """The server told of an error in the middle of its answer."""


class StreamedPiece(msgspec.Struct, gc=False):
    """What is added to a text, or to a message."""

    text: str | None = None
    delta: EndpointMessage | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event's data. The one with the tokens has no choices."""

    choices: list[StreamedPiece] = []
    usage: EndpointUsage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(Chunk)


class EventLines:
    """Data of events, as their bytes come in whatever parts. Comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole now. Raises InvalidOutput for one that does not end."""
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
    """The answer so far. `over`: the server has said that this is all."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reason: str | None = None
        self._usage: EndpointUsage | None = None
        self.length = 0
        """Characters so far."""
        self.ended = False
        """Nothing more will come, not even tokens."""

    @property
    def over(self) -> bool:
        return self.ended or self._reason is not None

    def add(self, data: bytes) -> str:
        """What the event adds, possibly nothing. Raises InvalidOutput for junk, StreamFault for the server's error."""
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
        """As far as it has come."""
        read, written = counted(self._usage)
        return ItemResult("".join(self._texts), read + written, "", written, finish(self._reason))


def _read(data: bytes) -> Chunk:
    try:
        chunk = _chunk.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidOutput("The model's stream cannot be read.") from None
    if chunk.error:
        raise StreamFault("The model failed in the middle of its answer.")
    return chunk
