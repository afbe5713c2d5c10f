"""What an endpoint answered, as results: counted, put in order, tokens shared out among those of one call. Pure."""

from collections.abc import Sequence

import msgspec

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult
from scheduler.errors import ErrorCode
from scheduler.payload import Task
from scheduler.vectors import write_vector

NO_VECTOR = ItemResult("The model's vector is not a list of numbers.", 0, ErrorCode.INVALID_OUTPUT)


class Usage(msgspec.Struct, gc=False):
    """Tokens of a call. Servers that count none say nothing, or null."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Message(msgspec.Struct, gc=False):
    """What a chat model said."""

    content: str | None = None


class Choice(msgspec.Struct, gc=False):
    """One text of `/completions`, or one message of `/chat/completions`."""

    index: int = 0
    text: str | None = None
    message: Message | None = None
    finish_reason: str | None = None


class Texts(msgspec.Struct, gc=False):
    """The answer of both."""

    choices: list[Choice]
    usage: Usage | None = None


class Vector(msgspec.Struct, gc=False):
    """One vector of `/embeddings`."""

    embedding: list[float]
    index: int = 0


class Vectors(msgspec.Struct, gc=False):
    """The answer of `/embeddings`."""

    data: list[Vector]
    usage: Usage | None = None


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


def counted(usage: Usage | None) -> tuple[int, int]:
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


def _text(choice: Choice) -> str:
    text = choice.message.content if choice.message is not None else choice.text
    if text is None:
        raise InvalidOutput("The model's answer holds no text.")
    return text


def _ordered(found: list[Choice] | list[Vector], expected: int) -> list:  # type: ignore[type-arg]
    if sorted(each.index for each in found) != list(range(expected)):
        raise InvalidOutput(f"The model returned {len(found)} answers for {expected} inputs, or numbered them wrongly.")
    return sorted(found, key=lambda each: each.index)
