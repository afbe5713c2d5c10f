"""The shipped model as a backend: what it computes is checked before it becomes an answer."""

import pytest
import torch

from gpu_pool.backends.backend import InvalidOutput, Item
from gpu_pool.backends.tiny.backend import TinyBackend
from gpu_pool.backends.tiny.generate import TinyModel
from gpu_pool.backends.tiny.model import load_network


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_no_answer(value: float) -> None:
    """A broken device computes NaN without an error, and any text made of it would be nonsense."""
    network = load_network(torch.device("cpu"))
    with torch.no_grad():
        network.scores.weight[0, 0] = value
    backend = TinyBackend("cpu", 1)
    backend._model = TinyModel(network, torch.device("cpu"))

    with pytest.raises(InvalidOutput, match="not finite"):
        backend.run([Item("Once upon a time", {"max_tokens": 4})], lambda: None)
    with pytest.raises(FloatingPointError):
        backend.warmup()


def test_an_answer_tells_its_tokens_and_why_it_ends() -> None:
    """Those read and those written are told apart: a token is a byte."""
    backend = TinyBackend("cpu", 1)
    backend.load()

    (cut,) = backend.run([Item("Once upon", {"max_tokens": 4})], lambda: None)

    assert (cut.tokens_used, cut.output_tokens, cut.finish_reason) == (13, 4, "length")
