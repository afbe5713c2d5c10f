"""A causal language model: continues many prompts at once, one pass over the prompts, then one step a token.

With float32 the answer for a row depends on that row alone, whatever shares its batch, greedy or with a seed: a choice
that rounding could turn is made from the row's tokens without neighbours (gpu_pool/backends/tiny/sampling.py). With
shorter numbers rounding reaches further than any margin, and a long text may come out another way in another batch.

Prompts are a text as it is, or a conversation in the tokenizer's template. They are padded on the left, so that the
last column is every row's last token and new ones are put behind it; the mask hides the padding, and positions count
from each row's own first token.
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


class PromptRefused(ValueError):
    """The tokenizer or its template cannot make a prompt of this; the message is a sentence for the client."""


class PromptReader:
    """`first`: the token that an empty prompt begins with, since a model needs one to go on from."""

    def __init__(self, tokenizer: Any, first: int) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._templated = bool(getattr(tokenizer, "chat_template", None))

    def tokens(self, item: Item) -> list[int]:
        """At least one token. Raises PromptRefused."""
        text = prompt_of(item, self._template if self._templated else named_turns)
        # A template writes the marks that a text begins with by itself.
        own_marks = item.task is Task.CHAT and self._templated
        text = text.encode("utf-8", errors="replace").decode()  # The tokenizer takes no lone surrogates.
        ids: list[int] = self._tokenizer(text, add_special_tokens=not own_marks)["input_ids"]
        return ids or [self._first]

    def _template(self, messages: Sequence[PromptMessage]) -> str:
        # `developer` is OpenAI's newer word for `system`, which templates know.
        said = [{"role": _role(message), "content": message.content} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise PromptRefused("The model's chat template does not take these messages.") from error


def _role(message: PromptMessage) -> str:
    return "system" if message.role == "developer" else message.role


MOST_TOKENS = 4096
"""The largest `max_tokens`; the context of the model bounds it as well."""


class CausalModel:
    """The loaded model. Not for use by several threads at once. `context`: the most tokens of a row, prompt included."""

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
        """A text for each item. Raises InvalidOutput where the network computes what is no number."""
        return run_prepared(items, self._prepare, lambda rows: self._continued(rows, progress))

    def vectors(self, items: Sequence[Item], _progress: Callable[[], None]) -> list[ItemResult]:
        """A language model's states are no good measure of likeness, so there are none."""
        return [NO_EMBEDDINGS] * len(items)

    def warmup(self) -> None:
        """Continue two prompts of different lengths by a few tokens."""
        few = {"max_tokens": 4}
        self.texts([Item("The", few), Item("Once upon a time", few)], lambda: None)

    def _prepare(self, item: Item) -> HfSequence | ItemResult:
        wish = read_parameters(item, MOST_TOKENS)
        if isinstance(wish, ItemResult):
            return wish
        try:
            tokens = self._reader.tokens(item)
        except PromptRefused as error:
            return ItemResult(str(error), 0, ErrorCode.INVALID_REQUEST)
        room = self._context - len(tokens)
        if room < 1:
            long = f"The input has {len(tokens)} tokens; the model reads less than {self._context}."
            return ItemResult(long, 0, ErrorCode.INVALID_REQUEST)
        wish = replace(wish, max_tokens=min(wish.max_tokens, room))
        return HfSequence(tokens, wish, self._ends, self._decode, listener=item.listener, deadline=item.until)

    def _continued(self, rows: list[HfSequence], progress: Callable[[], None]) -> list[ItemResult]:
        self._run(rows, progress)
        return [TOO_LATE if row.late else as_result(row.result()) for row in rows]

    @torch.inference_mode()
    def _run(self, rows: list[HfSequence], progress: Callable[[], None]) -> None:
        """Draw tokens for all rows until each is finished."""
        decoding = Decoding(self._network, self._device)
        scores = decoding.read_prompts([row.tokens for row in rows])
        while True:
            self._draw(decoding, rows, scores)
            now = self._clock()
            for row in rows:
                row.give_up(now)
                row.speak()
            progress()
            rows = _leave(rows, decoding)
            if not rows:
                return
            scores = decoding.read_next([row.tokens[-1] for row in rows])

    def _draw(self, decoding: Decoding, rows: list[HfSequence], scores: Tensor) -> None:
        """Let each unfinished row take its next token; a choice that noise could turn is made from the row alone."""
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
    if not bool(wide.amax(dim=-1).isfinite().all()):  # NaN stays the largest; single tokens may be ruled out by -inf.
        raise InvalidOutput("The network's scores are not finite.")
    wishes = [[row.parameters.temperature, row.parameters.top_p, row.next_uniform()] for row in rows]
    temperature, top_p, uniform = torch.tensor(wishes, dtype=torch.float64, device=wide.device).unbind(1)
    choice = choose(wide, temperature, top_p, uniform)
    return choice.tokens, choice.clear


def _leave(rows: list[HfSequence], decoding: Decoding) -> list[HfSequence]:
    """Let finished rows leave once they are half of the batch: each leave copies the cache, so few are worth it."""
    staying = [index for index, row in enumerate(rows) if not row.finished]
    if staying and 2 * len(staying) > len(rows):
        return rows
    if staying:
        decoding.keep(staying)
    return [rows[index] for index in staying]
