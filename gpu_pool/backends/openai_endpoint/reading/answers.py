"""Results of whole responses of an endpoint: put in order, and their tokens divided among the items of a call. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from gpu_pool.backends.openai_endpoint.reading.tolerant import TolerantReader, has_escaped_halves
from scheduler.chat_document import DOCUMENT, LineHead, ServerUsage, line_of, output_line, read_head, text_of
from scheduler.errors import ErrorCode
from scheduler.payload import DOCUMENTS, Task
from scheduler.vectors import write_vector

NO_VECTOR = ItemResult("The model's vector is not a list of numbers.", 0, ErrorCode.INVALID_OUTPUT)
MOST_TOKENS = 2**30 - 1
"""Of one request, as in ratelimit/lua/metered.lua: the audit has no more than is charged."""


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


class ReportedError(InvalidOutput):
    """The server reported an error in a response of status 200. `document`: as it sent it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__("The model failed while it responded.")
        self.document = document


def read_answer(body: bytes, items: Sequence[Item]) -> list[ItemResult]:
    """One result for each item of the call. Raises InvalidOutput for junk, and for a wrong number of results."""
    task = items[0].task
    try:
        if task is Task.EMBED:
            return _read_vectors(_vectors.decode(body), items)
        if task in DOCUMENTS and not has_escaped_halves(body):
            head = read_head(body)
            if head.choices:
                return [_document(head, output_line(body), task)]
        elif task not in DOCUMENTS:
            return _read_texts(_texts.decode(body), items)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        pass
    return _read_unusual(body, items)


def _read_unusual(body: bytes, items: Sequence[Item]) -> list[ItemResult]:
    """The results of a response that is an error, or differs from OpenAI's format."""
    document = TolerantReader().read(body)
    if document is None:
        raise InvalidOutput("The model's response cannot be read.")
    if not document["choices"] and (document.get("error") or document.get("object") == "error"):
        raise ReportedError(document)
    try:
        if items[0].task is Task.EMBED:
            return _read_vectors(msgspec.convert(document, Vectors), items)
        if items[0].task in DOCUMENTS:
            return [_document(msgspec.convert(document, LineHead), line_of(document), items[0].task)]
        for choice in document["choices"]:
            if isinstance(choice.get("message"), dict):
                choice["message"]["content"] = text_of(choice["message"].get("content"))
        return _read_texts(msgspec.convert(document, Texts), items)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise InvalidOutput("The model's response cannot be read.") from None


def finish(reason: str | None) -> str:
    """OpenAI's finish reason: servers have many names for a natural end."""
    return "length" if reason == "length" else "stop"


def counted(usage: ServerUsage | None) -> tuple[int, int]:
    """Tokens (input, output), 0 if unknown."""
    if usage is None:
        return 0, 0
    read = _within(usage.prompt_tokens, MOST_TOKENS)
    return read, _within(usage.completion_tokens, MOST_TOKENS - read)


def _within(tokens: int | None, most: int) -> int:
    """A number that can be stored and charged, whatever the server counted."""
    return min(max(0, tokens or 0), most)


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
    texts: list[str] = []
    for choice in choices:
        text = choice.message.content if choice.message is not None else choice.text
        if text is None:
            raise InvalidOutput("The model's response holds no text.")
        texts.append(text)
    read, written = counted(answer.usage)
    tokens_in = shares(read, [len(item.input) + 1 for item in items])
    tokens_out = shares(written, [len(text) + 1 for text in texts])
    rows = zip(texts, choices, tokens_in, tokens_out, strict=True)
    return [ItemResult(text, i + o, "", o, finish(choice.finish_reason)) for text, choice, i, o in rows]


def _document(head: LineHead, line: str, task: Task) -> ItemResult:
    if not head.choices or not (head.whole if task is Task.CHAT_DOCUMENT else head.texts):
        raise InvalidOutput("The model's response holds no output.")
    read, written = counted(head.usage)
    return ItemResult(line, read + written, "", written, DOCUMENT)


def _read_vectors(answer: Vectors, items: Sequence[Item]) -> list[ItemResult]:
    vectors = _in_order(answer.data, len(items))
    tokens = shares(counted(answer.usage)[0], [len(item.input) + 1 for item in items])
    results: list[ItemResult] = []
    for vector, count in zip(vectors, tokens, strict=True):
        try:
            results.append(ItemResult(write_vector(vector.embedding), count))
        except (ValueError, OverflowError):
            results.append(NO_VECTOR)
    return results


def _in_order(found: list[EndpointChoice] | list[Vector], expected: int) -> list:  # type: ignore[type-arg]
    if sorted(each.index for each in found) != list(range(expected)):
        raise InvalidOutput(f"The model returned {len(found)} results for {expected} inputs, or wrong indexes.")
    return sorted(found, key=lambda each: each.index)
