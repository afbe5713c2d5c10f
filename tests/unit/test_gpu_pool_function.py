"""Function backends: what a user's function may be, and what it may answer."""

from typing import Any

import pytest

from gpu_pool.backends.backend import InvalidOutput, Item, ItemResult, Unwell
from gpu_pool.backends.function import FunctionBackend


class Text(str):
    """A str subclass, such as numpy's."""

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
        return [",".join(self.calls)] * len(texts)


async def later(texts: list[str]) -> list[str]:
    return [text + "!" for text in texts]


def answers(target: Any, *texts: str) -> list[ItemResult]:
    backend = FunctionBackend("m:f", target)
    backend.load()
    backend.warmup()
    results = backend.run([Item(text) for text in texts], lambda: None)
    backend.close()
    return results


def test_a_function_is_called_with_the_texts() -> None:
    """Inputs in, outputs out, in order."""
    assert [ItemResult("A"), ItemResult("B")] == answers(lambda texts: [t.upper() for t in texts], "a", "b")


def test_an_async_function_is_awaited() -> None:
    """The loop is the backend's own."""
    assert [ItemResult("a!")] == answers(later, "a")


def test_a_class_is_made_loaded_and_warmed_once() -> None:
    """`load` and `warmup` come before the first `predict`, async or not."""
    assert [ItemResult("load,warmup")] == answers(Model, "a")


class Patient:
    """A class that says how it is."""

    def __init__(self, says: object) -> None:
        self._says = says
        self.warmed = 0

    def warmup(self) -> None:
        self.warmed += 1

    async def health(self) -> object:
        if isinstance(self._says, Exception):
            raise self._says
        return self._says

    def predict(self, texts: list[str]) -> list[str]:
        return texts


@pytest.mark.parametrize("says", [None, True])
def test_the_canary_is_the_class_s_own(says: object) -> None:
    """`health`, where there is one, async or not, is asked in place of `warmup`; silence is good news."""
    patient = Patient(says)
    backend = FunctionBackend("m:f", patient)
    backend.health()
    backend.close()

    assert patient.warmed == 0


@pytest.mark.parametrize(("says", "raised"), [(False, Unwell), (OSError("gone"), OSError)])
def test_a_model_says_that_it_is_not_well(says: object, raised: type[Exception]) -> None:
    """By False, or by an exception of its own."""
    backend = FunctionBackend("m:f", Patient(says))

    with pytest.raises(raised):
        backend.health()
    backend.close()


def test_without_a_canary_it_is_the_warm_up() -> None:
    """A plain function has neither, and counts as well."""
    backend = FunctionBackend("m:f", Model)
    backend.load()
    backend.health()
    assert [ItemResult("load,warmup")] == backend.run([Item("a")], lambda: None)
    backend.close()
    plain = FunctionBackend("m:f", lambda texts: texts)
    plain.health()
    plain.close()


def test_the_version_is_the_class_s_own_else_the_spec() -> None:
    """It ends up in the answer's metadata."""
    backend = FunctionBackend("m:Model", Model)
    before = backend.version
    backend.load()
    backend.close()

    assert (before, backend.version) == ("m:Model", "model-3")


def test_a_function_gets_at_most_100_texts() -> None:
    """A larger batch is done in parts, each telling progress."""
    sizes: list[int] = []
    steps: list[None] = []

    def note(texts: list[str]) -> list[str]:
        sizes.append(len(texts))
        return texts

    FunctionBackend("m:f", note).run([Item(str(i)) for i in range(250)], lambda: steps.append(None))

    assert (sizes, len(steps)) == ([100, 100, 50], 3)


@pytest.mark.parametrize("answer", [None, "ab", ["a"], ["a", "b", "c"], {"a": "b"}, iter(["a", "b"])])
def test_a_wrong_number_of_answers_is_refused_as_a_whole(answer: object) -> None:
    """Which answer belongs to which input cannot be known."""
    with pytest.raises(InvalidOutput):
        answers(lambda _: answer, "a", "b")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (7, "invalid_output"),
        (float("nan"), "invalid_output"),
        (None, "invalid_output"),
        (b"x", "invalid_output"),
        ("\ud800", "invalid_output"),
        ("", ""),
    ],
)
def test_an_answer_that_is_no_text_fails_alone(answer: object, code: str) -> None:
    """Its neighbour completes."""
    assert [code, ""] == [result.error_code for result in answers(lambda _: [answer, "fine"], "a", "b")]


def test_a_subclass_of_str_becomes_a_plain_one() -> None:
    """What leaves the model process is text and nothing else."""
    assert str is type(answers(lambda _: [Text("x")], "a")[0].output)
