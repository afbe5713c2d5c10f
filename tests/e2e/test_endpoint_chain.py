"""`openai:URL` before a real server: another stack's gateway, with the model that ships. It says what that model says."""

import asyncio
import time

import pytest

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.backend import EndpointBackend
from gpu_pool.backends.tiny.backend import TinyBackend
from gpu_pool.config import Access
from scheduler.payload import PromptMessage, Task, encode_messages, read_vector
from stack import Stack

FEW = {"max_tokens": 16, "temperature": 0}


class Reader:
    """A listener that keeps what it hears."""

    gone = False

    def __init__(self) -> None:
        self.heard = ""

    def say(self, offset: int, text: str) -> None:
        self.heard = self.heard[:offset] + text


def answered(backend: EndpointBackend | TinyBackend, items: list[Item]) -> list[ItemResult]:
    backend.load()
    try:
        return backend.run(items, lambda: None)
    finally:
        backend.close()


async def test_the_model_behind_an_endpoint_answers_as_it_does_here(
    tiny_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts as a list, a conversation, a stream, vectors, tokens: the same from afar as from the bare model."""
    said = encode_messages([PromptMessage("user", "Once upon a time")])
    reader, until = Reader(), time.monotonic() + 30
    items = [
        Item("The sea", FEW, until=until),
        Item("Once upon", FEW, until=until),
        Item(said, FEW, Task.CHAT, until=until),
        Item("The king", FEW, Task.COMPLETE, reader, until),
        Item("A cat.", {}, Task.EMBED, until=until),
    ]
    near = answered(TinyBackend("cpu", 1), [Item(each.input, each.parameters, each.task) for each in items])
    access = Access(api_key=tiny_stack.key("enterprise"))
    for name, text in access.environment().items():
        monkeypatch.setenv(name, text)

    far = await asyncio.to_thread(answered, EndpointBackend(f"openai:{tiny_stack.url}/v1#tiny"), items)

    assert [each.error_code for each in far] == [""] * 5
    assert [each.output for each in far[:4]] == [each.output for each in near[:4]]
    assert reader.heard == near[3].output
    assert read_vector(far[4].output) == pytest.approx(read_vector(near[4].output), abs=1e-4)
    tokens = [(each.tokens_used, each.output_tokens, each.finish_reason) for each in near]
    assert [(each.tokens_used, each.output_tokens, each.finish_reason) for each in far[2:4]] == tokens[2:4]
    assert sum(each.tokens_used for each in far[:2]) == sum(each.tokens_used for each in near[:2])
