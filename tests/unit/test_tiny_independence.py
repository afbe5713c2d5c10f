"""A row's answer depends on the row alone: greedy always, drawn with a seed; whatever else is in the batch."""

from __future__ import annotations

import random

import pytest
import torch

from gpu_pool.backends.generation import Generation, GenerationParameters
from gpu_pool.backends.tiny import TinyModel, sampling
from gpu_pool.backends.tiny.generate import LARGEST_BATCH
from gpu_pool.backends.tiny.model import Cache, Network, load_network

TEXT = (
    "A program that answers many callers should answer each as if the others were not there. Ein Gerät, "
    "das zählt; 日本語のテキスト; and a line\nthat ends. What happens when the queue is full? Nothing is lost: "
    "the machine waits, the network waits, and the hacker at the keyboard waits with them until morning. "
)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """The shipped model on the CPU, with the one thread that it sets by itself."""
    return TinyModel.load("cpu")


def make_prompts(chance: random.Random, count: int) -> list[str]:
    """Prompts of 0 to 300 characters, cut out of TEXT at random places."""
    text = TEXT * 2
    starts = [chance.randrange(len(TEXT)) for _ in range(count)]
    return [text[start : start + chance.choice([0, 1, 7, 30, 90, 300])] for start in starts]


def generate_alone(model: TinyModel, prompts: list[str], wishes: list[GenerationParameters]) -> list[Generation]:
    """Answer each prompt in a batch of its own."""
    return [model.generate([prompt], [wish])[0] for prompt, wish in zip(prompts, wishes, strict=True)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_greedy_is_the_same_alone_and_in_any_batch(model: TinyModel, seed: int) -> None:
    """Rows of mixed lengths, shuffled and split into batches of many sizes, answer as each does alone."""
    chance = random.Random(seed)
    prompts = make_prompts(chance, 12)
    wishes = [GenerationParameters(max_tokens=chance.choice([3, 16, 24])) for _ in prompts]
    alone = generate_alone(model, prompts, wishes)
    for size in (2, 5, 12):
        order = chance.sample(range(len(prompts)), len(prompts))
        for at in range(0, len(order), size):
            batch = order[at : at + size]
            answers = model.generate([prompts[i] for i in batch], [wishes[i] for i in batch])
            assert answers == [alone[i] for i in batch]


def test_a_seeded_draw_is_the_same_in_any_batch(model: TinyModel) -> None:
    """Seeded rows answer alike alone, beside greedy and unseeded rows, and in another order."""
    chance = random.Random(4)
    prompts = make_prompts(chance, 10)
    wishes = [GenerationParameters(chance.choice([0.5, 1.0, 1.5]), 0.9, 20, seed) for seed in range(10)]
    alone = generate_alone(model, prompts, wishes)
    noise = [GenerationParameters(), GenerationParameters(1.0), GenerationParameters(1.0, max_tokens=5)]
    mixed = model.generate([*make_prompts(chance, 3), *reversed(prompts)], [*noise, *reversed(wishes)])
    assert mixed[3:] == alone[::-1]


def test_choices_made_from_the_row_alone_agree(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no choice counts as clear, each is made from the row alone, and the text stays the same."""
    prompts = make_prompts(random.Random(5), 6)
    wishes = [GenerationParameters(max_tokens=12)] * 3 + [GenerationParameters(1.0, 0.9, 12, 7)] * 3
    usual = model.generate(prompts, wishes)
    monkeypatch.setattr(sampling, "NOISE", 1e9)
    assert model.generate(prompts, wishes) == usual


def test_rows_beyond_the_largest_batch_are_answered_in_order(model: TinyModel) -> None:
    """More rows than run together come back in the order they were given."""
    prompts = [f"{number} bytes" for number in range(LARGEST_BATCH + 2)]
    wishes = [GenerationParameters(max_tokens=2)] * len(prompts)
    answers = model.generate(prompts, wishes)
    for at in (0, LARGEST_BATCH - 1, LARGEST_BATCH, LARGEST_BATCH + 1):
        assert answers[at] == model.generate([prompts[at]], [wishes[at]])[0]
    assert [answer.tokens_in for answer in answers] == [len(prompt) for prompt in prompts]


@pytest.mark.usefixtures("model")
def test_scores_move_less_than_the_noise_allowed_for() -> None:
    """Cached, padded, batched scores stay within half of NOISE of those of the row alone."""
    network = load_network(torch.device("cpu"))
    chance = random.Random(6)
    rows = [[256, *(TEXT * 3).encode()[start : start + chance.randrange(2, 500)]] for start in range(24)]
    batched = score_in_two_passes(network, rows)
    alone = torch.cat([network(torch.tensor([row]))[:, -1] for row in rows])
    assert (batched - alone).abs().max().item() < sampling.NOISE / 2


def score_in_two_passes(network: Network, rows: list[list[int]]) -> torch.Tensor:
    """Score the token after each row as generation does: all but its last token first, then that one."""
    widest = max(len(row) for row in rows)
    cache = Cache(network.shape, len(rows), widest, torch.device("cpu"))
    padded = torch.tensor([row[:-1] + [258] * (widest - len(row)) for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    network.step(padded, torch.arange(widest - 1).expand(len(rows), -1), widest - 1, cache, last - 1)
    tokens = torch.tensor([row[-1:] for row in rows])
    return network.step(tokens, last.unsqueeze(1), widest, cache, torch.zeros_like(last))
