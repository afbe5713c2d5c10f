"""The contract of a backend: the same tests for every case of `backend_cases`."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.inference.worker_views import SAMPLING_BACKENDS
from gpu_pool.backends.backend import TOO_LATE, Backend, Item, ItemResult, SteppingBackend
from gpu_pool.model_process.backend_registry import BACKENDS
from integration.backend_cases import CASES, STEPPING, Case
from integration.endpoint_fixtures import Reader
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from scheduler.vectors import read_vector

TEXTS = ["Once upon a time", "The sea is deep.", "x", "two words"]
ODD = ["", " ", "\n", "日本語のテキスト", "👩‍🔬 é", "\x00", "a" * 150]


class Loaded:
    """A loaded backend; texts get a small `max_tokens` where the backend has parameters."""

    def __init__(self, case: Case, backend: Backend) -> None:
        self.case = case
        self.backend = backend

    def item(self, text: str, **more: Any) -> Item:
        parameters = {"max_tokens": 6} if self.case.parameters else {}
        return Item(text, parameters | more.pop("parameters", {}), **more)

    def run(self, items: Sequence[Item], progress: Callable[[], None] = lambda: None) -> list[ItemResult]:
        return self.backend.run(items, progress)

    def texts(self, *texts: str) -> list[ItemResult]:
        return self.run([self.item(text) for text in texts])


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], Loaded]]:
    """Loads each backend once."""
    backends: dict[str, Loaded] = {}

    def load(case: Case) -> Loaded:
        if case.name not in backends:
            backend = case.make(tmp_path_factory.mktemp("backend"))
            backend.load()
            backend.warmup()
            backends[case.name] = Loaded(case, backend)
        return backends[case.name]

    yield load
    for each in backends.values():
        each.backend.close()


@pytest.fixture
def backend(request: pytest.FixtureRequest, load: Callable[[Case], Loaded]) -> Loaded:
    return load(request.param)


def cases(wanted: Callable[[Case], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Run the test for these backends."""
    return pytest.mark.parametrize("backend", [c for c in CASES if wanted(c)], ids=lambda c: c.name, indirect=True)


@cases()
def test_results_do_not_depend_on_the_batch(backend: Loaded) -> None:
    """One result for each item, in order, the same alone and again; the canary passes and changes nothing."""
    alone = [backend.texts(text)[0] for text in TEXTS]
    backend.backend.health()

    assert backend.texts(*TEXTS) == alone
    assert backend.texts(*TEXTS[::-1]) == alone[::-1]
    assert len({result.output for result in alone}) > 1
    many = backend.texts(*TEXTS, *(f"text {n}" for n in range(100)), *TEXTS)
    assert [many[:4], many[-4:], {result.error_code for result in many}] == [alone, alone, {""}]
    assert backend.backend.version


def test_the_table_of_backends_is_true() -> None:
    """What each case can do is not denied to its form in docs/endpoint.md, and what it cannot do is not promised."""
    forms = {each.form: each for each in BACKENDS}

    assert {case.form for case in CASES} == forms.keys()
    assert [case.name for case in CASES if forms[case.form].steps == ("-" if case.steps else "yes")] == []
    assert [case.name for case in CASES if forms[case.form].vectors == ("-" if case.embeds else "yes")] == []
    assert [form for form, each in forms.items() if each.passes_on != form.startswith(SAMPLING_BACKENDS)] == []


@cases()
def test_any_text_is_answered(backend: Loaded) -> None:
    """Empty, blank, any script, long, and conversations; the outputs are valid UTF-8."""
    messages = [PromptMessage("system", "Be brief."), PromptMessage("user", "Hello.")]
    chat = backend.item(encode_messages(messages), task=Task.CHAT)

    *results, talk = backend.run([*(backend.item(text) for text in ["before", *ODD, "after"]), chat])

    assert [result.error_code for result in [*results, talk]] == [""] * (len(ODD) + 3)
    assert backend.texts("before")[0] == results[0]
    assert all(result.output.encode().decode() == result.output for result in results)


@cases(lambda case: case.parameters)
@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"max_tokens": 10**9}, {"temperature": "hot"}, {"seed": 0.5}, {"colour": "red"}]
)
def test_bad_parameter_fails_its_item_alone(backend: Loaded, bad: dict[str, Any]) -> None:
    """The error names the field."""
    items = [backend.item("one"), backend.item("two", parameters=bad), backend.item("three")]

    first, rejected, third = backend.run(items)

    assert rejected.error_code == "invalid_request"
    assert rejected.output.startswith(f"parameters.{next(iter(bad))} ")
    assert [first, third] == backend.texts("one", "three")


@cases(lambda case: case.parameters)
def test_seed_gives_the_same_text_in_any_batch(backend: Loaded) -> None:
    """Neighbours have their own random numbers; other seeds give other texts; tokens are counted."""
    parameters = {"temperature": 1.2, "top_p": 0.9, "max_tokens": 12}
    seeded = [backend.item("Once upon", parameters=parameters | {"seed": seed}) for seed in range(6)]
    noise = [backend.item("anything else", parameters={"temperature": 2.0}) for _ in range(3)]
    alone = [backend.run([item])[0] for item in seeded]

    assert backend.run([*noise, *seeded[::-1]])[3:] == alone[::-1]
    assert len({result.output for result in alone}) > 1
    for result in alone:
        assert 0 <= result.output_tokens <= 12
        assert result.tokens_used > result.output_tokens
        assert result.finish_reason == ("length" if result.output_tokens == 12 else "stop")


@cases(lambda case: case.steps)
def test_pieces_are_the_output(backend: Loaded) -> None:
    """Listeners get the whole text in order (`Reader` checks the offsets), with progress at each step."""
    readers, steps = [Reader() for _ in TEXTS], list[None]()
    items = [backend.item(text, listener=reader) for text, reader in zip(TEXTS, readers, strict=True)]

    results = backend.run(items, lambda: steps.append(None))

    assert [result.output for result in results] == [reader.text for reader in readers]
    assert results == backend.texts(*TEXTS)
    assert len(steps) > 1


@cases(lambda case: case.steps)
def test_item_without_reader_ends_early(backend: Loaded) -> None:
    """Its neighbour goes on to its end."""
    long = {"parameters": {"max_tokens": 48}} if backend.case.parameters else {}
    leaves, stays = Reader(leaves_after=2), Reader()

    left, stayed = backend.run(
        [backend.item("Once upon a time there was a queue", listener=reader, **long) for reader in (leaves, stays)]
    )

    assert len(left.output) < len(stayed.output)
    assert stayed.output == stays.text


@cases()
def test_embeddings(backend: Loaded) -> None:
    """A batch may mix texts and embeddings; a model without embeddings rejects these items alone."""
    first, text, second = backend.run(
        [Item("The sea", task=Task.EMBED), backend.item("plain"), Item("The sea is deep", task=Task.EMBED)]
    )

    assert [text] == backend.texts("plain")
    if backend.case.embeds:
        assert len(read_vector(first.output)) == len(read_vector(second.output)) > 1
        assert first.output != second.output
    else:
        assert (first.error_code, first.output) == ("invalid_request", "This model makes no embeddings.")


@cases()
def test_backends_with_slots(backend: Loaded) -> None:
    """The model process chooses its loop by the type of the backend, once it is loaded."""
    assert isinstance(backend.backend, SteppingBackend) == (backend.case.name in STEPPING)


def stepped(backend: Loaded, items: Sequence[Item], joins: Sequence[int]) -> dict[int, Any]:
    """The results when each item joins at its step, and the text of listeners until then."""
    loop: Any = backend.backend
    results: dict[int, Any] = {}
    for step in range(400):
        for key, joins_at in enumerate(joins):
            if joins_at == step:
                loop.add(key, items[key])
        results.update(loop.step(lambda: None))
        if len(results) == len(items):
            break
    return results


@cases(lambda case: case.name in STEPPING)
@pytest.mark.parametrize("seed", range(4))
def test_items_join_and_leave_at_any_step(backend: Loaded, seed: int) -> None:
    """Texts of mixed lengths, embeddings and streams have the results that they have alone."""
    chance = random.Random(seed)
    items = [
        backend.item(
            chance.choice([*TEXTS, *ODD, "Once upon a time there was a machine " * 2]),
            parameters={"max_tokens": chance.choice([1, 2, 5, 17, 40])} if backend.case.parameters else {},
            listener=Reader() if chance.random() < 0.5 else None,
            task=Task.EMBED if backend.case.embeds and chance.random() < 0.2 else Task.COMPLETE,
        )
        for _ in range(14)
    ]
    if backend.case.parameters:
        items[3].parameters.update(temperature=1.1, seed=4)
        items.append(backend.item("x", parameters={"colour": "red"}))
    joins = [chance.choice([0, 0, 1, 3, 4, 9, 20]) for _ in items]

    results = stepped(backend, items, joins)

    alone = [backend.run([replace(item, listener=None)])[0] for item in items]
    assert [results[key] for key in range(len(items))] == alone
    readers = {key: item.listener for key, item in enumerate(items) if isinstance(item.listener, Reader)}
    assert {key: reader.text for key, reader in readers.items()} == {
        key: alone[key].output if items[key].task is not Task.EMBED else "" for key in readers
    }


@cases(lambda case: case.name in STEPPING)
def test_items_that_leave(backend: Loaded) -> None:
    """A removed item has no result, one past its deadline TOO_LATE, one whose client left its text; others go on."""
    loop: Any = backend.backend
    parameters = {"max_tokens": 30} if backend.case.parameters else {}
    stays, leaves = backend.item("Once upon a time", parameters=parameters), Reader(leaves_after=2)
    for key, item in enumerate(
        [
            replace(stays, until=0.0),
            stays,
            replace(stays, listener=leaves),
            stays,
        ]
    ):
        loop.add(key, item)

    results = dict(loop.step(lambda: None))
    loop.remove(1)
    loop.remove(1)
    for _ in range(100):
        if 3 not in results:
            results.update(loop.step(lambda: None))

    (alone,) = backend.run([stays])
    assert (results.keys(), results[0], results[3]) == ({0, 2, 3}, TOO_LATE, alone)
    assert results[2].output == leaves.text != alone.output
    assert alone.output.startswith(leaves.text)
