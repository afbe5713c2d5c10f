"""What a model reads of each kind of request: texts, conversations in its template, texts to embed; in one batch."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_pool.backends.backend import NO_EMBEDDINGS, InvalidOutput, Item
from gpu_pool.backends.function import FunctionBackend, as_vectors
from gpu_pool.backends.generation import last_turn, named_turns, prompt_of, running_text
from gpu_pool.backends.simulated import SimulatedBackend
from gpu_pool.backends.tiny.backend import TinyBackend
from scheduler.errors import ErrorCode
from scheduler.payload import PromptMessage, Task, encode_messages, read_vector, write_vector

TALK = [PromptMessage("system", "Be brief."), PromptMessage("user", "Hello")]
CHAT = Item(encode_messages(TALK), {}, Task.CHAT)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (named_turns, "system: Be brief.\nuser: Hello\nassistant:"),
        (running_text, "Be brief.\nHello"),
        (last_turn, "Hello"),
    ],
)
def test_a_conversation_is_put_into_the_models_template(template: Any, prompt: str) -> None:
    """Only a conversation is; a text that looks like one is a text."""
    assert prompt_of(CHAT, template) == prompt
    assert prompt_of(Item(CHAT.input), template) == CHAT.input


def test_what_is_no_conversation_is_a_bad_value() -> None:
    """Written by something else than a gateway: the batch is taken apart, and this one fails alone."""
    with pytest.raises(ValueError, match="not a conversation"):
        prompt_of(Item("[1]", {}, Task.CHAT), named_turns)


class Whole:
    """A model that has everything, and tells what it was given."""

    def predict(self, texts: list[str]) -> list[str]:
        return [f"<{text}>" for text in texts]

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), -1.0] for text in texts]

    def chat_template(self, messages: list[dict[str, str]]) -> str:
        return "|".join(message["content"] for message in messages)


def run(target: Any, items: Sequence[Item]) -> list[Any]:
    backend = FunctionBackend("m:f", target)
    backend.load()
    return backend.run(items, lambda: None)


def test_each_kind_runs_by_itself_and_answers_keep_their_places() -> None:
    """Texts, a conversation and texts to embed, mixed: the function is called once for texts and once for vectors."""
    items = [Item("aa", {}, Task.EMBED), Item("x"), CHAT, Item("b", {}, Task.EMBED)]

    first, second, third, fourth = run(Whole, items)

    assert read_vector(first.output) == [2.0, -1.0]
    assert (second.output, third.output) == ("<x>", "<Be brief.|Hello>")
    assert read_vector(fourth.output) == [1.0, -1.0]


def test_a_plain_function_gets_named_turns_and_makes_no_vectors() -> None:
    """As much as any function of texts can do."""
    results = run(lambda texts: [text.upper() for text in texts], [CHAT, Item("a", {}, Task.EMBED)])

    assert results[0].output == "SYSTEM: BE BRIEF.\nUSER: HELLO\nASSISTANT:"
    assert results[1] == NO_EMBEDDINGS


@pytest.mark.parametrize("vectors", [None, [], [[1.0], [2.0]], "ab"])
def test_a_wrong_number_of_vectors_is_no_answer(vectors: Any) -> None:
    """Whose is whose would be a guess."""
    with pytest.raises(InvalidOutput):
        as_vectors(vectors, 1)


@pytest.mark.parametrize("vector", [None, [], "123", b"ab", {1: 2}, ["a"], [1e400], [float("nan")], [1e39], [[1.0]]])
def test_a_vector_that_is_none_fails_alone(vector: Any) -> None:
    """Beside one that is; text, nothing, infinity and what float32 has no room for are no numbers to anybody."""
    good, bad = as_vectors([[1.5], vector], 2)

    assert (good.output, good.error_code) == (write_vector([1.5]), "")
    assert bad.error_code == ErrorCode.INVALID_OUTPUT


def test_the_simulated_model_answers_the_last_turn() -> None:
    """Reversed, as everything; it has no vectors."""
    talk, vector = SimulatedBackend(0.0).run([CHAT, Item("a", {}, Task.EMBED)], lambda: None)

    assert (talk.output, talk.tokens_used) == ("olleH", 1)
    assert vector == NO_EMBEDDINGS


@pytest.fixture(scope="module")
def tiny() -> TinyBackend:
    """The shipped model."""
    backend = TinyBackend("cpu", 1)
    backend.load()
    return backend


def test_tiny_embeds_each_text_alike_in_any_company(tiny: TinyBackend) -> None:
    """Vectors of length one that padding does not touch; a token is a byte; more than the context holds is read, too."""
    texts = ["The cat sat.", "", "é" * 700]

    alone = [read_vector(tiny.run([Item(text, {}, Task.EMBED)], lambda: None)[0].output) for text in texts]
    results = tiny.run([Item(text, {}, Task.EMBED) for text in texts], lambda: None)

    assert [result.tokens_used for result in results] == [12, 0, 1400]
    for one, result in zip(alone, results, strict=True):
        together = read_vector(result.output)
        assert len(together) == 192
        assert math.hypot(*together) == pytest.approx(1.0, abs=1e-5)
        assert together == pytest.approx(one, abs=1e-4)


def test_tiny_goes_on_from_a_conversation(tiny: TinyBackend) -> None:
    """It continues what was said."""
    talk, text = tiny.run(
        [
            Item(CHAT.input, {"max_tokens": 8}, Task.CHAT),
            Item("Be brief.\nHello", {"max_tokens": 8}),
        ],
        lambda: None,
    )

    assert talk == text
    assert talk.output_tokens <= 8
