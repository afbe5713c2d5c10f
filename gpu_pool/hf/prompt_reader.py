"""From an item to the tokens that a causal model reads: a text as it is, a conversation in the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_pool.backends.backend import Item
from gpu_pool.prompts import named_turns, prompt_of
from scheduler.payload import Message, Task


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

    def _template(self, messages: Sequence[Message]) -> str:
        # `developer` is OpenAI's newer word for `system`, which templates know.
        said = [{"role": _role(message), "content": message.content} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise PromptRefused("The model's chat template does not take these messages.") from error


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role
