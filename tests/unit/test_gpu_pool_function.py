"""Function backends: accepted targets, lifecycle, step-by-step output, and validation of what the function returns."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from gpu_pool.backends.backend import NO_EMBEDDINGS, InvalidOutput, Item, ItemResult, Unwell
from gpu_pool.backends.function import FunctionBackend, as_vectors
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from scheduler.vectors import read_vector, write_vector

CHAT = Item(encode_messages([PromptMessage("system", "Be brief."), PromptMessage("user", "Hello")]), {}, Task.CHAT)


class Text(str):
    """A subclass of str, as numpy's."""

    __slots__ = ()


class Model:
    """A class with everything that a backend class may have."""

    version = "model-3"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self) -> None:
        self.calls.append("load")

    async def warmup(self) -> None:
        self.calls.append("warmup")

    def predict(self, texts: list[str]) -> list[str]:
        return [f"{text}:{','.join(self.calls)}" for text in texts]

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), -1.0] for text in texts]

    def chat_template(self, messages: list[dict[str, str]]) -> str:
        return "|".join(message["content"] for message in messages)


async def exclaim(texts: list[str]) -> list[str]:
    return [text + "!" for text in texts]


def run(target: Any, *items: str | Item) -> list[ItemResult]:
    backend = FunctionBackend("m:f", target)
    backend.load()
    backend.warmup()
    results = backend.run([Item(item) if isinstance(item, str) else item for item in items], lambda: None)
    backend.close()
    return results


def test_class_is_created_loaded_and_warmed_up() -> None:
    """Texts, conversations and embeddings of one batch use its methods; its version replaces the spec."""
    backend = FunctionBackend("m:Model", Model)
    assert backend.version == "m:Model"
    backend.load()
    backend.warmup()

    text, chat, vector = backend.run([Item("a"), CHAT, Item("aa", {}, Task.EMBED)], lambda: None)

    assert (text.output, chat.output) == ("a:load,warmup", "Be brief.|Hello:load,warmup")
    assert read_vector(vector.output) == [2.0, -1.0]
    assert backend.version == "model-3"
    backend.close()


def test_plain_function_gets_named_turns_and_makes_no_embeddings() -> None:
    """An async function is awaited."""
    assert run(exclaim, CHAT, Item("a", {}, Task.EMBED)) == [
        ItemResult("system: Be brief.\nuser: Hello\nassistant:!"),
        NO_EMBEDDINGS,
    ]


class WithHealth:
    """A class whose health check returns or raises `health_result`."""

    def __init__(self, health_result: object) -> None:
        self.health_result = health_result

    def warmup(self) -> None:
        raise AssertionError

    async def health(self) -> object:
        if isinstance(self.health_result, Exception):
            raise self.health_result
        return self.health_result

    def predict(self, texts: list[str]) -> list[str]:
        return texts


@pytest.mark.parametrize(("health_result", "raised"), [(None, None), (False, Unwell), (OSError("gone"), OSError)])
def test_health(health_result: object, raised: type[Exception] | None) -> None:
    """`health` replaces the warm-up as the canary: False or an exception fails it."""
    backend = FunctionBackend("m:f", WithHealth(health_result))
    with pytest.raises(raised) if raised else nullcontext():
        backend.health()
    backend.close()


def test_function_gets_at_most_100_texts() -> None:
    """A larger batch runs in parts, each with progress."""
    sizes, steps = list[int](), list[None]()

    def record(texts: list[str]) -> list[str]:
        sizes.append(len(texts))
        return texts

    FunctionBackend("m:f", record).run([Item(str(i)) for i in range(250)], lambda: steps.append(None))

    assert (sizes, len(steps)) == ([100, 100, 50], 3)


@pytest.mark.parametrize("outputs", [None, "ab", ["a"], ["a", "b", "c"], {"a": "b"}, iter(["a", "b"])])
def test_wrong_number_of_outputs_fails_the_batch(outputs: object) -> None:
    """The outputs cannot be assigned to inputs; the same holds for vectors."""
    with pytest.raises(InvalidOutput):
        run(lambda _: outputs, "a", "b")
    with pytest.raises(InvalidOutput):
        as_vectors(outputs, 2)


@pytest.mark.parametrize("output", [7, float("nan"), None, b"x", "\ud800", "", Text("x")])
def test_output_that_is_no_text_fails_alone(output: object) -> None:
    """Only str that UTF-8 can encode is accepted, and returned as a plain str."""
    bad, good = run(lambda _: [output, "fine"], "a", "b")

    assert (bad.error_code, good.error_code) == ("" if output in ("", "x") else "invalid_output", "")
    assert type(bad.output) is str


@pytest.mark.parametrize("vector", [None, [], "123", b"ab", {1: 2}, ["a"], [1e400], [float("nan")], [1e39], [[1.0]]])
def test_invalid_vector_fails_alone(vector: Any) -> None:
    """Text, infinity, NaN and numbers too large for float32 are rejected."""
    good, bad = as_vectors([[1.5], vector], 2)

    assert (good.output, good.error_code, bad.error_code) == (write_vector([1.5]), "", "invalid_output")


class Listener:
    """Records text; gone when the test sets it."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, str]] = []
        self.gone = self.late = False

    def emit(self, offset: int, text: str) -> None:
        self.pieces.append((offset, text))


class Writer:
    """A model with `generate`."""

    def __init__(self, generate: Callable[[list[str], Any], list[str]]) -> None:
        self.generate = generate

    def predict(self, texts: list[str]) -> list[str]:
        return ["predicted"] * len(texts)


def test_generate_is_stopped_when_no_reader_is_left() -> None:
    """A model that goes on despite handlers for Exception is stopped by a BaseException; the text so far is the result."""
    listener = Listener()

    def generate(_texts: list[str], tell: Any) -> list[str]:
        with suppress(Exception):
            tell(["a"])
            listener.gone = listener.late = True
            while True:
                tell(["b"])
        raise AssertionError

    assert run(Writer(generate), Item("hello", listener=listener)) == [ItemResult("ab")]


@pytest.mark.parametrize("pieces", [["a"], ["a", 3], ["a", "\ud800"], 7])
def test_invalid_pieces_are_rejected(pieces: Any) -> None:
    """One valid text for each input is required."""
    with pytest.raises((InvalidOutput, TypeError)):
        run(Writer(lambda texts, tell: tell(pieces)), Item("a", listener=Listener()), "b")
