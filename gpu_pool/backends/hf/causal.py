"""A causal language model: continues many prompts at once, one pass over the prompts, then one step for each token.

With float32 the result of a row depends on that row alone, not on its batch, greedy or with a seed: a choice that
rounding could change is recomputed from the row's tokens alone (gpu_pool/backends/tiny/sampling.py). With shorter
number formats rounding exceeds any margin, and a long text may differ in another batch.

A prompt is a text, or a conversation in the tokenizer's template. Prompts are padded on the left, so that the last
column is every row's last token and new ones are appended; the mask hides the padding, and positions count from each
row's own first token.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from gpu_pool.backends.backend import NO_EMBEDDINGS, TOO_LATE, InvalidOutput, Item, ItemResult
from gpu_pool.backends.generation import as_result, named_turns, prompt_of, read_parameters, run_prepared
from gpu_pool.backends.hf.directory import Unusable
from gpu_pool.backends.hf.row import HfSequence
from gpu_pool.backends.tiny.sampling import choose
from scheduler.errors import ErrorCode
from scheduler.payload import PromptMessage, Task

NEEDED: Final = ("past_key_values", "attention_mask")
"""Arguments that a network must accept."""


def takes(network: Any) -> frozenset[str]:
    """The arguments of the network's `forward`."""
    return frozenset(inspect.signature(network.forward).parameters)


class Decoding:
    """Runs the network: all prompts once, then one token of each row at a time. Scores are (rows, vocabulary)."""

    def __init__(self, network: Any, device: torch.device) -> None:
        self._network = network
        self._device = device
        taken = takes(network)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._positioned = "position_ids" in taken
        self._mask = torch.empty(0, 0, dtype=torch.long)
        self._cache: Any = None

    def read_prompts(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Score the next token of each prompt; every prompt has at least one token."""
        widest = max(map(len, prompts))
        tokens = [[0] * (widest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(mask, device=self._device)
        return self._step(torch.tensor(tokens, device=self._device))

    def read_next(self, tokens: Sequence[int]) -> Tensor:
        """Score the next token after one more token of each row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._step(torch.tensor(tokens, device=self._device).unsqueeze(1))

    def read_alone(self, tokens: Sequence[int]) -> Tensor:
        """Score the next token of one row (1, vocabulary), without cache or other rows: the same in every batch."""
        ids = torch.tensor([list(tokens)], device=self._device)
        last: Tensor = self._network(input_ids=ids, use_cache=False, **self._last_only).logits[:, -1]
        return last

    def keep(self, places: Sequence[int]) -> None:
        """Drop all rows except these."""
        chosen = torch.tensor(list(places), device=self._device)
        self._mask = self._mask[chosen]
        self._cache.batch_select_indices(chosen)

    def _step(self, ids: Tensor) -> Tensor:
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._network(
            input_ids=ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **({"position_ids": positions} if self._positioned else {}),
            **self._last_only,
        )
        self._cache = output.past_key_values
        last: Tensor = output.logits[:, -1]
        return last


class PromptRefused(ValueError):
    """The tokenizer or its template cannot make a prompt; the message is a sentence for the client."""


class PromptReader:
    """Makes the tokens of prompts. `first`: the token of an empty prompt, since a model needs one."""

    def __init__(self, tokenizer: Any, first: int) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._templated = bool(getattr(tokenizer, "chat_template", None))

    def tokens(self, item: Item) -> list[int]:
        """The prompt, at least one token. Raises PromptRefused."""
        text = prompt_of(item, self._template if self._templated else named_turns)
        # A template adds the special tokens itself.
        own_marks = item.task is Task.CHAT and self._templated
        text = text.encode("utf-8", errors="replace").decode()  # The tokenizer takes no lone surrogates.
        ids: list[int] = self._tokenizer(text, add_special_tokens=not own_marks)["input_ids"]
        return ids or [self._first]

    def _template(self, messages: Sequence[PromptMessage]) -> str:
        # `developer` is OpenAI's newer name for `system`, which templates know.
        turns = [{"role": _role(message), "content": message.content} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise PromptRefused("The model's chat template does not take these messages.") from error


def _role(message: PromptMessage) -> str:
    return "system" if message.role == "developer" else message.role


MOST_TOKENS = 4096
"""The largest `max_tokens`; the model's context limits it too."""


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
        self._exact = network.dtype == torch.float32
        self._clock = clock
        self._reader = PromptReader(tokenizer, _first_token(tokenizer, ends))

    def texts(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """A text for each item. Raises InvalidOutput if the network computes NaN or infinity."""
        return run_prepared(items, self._prepare, lambda rows: self._continued(rows, progress))

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
            tokens = self._reader.tokens(item)
        except PromptRefused as error:
            return ItemResult(str(error), 0, ErrorCode.INVALID_REQUEST)
        room = self._context - len(tokens)
        if room < 1:
            long = f"The input has {len(tokens)} tokens; the model reads less than {self._context}."
            return ItemResult(long, 0, ErrorCode.INVALID_REQUEST)
        parameters = replace(parameters, max_tokens=min(parameters.max_tokens, room))
        return HfSequence(tokens, parameters, self._ends, self._decode, listener=item.listener, deadline=item.until)

    def _continued(self, rows: list[HfSequence], progress: Callable[[], None]) -> list[ItemResult]:
        self._run(rows, progress)
        return [TOO_LATE if row.late else as_result(row.result()) for row in rows]

    @torch.inference_mode()
    def _run(self, rows: list[HfSequence], progress: Callable[[], None]) -> None:
        """Add tokens to all rows until each is finished."""
        decoding = Decoding(self._network, self._device)
        scores = decoding.read_prompts([row.tokens for row in rows])
        while True:
            self._draw(decoding, rows, scores)
            now = self._clock()
            for row in rows:
                row.give_up(now)
                row.stream()
            progress()
            rows = _drop_finished(rows, decoding)
            if not rows:
                return
            scores = decoding.read_next([row.tokens[-1] for row in rows])

    def _draw(self, decoding: Decoding, rows: list[HfSequence], scores: Tensor) -> None:
        """Choose each unfinished row's next token; a choice within rounding noise is recomputed from the row alone."""
        live = [index for index, row in enumerate(rows) if not row.finished]
        drawing = [rows[index] for index in live]
        tokens, clear = _choose(drawing, scores[live])
        for row, token, settled in zip(drawing, tokens, clear, strict=True):
            if not settled and row.repeatable and self._exact:
                token = _choose([row], decoding.read_alone(row.tokens))[0][0]
            row.take(token)

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def _first_token(tokenizer: Any, ends: frozenset[int]) -> int:
    begins = tokenizer.bos_token_id
    return int(begins) if begins is not None else min(ends, default=0)


def _choose(rows: list[HfSequence], scores: Tensor) -> tuple[list[int], list[bool]]:
    wide = scores.to(torch.float64)
    if not bool(wide.amax(dim=-1).isfinite().all()):  # amax keeps NaN; single tokens may be excluded by -inf.
        raise InvalidOutput("The network's scores are not finite.")
    parameters = [[row.parameters.temperature, row.parameters.top_p, row.next_uniform()] for row in rows]
    temperature, top_p, uniform = torch.tensor(parameters, dtype=torch.float64, device=wide.device).unbind(1)
    choice = choose(wide, temperature, top_p, uniform)
    return choice.tokens, choice.clear


def _drop_finished(rows: list[HfSequence], decoding: Decoding) -> list[HfSequence]:
    """Remove finished rows once they are half of the batch: each removal copies the cache."""
    staying = [index for index, row in enumerate(rows) if not row.finished]
    if staying and 2 * len(staying) > len(rows):
        return rows
    if staying:
        decoding.keep(staying)
    return [rows[index] for index in staying]
