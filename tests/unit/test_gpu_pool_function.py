"""Function backends: accepted targets, lifecycle, step-by-step output, and validation of what the function returns."""

import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.backends.backend import NO_EMBEDDINGS, InvalidOutput, Item, ItemResult, Unwell
from gpu_pool.backends.function import BAD_COUNTS, FunctionBackend, as_results, as_vectors
from gpu_pool.model_output import ModelOutput
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from scheduler.vectors import read_vector, write_vector

PAGE = Path(__file__).resolve().parents[2] / "docs/python-models.md"
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


class Reader:
    """A model whose methods take parameters, and return them."""

    def predict(self, texts: list[str], parameters: list[dict[str, Any]]) -> list[str]:
        return [f"{text} {wishes.pop('style', '')}" for text, wishes in zip(texts, parameters, strict=True)]

    def generate(self, texts: list[str], tell: Any, parameters: list[dict[str, Any]]) -> list[str]:
        tell(texts)
        return self.predict(texts, parameters)

    async def embed(self, texts: list[str], *, parameters: list[dict[str, Any]]) -> list[list[float]]:
        return [[float(wishes.get("dimensions", len(text)))] for text, wishes in zip(texts, parameters, strict=True)]


def test_parameters_arrive_with_their_texts() -> None:
    """Of a batch that mixes requests; a model may change them, and a batch that runs again has those of the requests."""
    mixed = [Item("a", {"style": "x"}), Item("bb", {"dimensions": 7}, Task.EMBED), Item("c"), Item("d", {"style": "y"})]
    backend = FunctionBackend("m:Reader", Reader)
    backend.load()

    first, again = backend.run(mixed, lambda: None), backend.run(mixed, lambda: None)
    (streamed,) = backend.run([Item("e", {"style": "z"}, listener=Listener())], lambda: None)
    backend.close()

    assert [result.output for result in first if result is not first[1]] == ["a x", "c ", "d y"]
    assert read_vector(first[1].output) == [7.0]
    assert (again, streamed.output) == (first, "e z")
    assert (
        run(lambda texts, parameters: [str(each) for each in parameters], Item("a", {"k": 1}))[0].output == "{'k': 1}"
    )


class HalfReader(Reader):
    """One method takes parameters, the other does not."""

    def generate(self, texts: list[str], tell: Any) -> list[str]:  # type: ignore[override]
        return self.predict(texts, [{}] * len(texts))


@pytest.mark.parametrize(
    ("target", "item", "rejected"),
    [
        (exclaim, Item("a", {"temperature": 1, "style": "x"}), "parameters.style is not a parameter of this model"),
        (exclaim, Item("a", {"temperature": 1, "top_p": 1, "max_tokens": 1, "seed": 1, "stop": []}), ""),
        (exclaim, Item("a", {"dimensions": 1}, Task.EMBED), ""),  # It makes no embeddings.
        (Model, Item("a", {"dimensions": 1}, Task.EMBED), "parameters.dimensions is not a parameter of this model"),
        (Reader, Item("a", {"style": "x"}), ""),
        (Reader, Item("a", {"dimensions": 1}, Task.EMBED), ""),
        (HalfReader, Item("a", {"style": "x"}), "parameters.style cannot be read: `generate` and `predict`"),
        (HalfReader, Item("a", {"seed": 1}), ""),
        (print, Item("a", {"style": "x"}), "parameters.style is not"),
    ],
)
def test_parameter_that_nothing_reads_is_rejected_by_name(target: Any, item: Item, rejected: str) -> None:
    """Except those that OpenAI's clients send to any model."""
    backend = FunctionBackend("m:f", target)
    backend.load()
    result = backend.rejection(item)
    backend.close()

    assert (result is not None) == bool(rejected)
    assert result is None or (result.error_code, result.output[: len(rejected)]) == ("invalid_request", rejected)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ModelOutput("x", 3, 2, "length"), ItemResult("x", 5, "", 2, "length")),
        (ModelOutput("x"), ItemResult("x")),
        (
            ModelOutput(error="parameters.style is wrong."),
            ItemResult("parameters.style is wrong.", 0, "invalid_request"),
        ),
        (ModelOutput("x", -1), BAD_COUNTS),
        (ModelOutput("x", 1.5), BAD_COUNTS),  # type: ignore[arg-type]
        (ModelOutput("x", 2**31), BAD_COUNTS),
        (ModelOutput("x", finish_reason="done"), BAD_COUNTS),  # type: ignore[arg-type]
        (ModelOutput(b"x"), ItemResult("The model's output is not a string.", 0, "invalid_output")),
        (ModelOutput(error=7), ItemResult("The model's output is not a string.", 0, "invalid_output")),  # type: ignore[arg-type]
    ],
)
def test_model_output(output: ModelOutput, expected: ItemResult) -> None:
    """An output with counts, or an error; an invalid one fails alone. Vectors have them, too."""
    assert as_results([output, "fine"], 2) == [expected, ItemResult("fine")]
    assert as_vectors([ModelOutput([1.5], 4)], 1) == [ItemResult(write_vector([1.5]), 4)]
    with pytest.raises(InvalidOutput):
        as_results(ModelOutput("x"), 5)  # A tuple of five, but one output.


def test_the_class_of_the_documentation() -> None:
    """Each of its methods does what the page says."""
    found = re.search(r"```python\n(# styles\.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    module: dict[str, Any] = {}
    exec(compile(found[1], "styles.py", "exec"), module)
    backend, listener = FunctionBackend("styles:Styles", module["Styles"]), Listener()
    backend.load()
    backend.warmup()
    backend.health()
    wished = [
        Item("a b", {"style": "loud"}),
        Item("c", {"style": "odd"}),
        CHAT,
        Item("a b", {"dimensions": 2}, Task.EMBED),
    ]

    loud, odd, chat, vector = backend.run(wished, lambda: None)
    (streamed,) = backend.run([Item("up", {"style": "loud"}, listener=listener)], lambda: None)
    backend.close()

    assert (backend.version, loud, chat.output) == ("styles-1", ItemResult("A B", 4, "", 2), "Hello")
    assert (odd.error_code, odd.output) == ("invalid_request", "parameters.style must be one of plain, loud.")
    assert (read_vector(vector.output), vector.tokens_used) == ([3.0, 1.0], 2)
    assert (streamed.output, listener.pieces) == ("UP", [(0, "U"), (1, "P")])
