"""What every backend must do, whatever is behind it: one set of tests over all of `backend_cases`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.backends.backend import Backend, Item, ItemResult
from integration.backend_cases import CASES, Case
from scheduler.payload import PromptMessage, Task, encode_messages, read_vector

TEXTS = ["Once upon a time", "The sea is deep.", "x", "two words"]
ODD = ["", " ", "\n", "日本語のテキスト", "👩‍🔬 é", "\x00", "a" * 150]
FEW = {"max_tokens": 6}


class Reader:
    """A listener that leaves after so many pieces."""

    def __init__(self, patience: int = 1_000_000) -> None:
        self.pieces: list[tuple[int, str]] = []
        self._patience = patience

    late = False

    @property
    def gone(self) -> bool:
        return len(self.pieces) >= self._patience

    def say(self, offset: int, text: str) -> None:
        self.pieces.append((offset, text))


class Subject:
    """One loaded backend, and how its items are made."""

    def __init__(self, case: Case, backend: Backend) -> None:
        self.case = case
        self.backend = backend

    def item(self, text: str, **more: Any) -> Item:
        parameters = dict(FEW) if self.case.parameters else {}
        return Item(text, parameters | more.pop("parameters", {}), **more)

    def run(self, items: Sequence[Item]) -> list[ItemResult]:
        return self.backend.run(items, lambda: None)

    def texts(self, *texts: str) -> list[ItemResult]:
        return self.run([self.item(text) for text in texts])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], Subject]]:
    """Each backend is loaded once for all of its tests."""
    subjects: dict[str, Subject] = {}

    def load(case: Case) -> Subject:
        if case.name not in subjects:
            backend = case.make(tmp_path_factory.mktemp("backend"))
            backend.load()
            backend.warmup()
            subjects[case.name] = Subject(case, backend)
        return subjects[case.name]

    yield load
    for subject in subjects.values():
        subject.backend.close()


@pytest.fixture
def subject(request: pytest.FixtureRequest, loaded: Callable[[Case], Subject]) -> Subject:
    """The backend that the test is about."""
    case: Case = request.param
    return loaded(case)


def over(wanted: Callable[[Case], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Run the test for the backends of which this is true."""
    return pytest.mark.parametrize("subject", [c for c in CASES if wanted(c)], ids=lambda c: c.name, indirect=True)


@over()
@pytest.mark.parametrize("count", [1, 2, 100])
def test_there_is_one_result_for_each_item(subject: Subject, count: int) -> None:
    """Of the right type, without an error, and a version to name what ran."""
    results = subject.texts(*(f"text number {number}" for number in range(count)))

    assert [ItemResult] * count == [type(result) for result in results]
    assert [(str, "")] * count == [(type(result.output), result.error_code) for result in results]
    assert subject.backend.version


@over()
def test_results_are_in_the_order_of_the_items(subject: Subject) -> None:
    """Each is what its item gets in a batch of its own, in this order and in the other one."""
    alone = [subject.texts(text)[0] for text in TEXTS]

    assert alone == subject.texts(*TEXTS)
    assert alone[::-1] == subject.texts(*TEXTS[::-1])
    assert len({result.output for result in alone}) > 1


@over()
def test_the_same_batch_twice_is_the_same_answer(subject: Subject) -> None:
    """Without a temperature nothing is left to chance."""
    assert subject.texts(*TEXTS) == subject.texts(*TEXTS)


@over()
def test_any_text_is_answered(subject: Subject) -> None:
    """Empty, blank, of any script, long: each item gets an answer, and its neighbours theirs."""
    results = subject.texts("before", *ODD, "after")

    assert [""] * (len(ODD) + 2) == [result.error_code for result in results]
    assert subject.texts("before")[0] == results[0]
    assert [text for result in results for text in [result.output] if text.encode("utf-8").decode() != text] == []


@over()
def test_conversations_are_answered(subject: Subject) -> None:
    """Beside plain texts, in one batch."""
    said = [PromptMessage("system", "Be brief."), PromptMessage("user", "Hello.")]

    chat, text = subject.run([subject.item(encode_messages(said), task=Task.CHAT), subject.item("plain")])

    assert (chat.error_code, text.error_code) == ("", "")
    assert [text] == subject.texts("plain")


@over(lambda case: case.parameters)
@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"max_tokens": 10**9}, {"temperature": "hot"}, {"seed": 0.5}, {"colour": "red"}]
)
def test_a_bad_parameter_fails_its_item_alone(subject: Subject, bad: dict[str, Any]) -> None:
    """The sentence names the field; the neighbours complete as if it was not there."""
    items = [subject.item("one"), subject.item("two", parameters=bad), subject.item("three")]

    first, refused, third = subject.run(items)

    assert (refused.error_code, refused.output.partition(" ")[0]) == (
        "invalid_request",
        f"parameters.{next(iter(bad))}",
    )
    assert [first, third] == subject.texts("one", "three")


@over(lambda case: case.parameters)
def test_a_seed_gives_the_same_text_in_any_batch(subject: Subject) -> None:
    """The neighbours' chance is their own; another seed is another text."""
    drawn = [
        subject.item("Once upon", parameters={"temperature": 1.2, "top_p": 0.9, "seed": seed, "max_tokens": 12})
        for seed in range(6)
    ]
    noise = [subject.item("anything else", parameters={"temperature": 2.0}) for _ in range(3)]
    alone = [subject.run([item])[0] for item in drawn]

    assert subject.run([*noise, *drawn[::-1]])[3:] == alone[::-1]
    assert len({result.output for result in alone}) > 1


@over(lambda case: case.parameters)
def test_tokens_are_counted(subject: Subject) -> None:
    """Those read and those written, and why it ended."""
    (result,) = subject.run([subject.item("Once upon a time", parameters={"max_tokens": 3})])

    assert 0 <= result.output_tokens <= 3
    assert result.tokens_used > result.output_tokens
    assert result.finish_reason == ("length" if result.output_tokens == 3 else "stop")


@over(lambda case: case.steps)
def test_pieces_together_are_the_output(subject: Subject) -> None:
    """A listener hears the whole text, in order, each piece where the last one ended; who does not listen gets the same."""
    readers = [Reader() for _ in TEXTS]
    items = [subject.item(text, listener=reader) for text, reader in zip(TEXTS, readers, strict=True)]

    results = subject.run(items)

    assert [result.output for result in results] == ["".join(text for _, text in r.pieces) for r in readers]
    for reader in readers:
        ends = [offset + len(text) for offset, text in reader.pieces]
        assert [offset for offset, _ in reader.pieces] == [0, *ends[:-1]][: len(ends)]
    assert results == subject.texts(*TEXTS)


@over(lambda case: case.steps)
def test_an_item_that_nobody_waits_for_ends_early(subject: Subject) -> None:
    """Its neighbour goes on to its end."""
    long = {"parameters": {"max_tokens": 48}} if subject.case.parameters else {}
    text = "Once upon a time there was a queue"
    leaving, staying = Reader(patience=2), Reader()

    left, stayed = subject.run([subject.item(text, listener=reader, **long) for reader in (leaving, staying)])

    assert len(left.output) < len(stayed.output)
    assert stayed.output == "".join(piece for _, piece in staying.pieces)


@over(lambda case: case.steps)
def test_a_batch_in_steps_shows_progress(subject: Subject) -> None:
    """The watchdog kills what shows none."""
    steps: list[None] = []

    subject.backend.run([subject.item("Once upon a time", listener=Reader())], lambda: steps.append(None))

    assert len(steps) > 1


@over(lambda case: case.embeds)
def test_vectors_are_made_beside_texts(subject: Subject) -> None:
    """One batch may hold both; each item gets what it asked for."""
    vector, text, other = subject.run(
        [Item("The sea", task=Task.EMBED), subject.item("plain"), Item("The sea is deep", task=Task.EMBED)]
    )

    assert len(read_vector(vector.output)) == len(read_vector(other.output)) > 1
    assert vector.output != other.output
    assert [text] == subject.texts("plain")


@over(lambda case: not case.embeds)
def test_a_model_without_vectors_says_so(subject: Subject) -> None:
    """As a fault of the request, which no retry can mend."""
    refused, text = subject.run([Item("The sea", task=Task.EMBED), subject.item("plain")])

    assert (refused.error_code, refused.output) == ("invalid_request", "This model makes no embeddings.")
    assert text.error_code == ""


@over()
def test_a_well_model_passes_its_canary(subject: Subject) -> None:
    """And runs after it as before."""
    before = subject.texts(*TEXTS)

    subject.backend.health()

    assert before == subject.texts(*TEXTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_closed_can_be_loaded_again(case: Case, tmp_path: Path) -> None:
    """A new backend of the same kind, in the same process, answers the same under the same version."""
    answers = []
    for _ in range(2):
        backend = case.make(tmp_path)
        backend.load()
        subject = Subject(case, backend)
        answers.append((subject.texts(*TEXTS), backend.version))
        backend.close()

    assert answers[0] == answers[1]
