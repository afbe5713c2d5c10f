"""A causal language model: continues many prompts at once, each of which joins and leaves at a step of its own.

With float32 the result of a row depends on that row alone, not on the others, greedy or with a seed: a choice that
rounding could change is recomputed from the row's tokens alone (gpu_pool/backends/tiny/sampling.py). With shorter
number formats rounding exceeds any margin, and a long text may differ among other rows.

A prompt is a text, or a conversation in the tokenizer's template.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from gpu_pool.backends.backend import NO_EMBEDDINGS, Item, ItemResult
from gpu_pool.backends.generation import named_turns, prompt_of, read_parameters
from gpu_pool.backends.hf.decoding import HfDecoder, takes
from gpu_pool.backends.hf.json_file import Unusable
from gpu_pool.backends.hf.row import HfSequence
from gpu_pool.backends.stepping import RowLoop, run_all
from scheduler.context_length import ContextOverflow
from scheduler.errors import ErrorCode
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage

ENDLESS: Final = 1_000_000
"""Contexts from here on mean that transformers knows none."""

NEEDED: Final = ("past_key_values", "attention_mask")
"""Arguments that a network must accept."""

MOST_TOKENS = 4096
"""The largest `max_tokens`; the model's context limits it too."""


class PromptRefused(ValueError):
    """The tokenizer or its template cannot make a prompt; the message is a sentence for the client."""


class CausalModel:
    """The loaded model. Not thread-safe. `context`: the most tokens of a row, prompt included."""

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        device: torch.device,
        ends: frozenset[int],
        context: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        missing = [name for name in NEEDED if name not in takes(network)]
        if missing:
            raise Unusable(f"its network takes no {missing[0]}, so it cannot be run with a cache of keys and values")
        self._network = network
        self._tokenizer = tokenizer
        self._device = device
        self._ends = ends
        self._context = context
        self.context_tokens = context if context < ENDLESS else 0
        self._exact = network.dtype == torch.float32
        self._clock = clock
        self._decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        begins = tokenizer.bos_token_id
        # A model needs at least one token, also of an empty prompt.
        self._first = int(begins) if begins is not None else min(ends, default=0)
        self._templated = bool(getattr(tokenizer, "chat_template", None))

    def texts(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """A text for each item. Raises InvalidOutput if the network computes NaN or infinity."""
        return run_all(self.loop(), items, progress, len(items))

    def loop(self) -> RowLoop[HfSequence]:
        """A loop of its own, without rows."""
        decoder = HfDecoder(self._network, self._device, exact=self._exact)
        return RowLoop(decoder, self._prepare, self.vectors, self._clock)

    def vectors(self, items: Sequence[Item], _progress: Callable[[], None]) -> list[ItemResult]:
        """The states of a language model are no good measure of similarity, so embeddings are rejected."""
        return [NO_EMBEDDINGS] * len(items)

    def warmup(self) -> None:
        """Continue two prompts of different lengths by a few tokens."""
        few = {"max_tokens": 4}
        self.texts([Item("The", few), Item("Once upon a time", few)], lambda: None)

    def _prepare(self, item: Item) -> HfSequence | ItemResult:
        parameters = read_parameters(item, MOST_TOKENS)
        if isinstance(parameters, ItemResult):
            return parameters
        try:
            text = prompt_of(item, self._template if self._templated else named_turns)
        except PromptRefused as error:
            return ItemResult(str(error), 0, ErrorCode.INVALID_REQUEST)
        text = text.encode("utf-8", errors="replace").decode()  # The tokenizer takes no lone surrogates.
        # A template adds the special tokens itself.
        own_marks = item.task is Task.CHAT and self._templated
        tokens = self._tokenizer(text, add_special_tokens=not own_marks)["input_ids"] or [self._first]
        room = self._context - len(tokens)
        if room < 1:
            overflow = ContextOverflow(len(tokens), self._context - 1)
            return ItemResult(overflow.sentence(), 0, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
        parameters = replace(parameters, max_tokens=min(parameters.max_tokens, room))
        return HfSequence(tokens, parameters, self._ends, self._decode, listener=item.listener)

    def _template(self, messages: Sequence[PromptMessage]) -> str:
        # `developer` is OpenAI's newer name for `system`, which templates know.
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise PromptRefused("The model's chat template does not take these messages.") from error
