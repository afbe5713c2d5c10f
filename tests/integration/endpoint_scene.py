"""An endpoint before a stand-in server, in a test's hands: items that are asked, and what came of them."""

import time
from collections.abc import Iterator, Sequence

import pytest

from endpoint_stand_in import StandIn, serving
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.backend import Endpoint
from gpu_pool.backends.openai_endpoint.requests import HandBack
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access
from scheduler.payload import PromptMessage, Task, encode_messages


class Reader:
    """A listener that keeps what it hears, and leaves after so many characters."""

    def __init__(self, leaves_after: int = 1_000_000) -> None:
        self.heard = ""
        self._leaves_after = leaves_after

    late = False

    @property
    def gone(self) -> bool:
        return len(self.heard) >= self._leaves_after

    def say(self, offset: int, text: str) -> None:
        assert offset == len(self.heard)
        self.heard += text


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A server without faults, for a test to spoil."""
    with serving(StandIn()) as server:
        yield server


def items(*texts: str, seconds: float = 10.0, **parameters: object) -> list[Item]:
    return [Item(text, dict(parameters), until=time.monotonic() + seconds) for text in texts]


def chat(text: str, listener: Reader | None = None, seconds: float = 10.0) -> Item:
    said = encode_messages([PromptMessage("user", text)])
    return Item(said, {}, Task.CHAT, listener, time.monotonic() + seconds)


async def answers(
    server: StandIn, *batches: Sequence[Item], access: Access | None = None
) -> list[list[ItemResult] | HandBack]:
    """What the endpoint makes of these batches, one after another."""
    endpoint = Endpoint(read_address(f"openai:{server.url}"), access or Access())
    try:
        await endpoint.load()
        return [await endpoint.answer(batch, lambda: None) for batch in batches]
    finally:
        await endpoint.close()


def codes(results: list[ItemResult] | HandBack) -> list[str]:
    assert not isinstance(results, HandBack)
    return [result.error_code for result in results]


def outputs(results: list[ItemResult] | HandBack) -> list[str]:
    assert not isinstance(results, HandBack)
    return [result.output for result in results]
