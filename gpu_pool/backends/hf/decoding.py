"""Continuous batching with transformers' cache: rows with one cache are a group, and new rows join it.

Rows are padded on the left, so that the last column is every row's last token and new ones are appended; the mask hides
the padding, and positions count from each row's own first token. A row that joins takes the place of one that left, with
padding up to the group's width. A cache of another kind than keys and values of all or the last tokens cannot take rows
in, so with such a network the rows that join together stay a group of their own.

transformers' own continuous batching has neither a seed nor stop strings for each request, and its text depends on the
other rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.hf.row import HfSequence
from gpu_pool.backends.tiny.sampling import choose


def takes(network: Any) -> frozenset[str]:
    """The arguments of the network's `forward`."""
    return frozenset(inspect.signature(network.forward).parameters)


class Scoring:
    """Calls the network. Scores are (rows, vocabulary)."""

    def __init__(self, network: Any, device: torch.device) -> None:
        self.device = device
        self._network = network
        taken = takes(network)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._positioned = "position_ids" in taken

    def score(self, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Score the token after `ids` (rows, tokens), the last columns of `mask`; also returns the new cache."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._network(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **({"position_ids": positions} if self._positioned else {}),
            **self._last_only,
        )
        return output.logits[:, -1], output.past_key_values

    def score_alone(self, tokens: Sequence[int]) -> Tensor:
        """Score the next token of one row (1, vocabulary), without cache or other rows: the same in every batch."""
        ids = torch.tensor([list(tokens)], device=self.device)
        last: Tensor = self._network(input_ids=ids, use_cache=False, **self._last_only).logits[:, -1]
        return last


class RowGroup:
    """Rows with one cache. A place whose row has left is None, and computed in vain until another row takes it."""

    def __init__(self, scoring: Scoring, rows: Sequence[HfSequence]) -> None:
        self.rows: list[HfSequence | None] = list(rows)
        self._scoring = scoring
        self._mask = torch.empty(0, 0, dtype=torch.long)
        self._cache: Any = None
        self._vain = 0

    def read_prompts(self) -> Tensor:
        """Score the first token of each row; every prompt has at least one token."""
        prompts = [row.tokens for row in self.rows if row is not None]
        widest = max(map(len, prompts))
        tokens = [[0] * (widest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(mask, device=self._scoring.device)
        return self._score(torch.tensor(tokens, device=self._scoring.device))

    def read_next(self) -> tuple[list[HfSequence], Tensor]:
        """The rows, and scores of their next tokens after one more token of each."""
        # Free places are removed once they have cost as much as a step: the removal copies the cache.
        live = [place for place, row in enumerate(self.rows) if row is not None]
        self._vain = self._vain + len(self.rows) - len(live) if len(live) < len(self.rows) else 0
        if self._vain >= len(self.rows):
            chosen = torch.tensor(live, device=self._scoring.device)
            self._mask = self._mask[chosen]
            self._cache.batch_select_indices(chosen)
            self.rows, self._vain = [self.rows[place] for place in live], 0
        tokens = [[row.tokens[-1] if row is not None else 0] for row in self.rows]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        scores = self._score(torch.tensor(tokens, device=self._scoring.device))
        rows = [row for row in self.rows if row is not None]
        return rows, scores if len(rows) == len(self.rows) else scores[live]

    def can_join(self, other: RowGroup) -> bool:
        """Whether `join` is possible."""
        return _is_padded(self._cache) and _is_padded(other._cache)

    def join(self, other: RowGroup) -> None:
        """Take over the rows of another group, at free places first."""
        width = max(self._mask.shape[1], other._mask.shape[1])
        free = [place for place, row in enumerate(self.rows) if row is None]
        free += range(len(self.rows), len(self.rows) + len(other.rows))
        places = free[: len(other.rows)]
        self.rows += [None] * (places[-1] + 1 - len(self.rows))
        for place, row in zip(places, other.rows, strict=True):
            self.rows[place] = row
        at = torch.tensor(places, device=self._scoring.device)
        self._mask = _place(self._mask, other._mask, at, (len(self.rows), width), 1)
        for ours, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
            if not ours.is_initialized:  # It shares the keys and values of another layer.
                continue
            size = len(self.rows), _columns(ours, width)
            ours.keys = _place(ours.keys, theirs.keys, at, size, 2)
            ours.values = _place(ours.values, theirs.values, at, size, 2)
            _set_width(ours, width)

    def leave(self, row: HfSequence) -> None:
        """Remove a row, and columns in which only padding is left."""
        self.rows[self.rows.index(row)] = None
        # The last token of a row is not in the cache yet.
        width = max((len(row.tokens) - 1 for row in self.rows if row is not None), default=0)
        if 0 < width < self._mask.shape[1] and _is_padded(self._cache):
            self._mask = self._mask[:, -width:]
            for layer in self._cache.layers:
                if layer.is_initialized:
                    layer.keys = layer.keys[:, :, -_columns(layer, width) :]
                    layer.values = layer.values[:, :, -_columns(layer, width) :]
                    _set_width(layer, width)

    def _score(self, ids: Tensor) -> Tensor:
        scores, self._cache = self._scoring.score(ids, self._mask, self._cache)
        return scores


def _is_padded(cache: Any) -> bool:
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _columns(layer: DynamicLayer, width: int) -> int:
    """How many of the last `width` tokens the layer keeps."""
    return min(width, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else width


def _set_width(layer: DynamicLayer, width: int) -> None:
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = width


def _place(ours: Tensor, theirs: Tensor, at: Tensor, size: tuple[int, int], dim: int) -> Tensor:
    """`ours` with `theirs` at the places `at`, both padded on the left to `size` (rows, columns in dimension `dim`)."""
    if (ours.shape[0], ours.shape[dim]) != size:
        shape = list(ours.shape)
        shape[0], shape[dim] = size
        grown = ours.new_zeros(shape)
        grown.narrow(dim, size[1] - ours.shape[dim], ours.shape[dim])[: ours.shape[0]] = ours
        ours = grown
    ours[at] = 0  # Another row's numbers may be infinite.
    ours.narrow(dim, size[1] - theirs.shape[dim], theirs.shape[dim])[at] = theirs
    return ours


class HfDecoder:
    """The rows of one loop. `exact`: a choice that rounding could change is recomputed from the row alone."""

    def __init__(self, network: Any, device: torch.device, *, exact: bool) -> None:
        self._scoring = Scoring(network, device)
        self._exact = exact
        self._groups: list[RowGroup] = []

    @torch.inference_mode()
    def advance(self, progress: Callable[[], None]) -> None:
        """Add one token to each row."""
        for group in self._groups:
            self._draw(*group.read_next())
            progress()

    @torch.inference_mode()
    def join(self, rows: Sequence[HfSequence], progress: Callable[[], None]) -> None:
        """Read the prompts of new rows, and add the first token to each."""
        new = RowGroup(self._scoring, rows)
        self._draw(rows, new.read_prompts())
        progress()
        if self._groups and self._groups[0].can_join(new):
            self._groups[0].join(new)
        else:
            self._groups.append(new)

    @torch.inference_mode()
    def leave(self, rows: Sequence[HfSequence]) -> None:
        """Remove these rows."""
        for row in rows:
            next(group for group in self._groups if row in group.rows).leave(row)
        self._groups = [group for group in self._groups if any(group.rows)]

    def reset(self) -> None:
        """Remove all rows."""
        self._groups = []

    def _draw(self, rows: Sequence[HfSequence], scores: Tensor) -> None:
        """Choose each row's next token; a choice within rounding noise is recomputed from the row alone."""
        tokens, clear = _choose(rows, scores)
        for row, token, settled in zip(rows, tokens, clear, strict=True):
            if not settled and row.repeatable and self._exact:
                token = _choose([row], self._scoring.score_alone(row.tokens))[0][0]
            row.take(token)


def _choose(rows: Sequence[HfSequence], scores: Tensor) -> tuple[list[int], list[bool]]:
    wide = scores.to(torch.float64)
    if not bool(wide.amax(dim=-1).isfinite().all()):  # amax keeps NaN; single tokens may be excluded by -inf.
        raise InvalidOutput("The network's scores are not finite.")
    parameters = [[row.parameters.temperature, row.parameters.top_p, row.next_uniform()] for row in rows]
    temperature, top_p, uniform = torch.tensor(parameters, dtype=torch.float64, device=wide.device).unbind(1)
    choice = choose(wide, temperature, top_p, uniform)
    return choice.tokens, choice.clear
