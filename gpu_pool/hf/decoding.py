"""The tensors of the rows that run together: attention mask, positions, and the cache of keys and values.

Prompts are padded on the left, so that the last column is every row's last token and new ones are put behind it; the
mask hides the padding, and positions count from each row's own first token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

NEEDED: Final = ("past_key_values", "attention_mask")
"""What a network must take to be run like this."""


def takes(network: Any) -> frozenset[str]:
    """The arguments that the network's `forward` names."""
    return frozenset(inspect.signature(network.forward).parameters)


class Decoding:
    """Runs the network over rows: all prompts once, then one token of each row at a time. Scores are (rows, vocabulary)."""

    def __init__(self, network: Any, device: torch.device) -> None:
        self._network = network
        self._device = device
        taken = takes(network)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._positioned = "position_ids" in taken
        self._mask = torch.empty(0, 0, dtype=torch.long)
        self._cache: Any = None

    def read_prompts(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Score what follows each prompt; every prompt has a token at least."""
        widest = max(map(len, prompts))
        tokens = [[0] * (widest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(mask, device=self._device)
        return self._step(torch.tensor(tokens, device=self._device))

    def read_next(self, tokens: Sequence[int]) -> Tensor:
        """Score what follows one more token of each row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._step(torch.tensor(tokens, device=self._device).unsqueeze(1))

    def read_alone(self, tokens: Sequence[int]) -> Tensor:
        """Score what follows one row (1, vocabulary), without cache or neighbours: the same in every batch."""
        ids = torch.tensor([list(tokens)], device=self._device)
        last: Tensor = self._network(input_ids=ids, use_cache=False, **self._last_only).logits[:, -1]
        return last

    def keep(self, places: Sequence[int]) -> None:
        """Go on with these rows alone."""
        chosen = torch.tensor(list(places), device=self._device)
        self._mask = self._mask[chosen]
        self._cache.batch_select_indices(chosen)

    def _step(self, ids: Tensor) -> Tensor:
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        said = self._network(
            input_ids=ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **({"position_ids": positions} if self._positioned else {}),
            **self._last_only,
        )
        self._cache = said.past_key_values
        last: Tensor = said.logits[:, -1]
        return last
